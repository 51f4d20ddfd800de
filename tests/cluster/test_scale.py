"""`elastic scale` on a live run: fewer, a controller's death, more; and no step is lost."""

import os
import signal

import pytest

from tests.cluster.live import JOBS, LiveRun, assert_gone, assert_same_bits, elastic

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 100


def test_a_run_shrinks_keeps_its_size_under_a_successor_and_grows(
    shared_head, tmp_path, ray_temp, reference
):
    options = {"workers": "2..3", "steps": STEPS, "max_failures": 0}
    slow = {"set": ["sleep=0.2"], "address": shared_head.address}

    def scale(workers: str):
        words = ("scale", run.directory, workers, "--address", shared_head.address)
        return elastic(run.env, *words)

    with LiveRun(f"{JOBS / 'toy.py'}:Toy", tmp_path, "run", ray_temp, **options, **slow) as run:
        status = run.wait_for_step(lambda s: s["world_size"] == 3)
        assert status["wanted"] == [2, 3]
        fewer = scale("1..2")
        assert (fewer.returncode, fewer.stderr) == (0, "")
        former = status["controller"]["pid"]
        os.kill(former, signal.SIGKILL)  # what was answered is on record by then
        assert "the run is to have 1 to 2 workers from now on" in fewer.stdout
        status = run.wait_for_step(lambda s: s["controller"]["pid"] not in (None, former))
        assert status["wanted"] == [1, 2]
        status = run.wait_for_step(lambda s: s["world_size"] == 2)
        step = status["step"]
        status = run.wait_for(lambda s: s["step"] > step + 10)
        assert (status["world_size"], status["standby"]) == (2, [])

        refused = scale("4..3")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "the run stays as it is: workers" in refused.stderr
        assert scale("2..4").returncode == 0
        run.wait_for_step(lambda s: s["world_size"] == 4)
        end = run.finish()
        late = scale("2")
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert (end["result"]["lost_steps"], end["result"]["recoveries"]) == (0, [])
    assert_gone(run.seen_pids)
    assert (late.returncode, f"has ended: succeeded after {STEPS} steps" in late.stderr) == (
        2,
        True,
    )
