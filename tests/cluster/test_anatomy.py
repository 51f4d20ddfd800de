"""Where the time of a live run's steps goes, measured on every rank and shown while it goes on."""

import json
import statistics

import pytest

from elastic.observe.anatomy import PARTS, is_row
from tests.cluster.live import elastic

pytestmark = pytest.mark.cluster


def idle_share(lines: list[dict]) -> float:
    waited_s, busy_s = sum(x["wait_s"] for x in lines), sum(x["compute_s"] for x in lines)
    return waited_s / (busy_s + waited_s)


def test_four_micro_batches_on_three_ranks_leave_a_third_of_the_time_idle(start):
    """Rank 0 has two passes of 0.4 s, the others one: 4 of 6 are used."""
    options = {"global_batch": 24, "micro_batch": 6, "steps": 12, "set": ["sleep=0.4"]}
    with start("Toy", workers=3, **options) as run:
        run.wait_for(lambda s: s["step"] >= 5)
        status = elastic(run.env, "status", run.directory)
        end = run.finish(asleep=True)
    assert end["status"] == 0, end["err"]
    assert status.returncode == 0, status.stderr
    assert [part for part in PARTS if f"{part} " in status.stdout] == list(PARTS)
    assert len([line for line in status.stdout.splitlines() if "iB" in line]) == 3

    lines = [json.loads(x) for x in (run.directory / "anatomy.jsonl").read_text().splitlines()]
    assert all(is_row(line) for line in lines)
    took = {m["step"]: m["step_s"] for m in run.lines("metrics.jsonl")}
    assert {(x["step"], x["rank"]) for x in lines} == {(s, r) for s in took for r in range(3)}
    for line in lines:
        of_step = sum(line[f"{part}_s"] for part in PARTS)
        assert of_step == pytest.approx(line["step_s"], rel=0.01)
        if line["rank"] == 0:
            assert of_step == pytest.approx(took[line["step"]], rel=0.01)
    waited_s = sum(x["wait_s"] for x in lines)
    idle = [idle_share([x for x in lines if x["step"] == step]) for step in took]
    assert statistics.median(idle) == pytest.approx(1 / 3, abs=0.04), "a busy machine stalls some"
    assert end["result"]["badput"]["idle"] == pytest.approx(waited_s / 3, rel=0.02)

    done = elastic(run.env, "chaos", "report", run.directory, "--report", run.directory / "cost")
    assert done.returncode == 0, done.stderr
    buckets = json.loads((run.directory / "cost.json").read_text())["buckets"]
    assert buckets["idle"] == pytest.approx(end["result"]["badput"]["idle"], abs=0.01)
