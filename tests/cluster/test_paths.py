"""A job with its data and its runs beside it: Ray ships it, after each edit under another name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cluster.live import JOBS, LiveRun, assert_complete, elastic
from tests.cluster.test_lifecycle import one_line
from tests.cluster.test_stop import NODE

pytestmark = pytest.mark.cluster

ROWS, BATCH, MORE = 100, 24, "beside_the_job.parquet"
BESIDE = ("dropping.py", "fed.py", "toy.py")
JOB = f"""
from pathlib import Path

import elastic
from fed import Counts


class Beside(Counts):
    def dataset(self):
        return elastic.data.parquet([self.path, Path(__file__).parent / "{MORE}"])
"""


def test_relative_paths_are_the_same_data_in_another_package_and_elsewhere(
    nodes, tmp_path, ray_temp
):
    nodes.add_node(**NODE)
    session = Path(nodes.head_node.get_session_dir_path())
    job = tmp_path / "job"
    (job / "set").mkdir(parents=True)
    for name in BESIDE:
        shutil.copy(JOBS / name, job)
    (job / "job.py").write_text(JOB)
    rows = np.arange(ROWS)
    for name, part in (("set/p0.parquet", rows[:60]), (MORE, rows[60:])):
        pq.write_table(pa.table({"row": part}), job / name, row_group_size=9)
    options = {"address": nodes.address, "workers": 1, "global_batch": BATCH}
    options["set"] = ["path='set'", f"rows={ROWS}"]

    target = f"{job / 'job.py'}:Beside"
    refused = LiveRun(target, job / "runs", "run", ray_temp, **options)
    refused.env |= {"RAY_RUNTIME_ENV_FAIL_UPLOAD_FOR_TESTING": "1"}
    with refused:
        end = refused.finish()
    assert (end["status"], refused.directory.exists()) == (2, False)
    assert "the folder of TARGET cannot be shipped: Failed to upload" in one_line(end["err"])

    for steps in (5, 12):
        with LiveRun(target, job / "runs", "run", ray_temp, steps=steps, **options) as run:
            end = run.finish()
        assert end["status"] == 0, end["err"]
        with (job / "job.py").open("a") as file:
            file.write("# another comment\n")
    assert_complete(run, 12)
    plan = json.loads((run.directory / "data.json").read_text())["plan"]
    assert list(plan["files"]) == [MORE, "set/p0.parquet"]
    written = "__pycache__"  # by workers that imported it
    shipped = [sorted(names - {written}) for names in shipped_in(session) if MORE in names]
    assert shipped == [sorted([*BESIDE, "job.py", MORE, "set"])] * 2, (
        "one of each start, without runs"
    )

    job.rename(tmp_path / "elsewhere")
    done = elastic(run.env, "data", "check", "runs/run", folder=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert "12 steps used 288 rows, each as planned: 2 whole epochs" in done.stdout


def shipped_in(session: Path) -> list[set[str]]:
    """What is in each package that the nodes have unpacked, those of other tests among them.

    A node that joins may unpack one of an earlier test at any time.
    """
    folders = [p for p in session.glob("**/working_dir_files/_ray_pkg_*") if p.is_dir()]
    return [{path.name for path in folder.iterdir()} for folder in folders]
