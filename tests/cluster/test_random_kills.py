"""Twenty kills at random moments by the pids of status.json; `make test-faults` runs it."""

import os
import random
import signal
import time

import pytest

from tests.cluster.live import assert_complete, leftovers

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_KILLS = 20
STEPS = 1500


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_random_kills_leave_no_trace(start, reference, seed):
    dice = random.Random(seed)
    options = {"workers": "2..4", "steps": STEPS, "max_failures": 99, "set": ["sleep=0.01"]}
    with start("Toy", **options) as run:
        for _ in range(NUM_KILLS):
            run.wait_for(lambda s: s["world_size"] >= 3 and s["phase"] == "running")
            time.sleep(dice.uniform(0, 1.5))  # the moment is the fault
            rows = run.status()["workers"]
            if run.process.poll() is None and rows:
                os.kill(dice.choice(rows)["pid"], signal.SIGKILL)
        end = run.finish(patience_s=600)
        pids = run.seen_pids
    assert end["status"] == 0, end["err"]
    assert len(end["result"]["recoveries"]) >= NUM_KILLS / 2
    assert end["result"]["lost_steps"] == 0
    sha256, samples = reference("Toy", steps=STEPS)
    assert end["result"]["weights_sha256"] == sha256
    assert [s["sha256"] for s in run.lines("samples.jsonl")] == samples
    assert_complete(run, STEPS)
    assert leftovers(pids) == []
