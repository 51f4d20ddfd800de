"""Reports without a checkpoint are cheap: a script may report each of its steps."""

import json
import time
from functools import partial
from pathlib import Path

from tests.scripts.local_run import LocalRun
from workers.script_loop import ScriptLoop

REPORTS = 1000
ENOUGH_S = 10.0
"""The bench asks for 1 s on idle cores (python -m tests.bench.scripts --only reports)."""


def report_often(place: str) -> None:
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    began = time.monotonic()
    for number in range(REPORTS):
        ray.train.report({"number": number, "rank": rank})
    (Path(place) / f"took-{rank}").write_text(str(time.monotonic() - began))


def test_a_thousand_reports_take_a_moment_and_each_has_its_line(tmp_path):
    from elastic.on_ray.train_api import answering

    place = tmp_path / "run"
    loop = ScriptLoop(
        function=partial(report_often, str(place)),
        place=str(place),
        name="run",
        installed=answering,
        keeps_all_metrics=True,
    )
    run = LocalRun(loop, place, 2).start()
    assert run.wait() == "succeeded", run.failure
    took = [float((place / f"took-{rank}").read_text()) for rank in (0, 1)]
    print(f"{REPORTS} reports: {max(took):.2f} s")
    assert max(took) <= ENOUGH_S
    lines = [json.loads(text) for text in (place / "reports.jsonl").read_text().splitlines()]
    assert [line["report"] for line in lines] == list(range(1, REPORTS + 1))
    of_ranks = [{"number": REPORTS - 1, "rank": rank} for rank in (0, 1)]
    assert (lines[-1]["metrics"], lines[-1]["metrics_of_ranks"]) == (of_ranks[0], of_ranks)
