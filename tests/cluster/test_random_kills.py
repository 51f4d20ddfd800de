"""Twenty kills at random moments, and twenty of everything during saves; `make test-faults`."""

import contextlib
import os
import random
import signal
import time

import pytest

from tests.cluster.live import assert_same_bits, leftovers
from tests.cluster.test_checkpoints import assert_equals, catalogue, kill_everything

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_KILLS = 20
STEPS = 2500


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("seed", "parallel"), [(0, "ddp"), (1, "ddp"), (2, "fsdp")])
def test_twenty_random_kills_leave_no_trace(start, reference, seed, parallel):
    dice = random.Random(seed)
    options = {"workers": "2..4", "steps": STEPS, "max_failures": 99, "set": ["sleep=0.01"]}
    options["parallel"] = parallel
    with start("Toy", **options) as run:
        for _ in range(NUM_KILLS):
            run.wait_for(lambda s: s["world_size"] >= 3 and s["phase"] == "running")
            time.sleep(dice.uniform(0, 1.5))  # the moment is the fault
            rows = run.status()["workers"]
            if run.process.poll() is None and rows:
                with contextlib.suppress(ProcessLookupError):  # lost since the status was written
                    os.kill(dice.choice(rows)["pid"], signal.SIGKILL)
        end = run.finish(patience_s=600)
        pids = run.seen_pids
    assert end["status"] == 0, end["err"]
    assert len(end["result"]["recoveries"]) >= NUM_KILLS / 2
    assert end["result"]["lost_steps"] == 0
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert leftovers(pids) == []


@pytest.mark.timeout(1500)
def test_killed_whole_during_a_save_twenty_times_and_resumed(start, reference):
    options = {"steps": 1200, "checkpoint_every": 4, "set": ["sleep=0.005"]}
    saved, num_torn = 0, 0
    for i in range(NUM_KILLS):
        with start("Toy", workers=2 + i % 3, address="local", **options) as run:
            run.wait_for(lambda s, saved=saved: (s.get("committed_checkpoint") or 0) > saved)
            wait_for_a_torn_save(run)
            kill_everything(run)
        saved = catalogue(run).steps()[-1]
        num_torn += bool(torn(run))
    with start("Toy", workers=3, **options) as run:
        end = run.finish()
    assert_equals(run, end, reference(steps=1200))
    assert num_torn >= NUM_KILLS / 4, "else the test does not test what it says"
    assert torn(run) == []


def torn(run) -> list[str]:
    """Saves without a manifest."""
    folder = run.directory / "checkpoints"
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
    return [path.name for path in found if not (path / "manifest.json").exists()]


def wait_for_a_torn_save(run) -> None:
    deadline = time.monotonic() + 60
    while not torn(run):
        assert time.monotonic() < deadline
        time.sleep(0.0005)  # polling, bounded by the deadline
