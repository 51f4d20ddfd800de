"""A generation is given up at each host read and at each launch of rank 0.

The rank ends as cancelled, it holds the rows of before or after a whole step, and the run goes on
to the undisturbed hash.
"""

import pytest

from tests.device.abandonment import Case, sweep

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
