"""A generation is given up at each host read and at each launch of rank 0.

The rank ends as cancelled, it holds the rows of before or after a whole step, and the run goes on
to the undisturbed hash.
"""

import gc

import pytest
import torch

from elastic.protocol.errors import PeerLost, StepCancelled
from tests.device.abandonment import Case, sweep
from tests.device.ranks import all_good, run_ranks
from tests.device.training import build, enter, train
from tests.workers import sharded_rig as rig

pytestmark = pytest.mark.usefixtures("quick_looks")
REDUCTIONS, SHARDED = ("bitwise", "fast"), ("fsdp", "fsdp-grad-op")
CASES = [Case(p, r, at) for p in ("ddp", *SHARDED) for r in REDUCTIONS for at in ("read", "launch")]
CASES += [Case(parallel, "bitwise", "enter") for parallel in SHARDED]


def named(case):
    return f"{case.parallel}-{case.reduction}-{case.at}"


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_generation_can_be_given_up_at_any_instant(case, every):
    outcomes = sweep(case, every)
    assert outcomes
    assert [o for o in outcomes if o.wrong] == []


@pytest.mark.parametrize("parallel", SHARDED)
def test_shards_stay_until_a_pass_that_broke_off_has_read_them(parallel):
    """Their memory is used again behind it: the fixture looks for races."""

    def body(rank, meeting):
        strategy, where = build(rank, parallel, "bitwise", rig.Dense()), torch.device("sim", rank)
        group = meeting.group(rank, 2)
        enter(strategy, group, 0)
        train(strategy, group, parallel, 1, work=rig.Dense())
        group.backend.before_launch = lambda name: group.abandon()
        with pytest.raises((PeerLost, StepCancelled)):
            train(strategy, group, parallel, 1, work=rig.Dense())
        strategy.model.vacate()
        gc.collect()
        return [torch.zeros(8, 8, device=where) for _ in range(50)]

    all_good(run_ranks(2, body))
