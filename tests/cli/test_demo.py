"""What the demo reads of a run's files. It runs in tests/cluster/test_readme.py."""

import json
import subprocess
import sys

from elastic.demo import Job, Plan


def test_the_layout_of_each_generation_is_in_the_journal(tmp_path):
    planned = [{"generation": g, "layout": f"{g} pipelines"} for g in (1, 2)]
    lines = [{"entry": {"type": "Started"}}, *({"planned": p} for p in planned)]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    job = Job("faulty", process, tmp_path, tmp_path / "log", steps=10)
    assert job.layouts() == {1: "1 pipelines", 2: "2 pipelines"}


def test_a_job_in_stages_has_two_pipelines():
    in_stages, whole = (Plan(30, parallel, False) for parallel in ("pp:2", "ddp"))
    assert (in_stages.num_workers, in_stages.kill_at) == (4, 12)
    assert whole.num_workers == 3
