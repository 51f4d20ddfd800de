"""A worker is lost while Ray's head is stopped: the others regroup, and are joined by another one
when the head goes on."""

import os
import signal

import pytest

from tests.cluster.hosts import command_of
from tests.cluster.live import assert_same_bits
from tests.cluster.resets import descendants

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 200
ALONE = 10
"""Steps without the head."""


def test_a_loss_while_rays_head_is_stopped_costs_no_step_and_its_place_is_filled_later(
    start, reference
):
    options = {"workers": "2..3", "steps": STEPS, "set": ["sleep=0.1"]}
    with start("Toy", address="local", **options) as run:
        status = run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 10)
        ours = descendants(run.process.pid)
        head = next(pid for pid in ours if "gcs_server" in command_of(pid))
        os.kill(head, signal.SIGSTOP)
        try:
            killed_at = run.kill(0)
            step = status["step"] + ALONE
            alone = run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > step, 50)
        finally:
            os.kill(head, signal.SIGCONT)
        assert alone["generation"] == status["generation"] + 1
        run.wait_for(lambda s: s["world_size"] == 3)
        end = run.finish()
    lines = run.lines("metrics.jsonl")
    resumed_at = next(m["time"] for m in lines if m["time"] > killed_at and m["world_size"] == 2)
    print(f"{resumed_at - killed_at:.2f} s to the next step")
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert [r["cause"] for r in end["result"]["recoveries"]] == ["process_died"]
    assert end["result"]["lost_steps"] == 0
