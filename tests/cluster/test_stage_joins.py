"""Workers that join a model in stages at any instant, and others that are killed while they do: no
step is lost, and the bits are those of one undisturbed worker."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest

from tests.cluster.live import assert_same_bits

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 120


@pytest.mark.parametrize("seed", range(3))
def test_joins_and_kills_at_random_instants_leave_no_trace(start, reference, seed):
    """Once nobody else, then the newcomer, then a member is killed while it copies."""
    expected = reference(STEPS, job="staged", target="Layers")
    dice = random.Random(seed)
    options = {"job": "staged", "steps": STEPS, "parallel": "pp:2", "set": ["sleep=0.05"]}
    with start("Layers", workers="2..5", max_failures=9, **options) as run:
        for victim in (None, "newcomer", "member"):
            full = run.wait_for_step(lambda s: s["world_size"] == 5 and s["phase"] == "running")
            run.kill(rank=dice.randrange(5))
            at = run.wait_for(
                lambda s, was=full: (
                    copying(s) or (s["world_size"] == 5 and s["generation"] > was["generation"] + 1)
                )
            )
            time.sleep(dice.uniform(0, 0.3))  # any instant of the copy
            pids = copying(at) if victim == "newcomer" else [w["pid"] for w in at["workers"]]
            if victim is not None and pids:
                with suppress(ProcessLookupError):
                    os.kill(dice.choice(pids), signal.SIGKILL)
        end = run.finish()
    assert_same_bits(run, end, expected, STEPS)
    assert end["result"]["lost_steps"] == 0
    assert told_to_copy(run), "nobody copied while the others trained"


def copying(status: dict) -> list[int]:
    """The processes that do."""
    rows = [*status["workers"], *status["standby"]]
    return [row["pid"] for row in rows if row["state"] == "syncing"]


def told_to_copy(run) -> list[int]:
    """Workers that were to do so from those who train."""
    entries = (line["entry"] for line in run.lines("journal.jsonl") if "entry" in line)
    commands = (command for entry in entries for command in entry["commands"])
    return [c["worker"] for c in commands if c["type"] == "Sync" and c["members"]]
