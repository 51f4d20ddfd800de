"""`elastic profile`: slices of all ranks that meet at the end of the vote."""

import json
from pathlib import Path

import pytest

from elastic.cli.app import main
from elastic.observe.anatomy import PARTS
from elastic.observe.trace import nearest


def row(step: int, rank: int, generation: int = 1, **changed) -> dict:
    spans = [["data", 0.1], ["compute", 0.2 + rank], ["vote", 0.1], ["apply", 0.05]]
    return {
        **{"step": step, "steps": 1, "generation": generation, "rank": rank, "worker": f"w{rank}"},
        **{"world_size": 2, "time": 1.0, "step_s": 1.0, **{f"{part}_s": 0.0 for part in PARTS}},
        **{"memory_bytes": 1, "gpu_memory_bytes": None, "spans": spans},
        **changed,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Step 4 was done again by generation 2, on one rank; others have put something there."""
    rows = [row(2, 1), row(4, 0), row(2, 0), row(4, 1), row(4, 0, 2), row(7, 0, 2)]
    lines = [json.dumps(each) for each in rows]
    damaged = [row(4, 5, spans=[["x"]]), row(4, 5, spans=[["x", float("nan")]]), {"step": 4}]
    lines += [json.dumps(each) for each in damaged]
    run = tmp_path / "<b>run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (run / "anatomy.jsonl").write_text("\n".join(lines) + "\n")
    return run


def profiled(run: Path, *options: str) -> dict:
    out = run / "trace.json"
    assert main(["profile", str(run), "--out", str(out), *options]) == 0
    return json.loads(out.read_text())


def slices(trace: dict) -> list[tuple]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [(e["tid"], e["name"], round(e["ts"]), round(e["dur"])) for e in found]


def test_all_ranks_leave_the_vote_at_the_same_time(run: Path):
    trace = profiled(run, "--step", "2")
    assert slices(trace) == [
        (0, "data", 1_000_000, 100_000),
        (0, "compute", 1_100_000, 200_000),
        (0, "vote", 1_300_000, 100_000),
        (0, "apply", 1_400_000, 50_000),
        (1, "data", 0, 100_000),
        (1, "compute", 100_000, 1_200_000),
        (1, "vote", 1_300_000, 100_000),
        (1, "apply", 1_400_000, 50_000),
    ]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["<b>run, step 2", "rank 0 (w0)", "rank 1 (w1)"]


def test_of_a_step_that_was_done_again_the_last_time_counts(run: Path):
    trace = profiled(run, "--step", "4")
    assert trace["otherData"]["rank 0"]["generation"] == 2
    assert list(trace["otherData"]) == ["rank 0"]


def test_without_a_step_it_is_the_newest(run: Path, capsys):
    profiled(run)
    assert capsys.readouterr().out.startswith("step 7 of 1 rank: ")


def test_a_step_that_is_not_traced_is_one_line_with_its_neighbours(run: Path, capsys):
    assert main(["profile", str(run), "--step", "5"]) == 2
    said = "has no trace of step 5, only of some steps: nearest first 4, 7, 2\n"
    assert said in capsys.readouterr().err
    (run / "anatomy.jsonl").unlink()
    assert main(["profile", str(run)]) == 2
    assert "anatomy.jsonl has no trace\n" in capsys.readouterr().err


def test_the_nearest_steps_are_told_and_not_all():
    assert nearest(50, range(1, 101)) == [50, 49, 51, 48, 52, 47, 53, 46]
    assert nearest(3, [9, 4, 2]) == [2, 4, 9]
