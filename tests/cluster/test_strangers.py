"""Strangers on the network try every server of a run, also while it regroups."""

import os
from pathlib import Path

import pytest

from tests.cluster.hosts import command_of
from tests.cluster.live import assert_same_bits
from tests.cluster.resets import descendants
from tests.cluster.strangers import Strangers

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 250
MAX_GROWTH_BYTES = 64 * 2**20
ENOUGH_TRIED = 1000


def ours() -> list[int]:
    """The run's controller, rendezvous, workers and holders."""
    return [pid for pid in descendants(os.getpid()) if "Actor" in command_of(pid)]


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_whoever_has_no_token_costs_no_step_no_worker_and_little_memory(start, reference, capsys):
    options = {"workers": "1..2", "steps": STEPS, "parallel": "fsdp", "set": ["sleep=0.05"]}
    with start("Toy", **options) as run:
        run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 10)
        before = {pid: resident_bytes(pid) for pid in ours()}
        with Strangers(ours) as strangers:
            run.wait_for(lambda s: s["step"] > 60)
            grown = {pid: resident_bytes(pid) - before[pid] for pid in ours() if pid in before}
            names = {pid: command_of(pid) for pid in grown}
            generation = run.status()["generation"]
            run.kill(rank=1)
            run.wait_for_step(lambda s: s["generation"] > generation and s["world_size"] == 2)
            run.wait_for(lambda s: s["step"] > 150, 300)
        end = run.finish()
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0
    assert len(end["result"]["recoveries"]) == 1
    said = [f"{names[pid]} {size / 2**20:.1f} MiB" for pid, size in grown.items()]
    with capsys.disabled():
        print(f"\n{strangers.num_tried} tried; grown: {', '.join(said)}")
    assert len(grown) >= 5, "controller, rendezvous, two workers, a holder"
    assert max(grown.values()) <= MAX_GROWTH_BYTES
    assert strangers.num_tried > ENOUGH_TRIED
