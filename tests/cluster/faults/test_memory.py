"""A worker that the kernel ends because it takes more memory than it may."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from tests.cluster.live import assert_same_bits

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 150
LIMIT_BYTES = 200 * 2**20
CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def group():
    """A memory control group with a limit."""
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    parent = CGROUPS if is_v2 else CGROUPS / "memory"
    made = parent / f"elastic-test-{os.getpid()}"
    try:
        made.mkdir()
        limit = "memory.max" if is_v2 else "memory.limit_in_bytes"
        (made / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no control groups on this machine: {error}")
    yield made
    deadline = time.monotonic() + 10
    while made.exists() and time.monotonic() < deadline:  # the last process leaves it when reaped
        with contextlib.suppress(OSError):
            made.rmdir()
        time.sleep(0.05)  # polling, bounded by the deadline


def test_a_worker_out_of_memory_costs_no_step_and_is_explained(
    group, start, tmp_path, reference, capsys
):
    settings = [f"marker='{tmp_path}'", f"group='{group}'", "sleep=0.02"]
    options = {"workers": "2..3", "steps": STEPS, "eval_every": 1, "detect_s": 10.0}
    with start("Hungry", job="hanging", set=settings, **options) as run:
        end = run.finish(asleep=True)
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0
    (recovery,) = end["result"]["recoveries"]
    assert recovery["cause"] == "process_died"
    reasons = [line["entry"]["reason"] for line in run.lines("journal.jsonl") if "entry" in line]
    (lost,) = [reason for reason in reasons if " lost (" in reason]
    with capsys.disabled():
        print(f"\n{lost}")
    assert "(process_died: perhaps out of memory: it held " in lost
