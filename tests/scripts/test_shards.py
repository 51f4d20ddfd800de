"""A rank's shard of a data set, without Ray running: what stands for a block is the block."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
import ray

from elastic.data.dealt import ROWS_AT_ONCE
from elastic.data.passes import Answer, Block, End, Found, Piece
from elastic.data.place import Places
from elastic.on_ray.feed.datasets import Datasets
from elastic.on_ray.feed.shard import Seat, Shard
from elastic.on_ray.train_api import CallUtils
from elastic.protocol.errors import StepCancelled
from tests.scripts.test_units import Listening
from workers.distributed.process_group import Alone
from workers.scripts.default_group import DefaultGroup
from workers.scripts.in_place.course import Course

RANKS, BLOCK_ROWS = 2, 300
ROWS = 2 * RANKS * ROWS_AT_ONCE + 7
"""More than two rounds of all ranks."""


class Feed:
    """Gives the rows 0, 1, 2 and so on in small blocks."""

    def __init__(self) -> None:
        self.actor = SimpleNamespace(
            blocks_at=SimpleNamespace(remote=lambda _, row, *others: Answer(0, blocks_from(row))),
            leave=SimpleNamespace(remote=lambda _: None),
        )

    def start_again(self) -> None:
        raise AssertionError("it does not die")


def blocks_from(row: int) -> Found:
    first = row // BLOCK_ROWS * BLOCK_ROWS
    if row >= ROWS:
        return End(ROWS)
    stop = min(first + BLOCK_ROWS, ROWS)
    table = pa.table({"id": range(first, stop)})
    return [Block(first, Piece(table, 0, stop - first, table.nbytes))]


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank's, in a call of its own."""
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)

    def shard_of(rank: int) -> Shard:
        seat = Seat(call=1, rank=rank, ranks=RANKS, run="r", check=lambda: None)
        return Shard("train", Feed(), seat, Places(), is_split=True)

    return shard_of


def ids(rows: Iterator[Any]) -> list[int]:
    return [row["id"] for row in rows]


def test_rows_one_by_one_go_on_where_they_were_beyond_the_first_round(shards):
    taken = ROWS_AT_ONCE + 100
    used: list[int] = []
    states: list[dict[str, int]] = []
    for rank in range(RANKS):
        shard = shards(rank)
        with closing(iter(shard.iter_rows())) as rows:
            used += ids(islice(rows, taken))
            states.append(shard.state_dict())
    assert [state["row"] for state in states] == [RANKS * taken] * RANKS
    for rank in range(RANKS):
        shard = shards(rank)
        shard.load_state_dict(states[0])
        used += ids(shard.iter_rows())
    assert sorted(used) == list(range(ROWS))


@pytest.mark.parametrize("num_losses", [0, 1], ids=["before a loss", "after a loss"])
def test_after_a_loss_in_place_no_shard_is_dealt_for_the_ranks_of_before(num_losses):
    """The lost one's share would be read by nobody: the script is called again, and deals anew."""
    course = Course("shards", DefaultGroup(Alone("shards")), Listening())
    course.operations.num_losses = num_losses
    call = SimpleNamespace(
        course=course,
        generation=1,
        place=SimpleNamespace(
            rank=0, world_size=RANKS, local_rank=0, local_world_size=RANKS, node_rank=0
        ),
        loop=SimpleNamespace(name="r"),
        reports=SimpleNamespace(folder=None, passes=Places()),
        check=lambda: None,
        newest_checkpoint=lambda: None,
    )
    datasets = Datasets(packed=b"", split=("train",), whole=(), folder=None)
    utils = CallUtils(cast(Any, call), datasets)
    utils._feed = cast(Any, Feed())
    asked = SimpleNamespace(dataset_name="train")
    if not num_losses:
        assert repr(utils.get_dataset_shard(asked)) == "Shard('train', rank 0 of 2)"
        assert "not dealt again" in course.refusal
        return
    with pytest.raises(StepCancelled):
        utils.get_dataset_shard(asked)
    assert "and a rank is lost" in cast(Any, course._regrouping).denied
