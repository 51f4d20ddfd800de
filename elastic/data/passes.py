"""Passes over data sets that give their rows in blocks, in one order, from the first to the last.

Ranks that share a pass ask one `PassServer` for its blocks, and each takes its rows of them
(rounds.py). How a data set is executed, and what stands for a block, is given: Ray Data and object
references (elastic/on_ray/feed/passes_actor.py), or a test's.
"""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

ALL = -1
"""The reader of a pass that all ranks share; else the rank that has it alone."""
GONE = 1 << 62
"""Where a rank is that asks for nothing more."""
AHEAD, AHEAD_BYTES = 64, 64 << 20
"""Blocks that are executed ahead of the rank that is furthest, and their size together, which the
last one may exceed. As many are given in one answer at most."""


class Piece(NamedTuple):
    """Some consecutive rows of a block."""

    block: Any
    offset: int
    """The row of the block at which they begin."""
    num_rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """A piece, in its place in the pass."""

    first: int
    piece: Piece

    @property
    def stop(self) -> int:
        return self.first + self.piece.num_rows


@dataclass(frozen=True, slots=True)
class End:
    """The pass has no such row."""

    num_rows: int


Found: TypeAlias = list[Block] | End
Execute: TypeAlias = Callable[[str], Iterator[Piece]]
"""A data set, by its name, from its first row; a generator that is closed when it is done with. It
is called, and waits for its data, in a thread of its own."""


class CallOver(Exception):
    """Whoever asks is of a call of the script that is over."""


class WalkOver(Exception):
    """Another walk has taken the place of this one."""


