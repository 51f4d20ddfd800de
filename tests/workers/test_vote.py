"""What one rank says, what all have said, and the vector between the two."""

from dataclasses import replace

import numpy as np
import pytest

from tests.workers.fake_groups import ThreadGroup, run_threads
from workers.reduction.reducers import Magnitude
from workers.step.timing import NO_TIMING
from workers.step.vote import (
    Ballot,
    MicrobatchRecord,
    Names,
    Vote,
    VoteLayout,
    add_up,
    decode,
    encode,
)

NAMES = Names(("embed.weight", "head.bias"), ("norm.mean",))
LAYOUT = VoteLayout(
    world_size=2,
    num_microbatches=2,
    micro_batch=1,
    names=NAMES,
    integer_buffers=(),
    log_names=(),
)


def said_by(rank: int) -> Ballot:
    """A stage of a pipeline each: neither holds what the other does."""
    record = MicrobatchRecord(rank, 0.5 + rank, None, np.array([7 + rank]), (), {})
    return Ballot(
        records=[record],
        used={NAMES.parameters[rank]} if rank else set(),
        untracked={"norm.mean"} if rank else set(),
        wants_pause=False,
        is_saving=False,
        wants_save=bool(rank),
        magnitude=Magnitude(is_finite=True, squares=0.25 + rank),
        timing=replace(NO_TIMING, rank=rank),
    )


def voted(layouts: list[VoteLayout]) -> list[Vote]:
    def vote(group: ThreadGroup) -> Vote:
        layout = layouts[group.rank()]
        vector = encode(layout, said_by(group.rank()))
        return decode(layout, add_up(group, vector))

    return run_threads(2, vote)


def test_ranks_that_hold_other_parameters_speak_of_them_by_name():
    first, second = voted([LAYOUT, LAYOUT])
    assert first.used == second.used == {"head.bias"}
    assert first.untracked == second.untracked == {"norm.mean"}
    assert (first.loss, first.divisor, first.rows.tolist()) == (1.0, 2.0, [7, 8])
    assert first.squares == second.squares == 1.5
    assert (first.should_pause, first.should_save, first.is_finite) == (False, True, True)


def test_what_a_rank_without_micro_batches_has_logged_is_heard():
    layout = replace(LAYOUT, world_size=3, log_names=("evaluated", "own"))

    def vote(group: ThreadGroup) -> Vote:
        rank = group.rank()
        about = {"evaluated": 1 / 3, **({"own": 0.1} if rank == 0 else {})}
        records = [MicrobatchRecord(i, 0.5, None, np.array([i]), (), about) for i in range(2)]
        says = replace(
            said_by(0),
            records=records if rank == 2 else [],
            logged={} if rank == 2 else about,
            timing=replace(NO_TIMING, rank=rank),
        )
        return decode(layout, add_up(group, encode(layout, says)))

    for found in run_threads(3, vote):
        assert found.user == {"evaluated": 1 / 3, "own": 0.1}, "to the bit, of four and of one"


@pytest.mark.parametrize(
    "names",
    [
        Names(("head.bias", "embed.weight"), ("norm.mean",)),
        Names(("embed.weight", "head.bias"), ("norm.var",)),
        Names(("embed.weight",), ("head.bias", "norm.mean")),
    ],
)
def test_a_rank_whose_model_has_other_names_or_another_order_of_them_is_found(names: Names):
    with pytest.raises(ValueError, match="other names, or another order, on another worker"):
        voted([LAYOUT, replace(LAYOUT, names=names)])
