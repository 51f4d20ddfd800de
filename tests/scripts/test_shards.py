"""A rank's shard of a data set, without Ray running: what stands for a block is the block."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from elastic.data.dealt import ROWS_AT_ONCE
from elastic.data.place import Places
from elastic.data.portions import Loss, Portion
from elastic.on_ray.feed.datasets import Datasets
from elastic.on_ray.feed.shard import Seat, Shard
from elastic.on_ray.train_api import CallUtils
from elastic.protocol.errors import StepCancelled
from tests.scripts.local_feed import DATASETS, Feed
from tests.scripts.test_units import Listening
from workers.distributed.process_group import Alone
from workers.scripts.default_group import DefaultGroup
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.loader import Loaders

RANKS, BLOCK_ROWS = 2, 300
ROWS = 2 * RANKS * ROWS_AT_ONCE + 7
"""More than two rounds of all ranks."""
BATCH, FEW_ROWS = 4, 61
"""Seven rounds of two ranks, and a shorter one."""


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank's, in a call of its own."""
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)

    def shard_of(rank: int) -> Shard:
        seat = Seat(call=1, rank=rank, ranks=RANKS, run="r", check=lambda: None)
        return Shard("train", Feed(ROWS, BLOCK_ROWS), seat, Places(), is_split=True)

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


@pytest.fixture
def course() -> Course:
    """Of one rank of two, before and after the other one's loss."""
    return Course("shards", DefaultGroup(Alone("shards")), Listening())


@pytest.fixture
def utils(course, monkeypatch) -> CallUtils:
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)

    def call_again(why: str) -> None:
        raise StepCancelled(why)

    call = SimpleNamespace(
        course=course,
        loaders=Loaders(course),
        generation=1,
        place=SimpleNamespace(
            rank=0, world_size=RANKS, local_rank=0, local_world_size=RANKS, node_rank=0
        ),
        loop=SimpleNamespace(name="r"),
        reports=SimpleNamespace(folder=None, passes=Places()),
        check=lambda: None,
        newest_checkpoint=lambda: None,
        call_again=call_again,
    )
    course.member, course.members, course.num_ranks = 0, (0, 1), RANKS
    utils = CallUtils(cast(Any, call), DATASETS)
    utils._feed = cast(Any, Feed(FEW_ROWS, BLOCK_ROWS))
    return utils


def shard_of(utils: CallUtils) -> Any:
    return utils.get_dataset_shard(SimpleNamespace(dataset_name="train"))


def lose_other(course: Course) -> None:
    """As course.py does it, once the members that are left have told each other where they are."""
    (at,) = course.stand().passes
    loss = Loss(course.members, (0,), at.drawn, at.counted)
    course.losses.setdefault(at.loader, []).append((at.number, loss))
    for loader in course.loaders:
        loader.lose(at.loader, at.number, loss)
    course.operations.num_losses += 1
    course.members = (0,)


def batches_of(shard: Any) -> Iterator[list[int]]:
    return (batch["id"].tolist() for batch in shard.iter_batches(batch_size=BATCH))


def test_after_a_loss_the_rows_of_the_other_rank_come_here_in_as_many_batches(course, utils):
    shard = shard_of(utils)
    assert repr(shard) == "Shard('train', rank 0 of 2)"
    batches = batches_of(shard)
    assert [next(batches), next(batches)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    course.loaders[0].begin_forward()
    assert course.loaders[0].count(is_training=True, members=(0, 1)) == 4 * BATCH
    assert next(batches) == [16, 17, 18, 19]
    lose_other(course)
    assert shard.state_dict()["missing"] == ((20, 24),)
    assert cast(Any, utils._feed).left == [(1, (0,))]
    assert next(batches) == [*range(24, 32), 20], "a batch grows to twice its size, and one row"
    assert shard.state_dict() == {
        "number": 0,
        "row": 32,
        "window": 0,
        "missing": ((21, 24),),
    }
    rest = list(batches)
    assert sorted(row for batch in rest for row in batch) == [21, 22, 23, *range(32, FEW_ROWS)]
    assert course.stand().passes[0].drawn == 3 + len(rest) + 1, "it is beyond its end"
    assert repr(shard) == "Shard('train', rank 0 of 1)"
    assert next(iter(batches_of(shard))) == [*range(8)], "the next pass is whole"


def test_a_state_that_a_loss_has_left_rows_out_of_goes_on_with_them(course, utils):
    shard = shard_of(utils)
    shard.load_state_dict({"number": 0, "row": 40, "window": 0, "missing": [[4, 6], [20, 24]]})
    lose_other(course)
    used = [row for batch in batches_of(shard) for row in batch]
    assert sorted(used) == [4, 5, *range(20, 24), *range(40, FEW_ROWS)]


def test_what_is_not_read_in_batches_is_not_dealt_again(course, utils):
    shard = shard_of(utils)
    assert course.refusal == ""
    rows = iter(shard.iter_rows())
    assert next(rows)["id"] == 0
    assert "iter_batches" in course.refusal
    lose_other(course)
    with pytest.raises(StepCancelled):
        next(iter(shard.iter_rows()))
    assert "and a rank is lost" in cast(Any, course._regrouping).denied


def test_too_few_rows_at_the_end_of_a_pass_have_the_script_called_again(course, utils):
    course.member, course.members = 0, (0, 1, 2)
    dealer = cast(Any, (shard_of(utils), course.loaders[0])[1])
    begun = dealer.begin_shared(0, (), BATCH)
    begun.lose(Loss((0, 1, 2), (0, 2), 0, -1))
    end = Portion(1, (), (0, 2), 12, (range(8, 9),))
    with pytest.raises(StepCancelled, match="1 rows, too few"):
        begun.end(end)


def test_too_few_rows_that_a_restored_state_lacks_end_no_call(course, utils, caplog):
    shard = shard_of(utils)
    shard.load_state_dict({"number": 0, "row": FEW_ROWS, "window": 0, "missing": [[4, 5]]})
    assert list(batches_of(shard)) == []
    assert "1 rows of a lost rank are used in no iteration" in caplog.text


def test_last_batches_that_are_smaller_on_all_ranks_weigh_as_the_others(course, utils, monkeypatch):
    weights: list[float] = []
    monkeypatch.setattr(Course, "add_samples", lambda _, num, usual: weights.append(num / usual))
    list(batches_of(shard_of(utils)))
    assert weights[:-1] == [1.0] * (FEW_ROWS // (2 * BATCH)), "as stock DDP has it, to the bit"
    assert weights[-1] == pytest.approx(1.0, abs=0.5), "one rank has a row more"


def test_what_has_counted_stays_counted(course, utils):
    """A pass that is measured between a forward and its backward."""
    batches = batches_of(shard_of(utils))
    next(batches)
    begun = cast(Any, course.loaders[0])._pass
    assert begun.count(0, course.members) == 2 * BATCH
    assert begun.count(-1, course.members) == 0
    next(batches)
    assert begun.count(1, course.members) == 2 * BATCH


def test_what_is_not_split_is_not_dealt(course, utils):
    utils._datasets = Datasets(packed=b"", split=(), whole=("train",), folder=None)
    shard = shard_of(utils)
    assert course.loaders == []
    first = next(batches_of(shard))
    course.members = (0,)
    assert (first, next(batches_of(shard))) == ([0, 1, 2, 3], [0, 1, 2, 3])