class Walk:
    """One execution of a data set, in a thread. All else is of one event loop."""

    def __init__(self, execute: Callable[[], Iterator[Piece]], first: int) -> None:
        """first: what lies before this row is not wanted."""
        self._execute, self._wanted = execute, first
        self._loop = asyncio.get_running_loop()
        self._held: deque[Block] = deque()
        self._end, self._asked = 0, first
        """The rows behind what has been executed, and behind what any rank has been given."""
        self._outcome: BaseException | None = None
        """StopIteration: that is all."""
        self._news = asyncio.Event()
        self._has_room, self._is_closed = threading.Event(), False
        self._has_room.set()
        threading.Thread(target=self._run, name="data set", daemon=True).start()

    def reaches_back_to(self, row: int) -> bool:
        """Whether it can still give this row."""
        return row >= self._wanted

    async def at(self, row: int) -> Found:
        """What holds a row, and what follows it and is there. Raises WalkOver, and what the
        execution raises."""
        self._asked = max(self._asked, row)
        while True:
            if self._is_closed:
                raise WalkOver
            if found := self._from(row):
                self._asked = max(self._asked, found[-1].stop)
                self._make_room()
                return found
            if isinstance(self._outcome, StopIteration):
                return End(self._end)
            if self._outcome is not None:
                raise self._outcome
            self._make_room()
            self._news.clear()
            await self._news.wait()

    def forget_before(self, row: int) -> None:
        self._wanted = max(self._wanted, row)
        while self._held and self._held[0].stop <= self._wanted:
            self._held.popleft()

    def close(self) -> None:
        self._held.clear()
        self._is_closed = True
        self._has_room.set()
        self._news.set()

    def _from(self, row: int) -> list[Block]:
        found: list[Block] = []
        size_bytes = 0
        for block in self._held:
            if block.stop > row:
                size_bytes += block.piece.size_bytes
                if len(found) == AHEAD or (found and size_bytes > AHEAD_BYTES):
                    break
                found.append(block)
        return found

    def _make_room(self) -> None:
        ahead = [block.piece.size_bytes for block in self._held if block.first >= self._asked]
        if len(ahead) < AHEAD and sum(ahead) < AHEAD_BYTES:
            self._has_room.set()

    def _come(self, piece: Piece | None, outcome: BaseException | None) -> None:
        """In the event loop: what the thread has got, piece by piece."""
        if self._is_closed:
            return
        if piece is not None:
            block = Block(self._end, piece)
            self._end = block.stop
            if piece.num_rows and block.stop > self._wanted:
                self._held.append(block)
        self._outcome = outcome
        self._news.set()
        self._make_room()

    def _run(self) -> None:
        """In the thread: one piece for each time that there is room."""
        pieces: Iterator[Piece] = iter(())
        try:
            pieces = self._execute()
            while self._has_room.wait() and not self._is_closed:
                self._has_room.clear()
                self._tell(next(pieces), None)
        except BaseException as error:
            self._tell(None, error)
        finally:
            if (close := getattr(pieces, "close", None)) is not None:
                close()

    def _tell(self, piece: Piece | None, outcome: BaseException | None) -> None:
        with suppress(RuntimeError):  # the event loop is no more
            self._loop.call_soon_threadsafe(self._come, piece, outcome)


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one pass, by one rank."""

    call: int
    """Of the script: grows from one to the next."""
    dataset: str
    reader: int
    """ALL, or the rank that has this pass alone."""
    number: int
    """Of the pass."""
    first: int
    """The row at which this pass begins in this call."""
    rank: int
    readers: tuple[int, ...]
    """The ranks of this call that are left, as far as this one knows."""


class Answer(NamedTuple):
    """What a rank is given."""

    walk: int
    """The number of the execution that it comes from."""
    found: Found


@dataclass(slots=True)
class Shared:
    """A walk, and how far each rank is."""

    number: int
    walk: Walk
    rows: dict[int, int] = field(default_factory=dict[int, int])

    def needed(self, readers: Collection[int]) -> int | None:
        """No reader needs what lies before this row; None: not all of them have begun."""
        if not self.rows.keys() >= set(readers):
            return None
        return min((self.rows[reader] for reader in readers), default=GONE)


class PassServer:
    """The passes of one run; of one event loop."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._call = -1
        self._readers: frozenset[int] = frozenset()
        """The ranks of this call that are left."""
        self._numbers = itertools.count()
        self._shared: dict[tuple[str, int, int], Shared] = {}

    @property
    def num_walks(self) -> int:
        return len(self._shared)

    async def blocks_at(
        self, reading: Reading, row: int, lost: int | None = None, needed: int = GONE
    ) -> Answer:
        """What holds a row of a pass.

        lost: the walk whose blocks cannot be had any more, if this rank has met such a one. needed:
        what lies before this row and that one it needs no more. Raises CallOver, and what the
        execution raises.
        """
        key = (reading.dataset, reading.reader, reading.number)
        needed = min(row, needed)
        while True:
            self.hear(reading.call, reading.readers)
            shared = self._shared.get(key)
            if shared is None or shared.number == lost or not shared.walk.reaches_back_to(row):
                shared = self._shared[key] = self._begun(reading, needed, shared)
            shared.rows[reading.rank] = needed
            self._forget(key)
            try:
                return Answer(shared.number, await shared.walk.at(row))
            except WalkOver:
                if key not in self._shared and reading.call == self._call:
                    return Answer(shared.number, End(0))  # all have left, whoever asked ahead too

    def _begun(self, reading: Reading, row: int, before: Shared | None) -> Shared:
        """A new walk; before: the one that it takes the place of."""
        first = None
        if before is not None:
            before.walk.close()
            first = before.needed(self._sharing(reading.reader))
        walk = Walk(
            lambda: self._execute(reading.dataset),
            min(row, reading.first if first is None else first),
        )
        rows = {} if before is None else before.rows
        return Shared(next(self._numbers), walk, rows)

    def leave(self, reading: Reading) -> None:
        """A rank is done with a pass."""
        key = (reading.dataset, reading.reader, reading.number)
        if reading.call != self._call or (shared := self._shared.get(key)) is None:
            return
        shared.rows[reading.rank] = GONE
        self._forget(key)

    def hear(self, call: int, readers: Collection[int]) -> None:
        """Of a call, no other ranks are left than these: nothing is kept for the others. Raises
        CallOver."""
        if call < self._call:
            raise CallOver
        if call > self._call:
            self.end()
            self._call, self._readers = call, frozenset(readers)
        elif not self._readers <= set(readers):
            self._readers &= set(readers)
            for key in list(self._shared):
                self._forget(key)

    def _sharing(self, reader: int) -> frozenset[int]:
        """The ranks that read what this one of `Reading` says."""
        return self._readers if reader == ALL else self._readers & {reader}

    def _forget(self, key: tuple[str, int, int]) -> None:
        """What all readers have had; a pass that all have left is over."""
        shared = self._shared[key]
        needed = shared.needed(self._sharing(key[1]))
        if needed == GONE:
            self._shared.pop(key).walk.close()
        elif needed is not None:
            shared.walk.forget_before(needed)

    def end(self) -> None:
        for shared in self._shared.values():
            shared.walk.close()
        self._shared.clear()
