"""`Server`: answers "which window holds this element" and has windows read ahead.

The feed's whole behaviour but for Ray: how a window is read, and what stands for its rows, is
given (elastic/on_ray/feed/actor.py: Ray tasks and object references).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.data.ahead import Ahead
from elastic.data.reading import Skipped
from elastic.data.record import NAME, FeedRecord
from elastic.data.stream import Span, Stream, WindowKey
from elastic.protocol.errors import BadData

RECORD_WAIT_S, RECORD_RETRY_S = 60.0, 1.0
"""How long a window waits for its record to be written, where row groups were left out of it."""


@dataclass(frozen=True, slots=True)
class Read:
    """A window has been read."""

    rows: Any
    """What workers are given for it."""
    count: int
    size_bytes: int
    skipped: Sequence[Skipped]
    checksums: Mapping[int, int] = field(default_factory=dict[int, int])
    """Unit -> of its bytes."""


ReadWindow = Callable[[WindowKey, tuple[int, ...], dict[int, int]], Awaitable[Read]]
"""A window, but for these units, compared with these checksums; raises BadData."""


class Server:
    """Windows of one plan, in any order that workers ask for. One event loop's."""

    def __init__(
        self,
        record: FeedRecord,
        read: ReadWindow,
        note: Callable[[dict[str, Any]], None],
        end: int | None = None,
    ) -> None:
        """note: what has to go into the journal. end: elements that the run uses at most."""
        self.record, self._read, self._note = record, read, note
        stream = Stream(record.plan)
        for key, count in record.counts.items():
            stream.record(key, count)
        self.ahead = Ahead(record.plan, stream, end=end)
        self._reads: dict[WindowKey, asyncio.Task[Read]] = {}
        self._rows: dict[WindowKey, Any] = {}
        self._front: tuple[WindowKey, WindowKey] | None = None

    async def window_at(self, element: int, committed: int) -> tuple[Span, Any]:
        """The window that holds an element of the stream, and its rows; read first if need be.

        committed: elements before it will not be asked for again, unless the run goes back.
        BadData as reading raises it.
        """
        stream = self.ahead.stream
        while True:
            found = stream.find(element)
            behind = stream.find(min(element, committed))
            self._front = (_key(behind), _key(found))
            self._take_turn(*self._front)
            if isinstance(found, Span) and found.key in self._rows:
                rows = self._rows[found.key]
                await self._settle()
                return found, rows
            read = await asyncio.shield(self._reads[_key(found)])
            again = stream.find(element)
            if isinstance(again, Span) and again.key == _key(found):  # even if it had to go since
                await self._settle()
                return again, read.rows

    async def _settle(self) -> None:
        """Nobody uses a window before the run directory knows what has been left out: a feed that
        is started again must leave out the same. (A run that has no directory yet has no step.)
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RECORD_WAIT_S
        while not self.record.has_published_skips:
            try:
                await asyncio.to_thread(self.record.write)
                return
            except OSError as error:
                if loop.time() > deadline:
                    what = f"cannot be written, and row groups were left out: {error}"
                    raise BadData(NAME, what) from error
            await asyncio.sleep(RECORD_RETRY_S)

    def _take_turn(self, oldest: WindowKey, needed: WindowKey) -> None:
        turn = self.ahead.turn(oldest, needed)
        for key in turn.forget:
            self._rows.pop(key, None)
        for key in turn.start:
            task = asyncio.create_task(self._read_one(key))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # said to who waits
            self._reads[key] = task

    async def _read_one(self, key: WindowKey) -> Read:
        try:
            left_out = self.record.skipped.get(key, ())
            read = await self._read(key, left_out, self.record.checksums_of(key))
            new = [s for s in read.skipped if s.problem]
            if new and key in self.record.counts:
                what = "was read before, and cannot be left out now"
                raise BadData(new[0].problem, what)
            self.ahead.stream.record(key, read.count)
        except BaseException:
            self.ahead.failed(key)
            raise
        finally:
            del self._reads[key]
        self.record.keep(read.checksums)
        self._rows[key] = read.rows
        self.ahead.read(key, read.size_bytes)
        if self.record.add(key, read.count, (s.unit for s in read.skipped)):
            for each in read.skipped:
                where = {"epoch": key.epoch, "window": key.window}
                so_far = self.record.num_left_out
                self._note({"skipped": each.problem, **where, "row_groups_left_out": so_far})
        if self._front is not None:
            self._take_turn(*self._front)
        return read


def _key(found: Span | WindowKey) -> WindowKey:
    return found if isinstance(found, WindowKey) else found.key
