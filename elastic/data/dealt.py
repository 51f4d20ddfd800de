"""A rank's batches of a pass: its rows of the blocks that all ranks are given.

What a block is, is not known here: it is cut by functions that are given (Ray Data's blocks:
elastic/on_ray/feed/blocks.py). Which rows they are is rounds.py's.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from elastic.data.passes import Block, End, Found
from elastic.data.portions import Behind, Dealing, Portion, Spans
from elastic.data.rounds import LocalShuffle

ROWS_AT_ONCE = 512
"""Of each rank, where rows are dealt one by one."""
POLL_S = 0.02
ENDS_S = 5.0
T = TypeVar("T")


class Cut(Protocol):
    """How blocks are taken apart and put together."""

    def slice(self, block: Any, first: int, stop: int) -> Any: ...
    def take(self, block: Any, rows: NDArray[np.int64]) -> Any: ...
    def join(self, blocks: Sequence[Any]) -> Any: ...


class Rows:
    """The rows of a pass by their numbers: blocks are fetched in order, and kept while needed."""

    def __init__(self, fetch: Callable[[int], Found], cut: Cut, first: int) -> None:
        """fetch: the blocks from the one that holds a row on, some of them. first: what lies before
        this row is never asked for."""
        self._fetch, self._cut = fetch, cut
        self._held: deque[Block] = deque()
        self._stop = first
        self._num_rows: int | None = None

    def ends_before(self, row: int) -> int | None:
        """The number of rows of the pass if it has less than so many, else None."""
        while self._stop < row and self._num_rows is None:
            found = self._fetch(self._stop)
            if isinstance(found, End):
                self._num_rows = found.num_rows
            else:
                self._held += found
                self._stop = found[-1].stop
        return self._num_rows if self._num_rows is not None and self._num_rows < row else None

    def stop_of_block(self, row: int) -> int:
        """The row behind the block that holds this one, or behind the pass."""
        if (end := self.ends_before(row + 1)) is not None:
            return end
        return next(block.stop for block in self._held if block.stop > row)

    def forget_before(self, row: int) -> None:
        while self._held and self._held[0].stop <= row:
            self._held.popleft()

    def slice(self, rows: range) -> Any:
        """Consecutive rows, as a block."""
        self.ends_before(rows.stop)
        parts: list[Any] = []
        for block in self._held:
            first, stop = max(rows.start, block.first), min(rows.stop, block.stop)
            if first < stop:
                at = block.piece.offset - block.first
                parts.append(self._cut.slice(block.piece.block, first + at, stop + at))
        return parts[0] if len(parts) == 1 else self._cut.join(parts)

    def take(self, rows: NDArray[np.int64]) -> Any:
        """Any rows, in the order in which they are named."""
        self.ends_before(int(rows.max()) + 1)
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        parts: list[Any] = []
        for block in self._held:
            first, stop = np.searchsorted(ascending, (block.first, block.stop))
            if first < stop:
                inside = ascending[first:stop] - block.first + block.piece.offset
                parts.append(self._cut.take(block.piece.block, inside))
        joined = parts[0] if len(parts) == 1 else self._cut.join(parts)
        if (order[:-1] < order[1:]).all():
            return joined
        return self._cut.take(joined, np.argsort(order, kind="stable"))


class Dealt(NamedTuple):
    """A batch of this rank's."""

    block: Any
    """None behind the last one."""
    of: Portion


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How a rank wants its share of a pass."""

    reader: int
    ranks: int
    """That the script was called with."""
    batch_size: int | None
    """Rows; None: each block of the data set is a round."""
    drop_last: bool = False
    is_row_by_row: bool = False
    shuffle: LocalShuffle | None = None

    def batches(self, rows: Rows, behind: Behind) -> Iterator[Dealt]:
        """The rest of the pass, in order. Raises TooFewRows."""
        dealing = Dealing(
            ranks=self.ranks,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            next_end=partial(self._next_end, rows),
            ends_before=rows.ends_before,
        )
        oldest = behind.oldest
        furthest = max((loss.furthest for loss in behind.losses), default=-1)
        for portion in dealing.rest(behind):
            if not portion.spans:
                yield Dealt(None, portion)
                return
            rows.forget_before(self.oldest_row(oldest))
            yield Dealt(self._block(rows, portion), portion)
            if portion.iteration > furthest:  # until then the lost may have had some of it
                oldest = min([portion.stop, *(span.start for span in portion.missing)])

    def oldest_row(self, position: int) -> int:
        """No row before this one is at this position or at a later one."""
        return position if self.shuffle is None else self.shuffle.oldest(position)

    def _block(self, rows: Rows, portion: Portion) -> Any:
        if self.is_row_by_row:
            index, num = portion.readers.index(self.reader), len(portion.readers)
            return rows.take(self._rows(portion.spans)[index::num])
        mine = portion.share(self.reader)
        if self.shuffle is None and len(mine) == 1:
            return rows.slice(mine[0])
        return rows.take(self._rows(mine))

    def _rows(self, spans: Spans) -> NDArray[np.int64]:
        """At these positions."""
        of = np.asarray if self.shuffle is None else self.shuffle.rows
        return np.concatenate([of(span) for span in spans])

    def _next_end(self, rows: Rows, first: int) -> int:
        if self.batch_size is None:
            return rows.stop_of_block(first + self.ranks - 1)
        return first + self.batch_size * self.ranks


def ahead(
    items: Callable[[Callable[[], None]], Iterator[T]], depth: int, check: Callable[[], None]
) -> Generator[T, None, None]:
    """What `items` gives, so many of them ahead, in a thread that ends when this is closed.

    items: its argument is to be called while it waits, and raises what ends it. check: called in
    the caller's thread while that waits; may raise.
    """
    if depth < 1:
        yield from items(check)
        return
    thread = Ahead(items, depth)
    try:
        while True:
            try:
                item, error = thread.ready.get(timeout=POLL_S)
            except queue.Empty:
                check()
                continue
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        thread.close()


class Closed(Exception):
    """Nobody wants what would come next."""


class Ahead:
    """The thread of `ahead`, and what it has ready."""

    def __init__(self, items: Callable[[Callable[[], None]], Iterator[Any]], depth: int) -> None:
        self.ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._items, self._is_closed = items, threading.Event()
        self._thread = threading.Thread(target=self._run, name="rows ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        if threading.current_thread() is not self._thread:  # whose garbage collection this may be
            self._thread.join(ENDS_S)

    def _run(self) -> None:
        try:
            for item in self._items(self._stay):
                self._put(item, None)
                self._stay()
            self._put(None, StopIteration())
        except Closed:
            pass
        except BaseException as error:
            self._put(None, error)
        finally:
            del self._items  # and what it holds of the pass

    def _put(self, item: Any, error: BaseException | None) -> None:
        while not self._is_closed.is_set():
            with suppress(queue.Full):
                self.ready.put((item, error), timeout=POLL_S)
                return

    def _stay(self) -> None:
        if self._is_closed.is_set():
            raise Closed
