"""The conformance suite: every fault at every instant under every strategy leaves the bits as they
are. A representative part runs in `make test`, all of it in `make test-faults`."""

import itertools

import pytest

from tests.cluster.live import assert_same_bits, leftovers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS, CHECKPOINT_EVERY, AT = 60, 5, 12
OPTIONS = {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY}
STRATEGIES = ("ddp", "fsdp")
INSTANTS = ("forward", "backward", "collective", "vote", "applied", "save", "regroup")
FAULTS = ("kill", "stop", "hang", "term", "gpu")
FAST = {
    ("ddp", "kill", "vote"),
    ("ddp", "kill", "regroup"),
    ("ddp", "stop", "backward"),
    ("ddp", "gpu", "backward"),
    ("fsdp", "gpu", "collective"),
    ("fsdp", "kill", "backward"),
    ("fsdp", "term", "forward"),
}


UNREACHED = {"hang": ("save", "regroup"), "gpu": ("regroup",)}
"""No user code runs there that could hang, and nothing uses a GPU."""
BESIDE = ("fsdp", "gpu", "copy")
"""The thread that keeps a shard for others meets the device's failure."""


def cases():
    for strategy, fault, instant in itertools.product(STRATEGIES, FAULTS, INSTANTS):
        if instant in UNREACHED.get(fault, ()):
            continue
        marks = () if (strategy, fault, instant) in FAST else (pytest.mark.slow,)
        yield pytest.param(strategy, fault, instant, marks=marks)
    yield pytest.param(*BESIDE, marks=(pytest.mark.slow,))


@pytest.mark.parametrize(("strategy", "fault", "instant"), list(cases()))
def test_a_fault_at_an_instant_changes_no_bit(strategy, fault, instant, start, tmp_path, reference):
    faults = [(fault, instant, AT)]
    if instant == "regroup":  # while recovering from another one
        faults = [("kill", "forward", AT), (fault, instant, 0)]
    end, run = run_with(faults, strategy, start, tmp_path)
    assert_conforms(run, end, reference)
    causes = [r["cause"] for r in end["result"]["recoveries"]]
    expected = {"kill": "process_died", "stop": "hung", "hang": "hung", "gpu": "device_failed"}
    if fault == "term" and strategy == "ddp":
        assert causes == ["process_died"] * (len(faults) - 1), "a notice is no loss"
    elif fault != "term" and len(faults) == 1:
        assert causes == [expected[fault]]


def run_with(faults, strategy, start, tmp_path, **more):
    struck = tmp_path / "struck"
    struck.mkdir()
    settings = [f"folder={str(struck)!r}", f"faults={faults!r}", "sleep=0.01"]
    options = {"workers": "2..3", "detect_s": 3.0, "parallel": strategy, **OPTIONS, **more}
    with start("Faulty", job="faulty", set=settings, **options) as run:
        end = run.finish(asleep=True)
    assert len(list(struck.iterdir())) == len(faults), "else the test does not test what it says"
    return end, run


def assert_conforms(run, end, reference) -> None:
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0
    assert leftovers(run.seen_pids) == []
