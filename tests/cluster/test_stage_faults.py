"""Every fault of the table in docs/faults.md, under pipelines: found, explained with its stage, and
without a trace in the weights."""

import os
import signal
import time
from functools import partial

import pytest

from tests.cluster.hosts import Forbidden, Hosts
from tests.cluster.live import JOBS, assert_same_bits
from tests.cluster.test_controller_death import await_successor, kill_controller
from tests.cluster.test_stages import planned

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
HOSTS = partial(Hosts, 4, head_cpus=0)
"""A head without slots and three hosts with one each."""

STEPS, WARM_STEPS = 100, 15
"""A phase has a usual time after a few steps."""
OPTIONS = {"job": "staged", "steps": STEPS, "parallel": "pp:2", "detect_s": 3.0}


def assert_no_trace(run, end, expected) -> None:
    assert_same_bits(run, end, expected, STEPS)
    assert end["result"]["lost_steps"] == 0


def reasons(run) -> list[str]:
    """Of all losses."""
    lines = (line["entry"]["reason"] for line in run.lines("journal.jsonl") if "entry" in line)
    return [reason for reason in lines if " lost (" in reason]


def wait_until_full(run, after: int = 0) -> dict:
    return run.wait_for_step(
        lambda s: s["world_size"] == 4 and s["phase"] == "running" and s["generation"] > after
    )


@pytest.mark.slow
def test_a_stage_that_hangs_and_one_that_freezes_are_named_and_replaced(start, reference, tmp_path):
    expected = reference(STEPS, job="staged", target="Layers")
    marker = tmp_path / "hangs"
    settings = ["sleep=0.05", f"marker={str(marker)!r}"]
    options = {"workers": "2..4", "standby": 1, "eval_every": 1, "set": settings, **OPTIONS}
    with start("Hangs", **options) as run:
        full = wait_until_full(run)
        run.wait_for(lambda s: s["step"] > full["step"] + WARM_STEPS)
        marker.touch()
        full = wait_until_full(run, full["generation"])
        frozen = full["workers"][2]
        os.kill(frozen["pid"], signal.SIGSTOP)
        wait_until_full(run, full["generation"])
        end = run.finish()
    assert_no_trace(run, end, expected)
    assert [r["cause"] for r in end["result"]["recoveries"]] == ["hung", "hung"]
    hung, stopped = reasons(run)
    assert "it has stage 1 of pipeline 0, blocks " in hung
    mesh, (first, behind) = frozen["mesh"], frozen["blocks"]
    assert (
        f"it has stage {mesh['pp']} of pipeline {mesh['dp']}, blocks {first} to {behind - 1}; "
        in stopped
    )


@pytest.mark.slow
def test_a_stage_under_notice_leaves_as_planned_and_the_controllers_death_costs_nothing(
    start, reference
):
    expected = reference(STEPS, job="staged", target="Layers")
    with start("Layers", workers="2..4", set=["sleep=0.05"], **OPTIONS) as run:
        full = wait_until_full(run)
        leaver = full["workers"][3]
        os.kill(leaver["pid"], signal.SIGTERM)
        run.wait_for(lambda s: leaver["id"] not in [w["id"] for w in s["workers"]])
        full = wait_until_full(run, full["generation"])
        _, pid = kill_controller(run)
        after = await_successor(run, pid)
        told = [w["blocks"] for w in after["workers"]]
        end = run.finish()
    assert_no_trace(run, end, expected)
    assert end["result"]["recoveries"] == []
    assert told == [w["blocks"] for w in full["workers"]], "the successor knows the layout"
    assert end["result"]["generations"] == after["generation"], "nobody was disturbed"


@pytest.mark.slow
def test_a_stage_that_is_cut_off_is_computed_by_the_others(hosts, reference, tmp_path):
    hosts.start_ray()
    expected = reference(STEPS, job="staged", target="Layers")
    job = f"{JOBS / 'staged.py'}:Layers"
    options = {**OPTIONS, "workers": "2..3", "set": ["sleep=0.05"]}
    del options["job"]
    with hosts.run(job, tmp_path, "run", **options) as run:
        before = run.wait_for_step(lambda s: s["world_size"] == 3 and s["step"] > 5)
        cut = next(w for w in before["workers"] if w["blocks"])
        host = hosts.host_of(cut["node_ip"])
        at = time.time()
        try:
            hosts.cut(host)
        except Forbidden as reason:
            pytest.skip(f"nothing was cut: {reason}")
        run.wait_for(lambda s: s["generation"] > before["generation"] and s["world_size"] == 2)
        end = run.finish()
    assert_no_trace(run, end, expected)
    assert {r["cause"] for r in end["result"]["recoveries"]} <= {"heartbeat_silent", "unreachable"}
    assert any(m["time"] > at for m in run.lines("metrics.jsonl"))
    assert any("1 pipeline of 2 stages" in layout for layout in planned(run))
