"""Sessions whose generation is given up, or whose device fails, at any instant of rank 0.

No rank ends as the user's failure, no row differs from the state before or after a whole step, and
the run goes on to the undisturbed hash.
"""

import pytest

from tests.device.sessions import Case, sweep

pytestmark = pytest.mark.usefixtures("quick_looks")
PARALLEL = ("ddp", "fsdp", "fsdp-grad-op", "hsdp:1")
WAYS = [(parallel, at) for parallel in PARALLEL for at in ("read", "launch")]
AT_EACH = [Case(parallel, "bitwise", at) for parallel, at in WAYS]
AT_ONE_IN_THREE = [Case(parallel, "fast", at) for parallel, at in WAYS]
AT_ONE_IN_THREE += [Case(parallel, "bitwise", at, generation=2) for parallel, at in WAYS]
AT_ONE_IN_THREE += [Case(parallel, "bitwise", at, strike="fault") for parallel, at in WAYS]


def named(case):
    return f"{case.parallel}-{case.reduction}-{case.at}-{case.generation}-{case.strike}"


def check(case, folder, every):
    outcomes = sweep(case, str(folder), every)
    assert outcomes
    assert [outcome for outcome in outcomes if outcome.wrong] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", AT_EACH, ids=named)
def test_a_run_goes_on_whatever_instant_it_is_given_up_at(case, tmp_path):
    check(case, tmp_path, every=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", AT_ONE_IN_THREE, ids=named)
def test_a_run_goes_on_at_one_instant_in_three(case, tmp_path):
    check(case, tmp_path, every=3)


@pytest.mark.parametrize(
    ("case", "every"),
    [(Case("fsdp", "bitwise", "launch"), 45), (Case("ddp", "bitwise", "read", strike="fault"), 15)],
)
def test_a_run_goes_on_at_some_instants(case, every, tmp_path):
    check(case, tmp_path, every)
