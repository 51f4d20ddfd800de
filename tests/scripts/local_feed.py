"""Rows of Ray Data without Ray running: what stands for a block is the block."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import ray

from elastic.data.passes import Answer, Block, End, Found, Piece
from elastic.on_ray.feed import passes_actor
from elastic.on_ray.feed.datasets import Datasets
from elastic.on_ray.train_api import answering
from tests.scripts.counting import SAMPLES

DATASETS = Datasets(packed=b"", split=("train",), whole=(), folder=None)


class Feed:
    """Gives the rows 0, 1, 2 and so on in small blocks."""

    def __init__(self, num_rows: int, block_rows: int) -> None:
        self._num_rows, self._block_rows = num_rows, block_rows
        self.left: list[tuple[int, tuple[int, ...]]] = []
        """Calls, and who is left of them, as it was told."""
        self.actor = SimpleNamespace(
            blocks_at=SimpleNamespace(remote=lambda _, row, *others: self._answer(row)),
            leave=SimpleNamespace(remote=lambda _: None),
            hear=SimpleNamespace(remote=lambda *said: self.left.append(said)),
        )

    def start_again(self) -> None:
        raise AssertionError("it does not die")

    def _answer(self, row: int) -> Answer:
        return Answer(0, self._found(row))

    def _found(self, row: int) -> Found:
        if row >= self._num_rows:
            return End(self._num_rows)
        first = row // self._block_rows * self._block_rows
        stop = min(first + self._block_rows, self._num_rows)
        table = pa.table({"id": range(first, stop)})
        return [Block(first, Piece(table, 0, stop - first, table.nbytes))]


@contextmanager
def answering_with_rows(call: Any) -> Iterator[None]:
    """In a worker's process: the data set "train" has a row for each sample of counting.py."""
    ray.get = lambda reference, timeout: reference
    passes_actor.PassesFeed = lambda *_: Feed(SAMPLES, 11)  # type: ignore[misc, assignment]
    with answering(call, DATASETS):
        yield
