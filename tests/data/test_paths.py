"""The same data wherever TARGET's folder is, and however its paths are written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.data import parquet
from elastic.data.footers import make_plan
from elastic.data.plan import Plan
from elastic.data.record import FeedRecord, open_record
from elastic.data.source import below
from elastic.data.stream import WindowKey
from elastic.protocol.errors import WrongInput
from elastic.store.files import open_folder
from tests.data.histories import ROWS, write_rows
from tests.data.test_plan import epoch_rows

SEED = 3


@pytest.fixture
def job(tmp_path) -> Path:
    """TARGET's folder, with its data in `set`."""
    folder = tmp_path / "job"
    folder.mkdir()
    write_rows(folder / "set")
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    """A run directory."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def plan_in(folder: Path, *paths, **options):
    """As a worker makes it that runs in `folder`."""
    return make_plan(parquet(list(paths), window_bytes=300, **options).within(str(folder)), SEED)


def begin(run: Path, plan) -> None:
    open_record(plan, str(run)).write()


def begin_as_before(run: Path, *paths) -> Plan:
    """Begin the run as a version did that knew no folder: each path was absolute."""
    plan = make_plan(parquet([Path(p).absolute() for p in paths], window_bytes=300), SEED)
    record = FeedRecord(plan, open_folder(str(run)))
    content = record.to_json()
    del content["began_in"]
    (run / "data.json").write_text(json.dumps(content))
    return plan


def moved(job: Path, name: str = "elsewhere") -> Path:
    return job.rename(job.with_name(name))


def test_a_path_is_the_same_however_it_is_written_and_wherever_the_folder_is(job, tmp_path):
    (tmp_path / "link").symlink_to(job)
    written = ["set", "./set/", job / "set", tmp_path / "link" / "set"]
    hashes = {plan_in(job, path).hash for path in written}
    names = [f.path for f in plan_in(job, "set").files]
    assert names == [f"set/p{i}.parquet" for i in range(5)]
    there = moved(job)
    plan = plan_in(there, there / "set")
    assert hashes == {plan.hash}
    assert sorted(epoch_rows(plan, 0, "row")[0]) == list(range(ROWS))


def test_only_a_path_that_leads_through_the_folder_becomes_relative(job, tmp_path):
    (job / "set").rename(tmp_path / "store")
    (job / "set").symlink_to(tmp_path / "store")
    folder = str(job)
    assert below(folder, str(job / "set")) == "set"
    assert below(folder, folder) == "."
    assert below(folder, str(tmp_path / "store")) == str(tmp_path / "store")
    assert below(folder, "../store") == "../store"
    assert below(folder, f"file://{job}/set") == f"file://{job}/set"
    assert below(folder, "s3://bucket/set") == "s3://bucket/set"
    assert below(str(tmp_path / "nowhere"), str(job / "set")) == str(job / "set")


def test_a_file_that_is_named_twice_is_used_once(job):
    assert plan_in(job, "set", job / "set").num_rows == ROWS
    assert plan_in(job, ".", "set/p2.parquet").num_rows == ROWS
    with pytest.raises(WrongInput, match=r"are one file; name it once"):
        plan_in(job, "set", f"file://{job}/set/p0.parquet")


def test_a_relative_path_that_is_not_there_is_named_with_its_folder(job):
    with pytest.raises(WrongInput, match=f"data path '{job}/sets' does not exist"):
        plan_in(job, "sets")


def test_a_run_goes_on_from_a_copy_of_the_folder_and_not_with_other_content(job, run):
    begin(run, plan_in(job, "set"))
    rows = epoch_rows(plan_in(job, "set"), 1, "row")
    there = moved(job)
    record = open_record(plan_in(there, "set"), str(run))
    assert epoch_rows(record.plan, 1, "row") == rows
    pq.write_table(pa.table({"row": np.arange(9)}), there / "set" / "p4.parquet")
    with pytest.raises(WrongInput, match=r"began: set/p4.parquet changed: \d+ bytes before"):
        open_record(plan_in(there, "set"), str(run))


def test_two_runs_in_folders_of_one_place_name_their_own_files(job, run, tmp_path):
    """As unpacked packages lie beside each other: what is left of the first is not read."""
    begin(run, plan_in(job, "set"))
    shutil.copytree(job, tmp_path / "second")
    (job / "set" / "p2.parquet").write_bytes(b"PAR1 no more")
    record = open_record(plan_in(tmp_path / "second", "set"), str(run))
    assert sorted(epoch_rows(record.plan, 0, "row")[0]) == list(range(ROWS))


def test_a_run_of_before_goes_on_with_its_absolute_names_and_their_order(job, run, tmp_path):
    """The other file is the last in the order of absolute paths, and the first in that of names."""
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"row": np.arange(40)}), other)
    paths = ["set", other]
    before = begin_as_before(run, job / "set", other)
    plan = plan_in(job, *paths)
    assert [f.path for f in (plan.files[0], before.files[-1])] == [str(other)] * 2
    record = open_record(plan, str(run))
    assert record.plan.hash == before.hash
    assert epoch_rows(record.plan, 2, "row") == epoch_rows(before, 2, "row")
    assert record.to_json()["plan"] == before.to_json()
    with pytest.raises(WrongInput, match=r"/job/set/p0.parquet is missing"):
        open_record(plan_in(moved(job), *paths), str(run))


def test_an_absolute_path_is_the_same_where_the_folder_is_shipped_and_where_it_is_not(
    job, run, tmp_path
):
    """Embedded, the data lie in TARGET's folder; on a cluster that is where Ray unpacks it."""
    packages = [tmp_path / "_ray_pkg_1", tmp_path / "_ray_pkg_2"]
    for package in packages:
        package.mkdir()
    path, options = job / "set", {"transform": lambda table: table}
    begun = plan_in(job, path, **options)
    begin(run, begun)
    for window, folder in enumerate((*packages, job)):
        record = open_record(plan_in(folder, path, **options), str(run))
        assert record.plan.hash == begun.hash
        assert epoch_rows(record.plan, 0, "row") == epoch_rows(begun, 0, "row")
        assert record.add(WindowKey(0, window), 7, ()), "it is written again, by each start"
        record.write()


def test_the_files_of_the_old_folder_are_new_beside_those_of_the_copy(job, run, tmp_path):
    begin(run, plan_in(job, "set"))
    shutil.copytree(job, tmp_path / "copy")
    with pytest.raises(WrongInput, match=r"/job/set/p0.parquet is new"):
        open_record(plan_in(tmp_path / "copy", "set", job / "set"), str(run))


def test_equal_files_at_another_absolute_path_are_other_data(job, run, tmp_path):
    shutil.copytree(job / "set", tmp_path / "a")
    shutil.copytree(job / "set", tmp_path / "b")
    begin(run, plan_in(job, tmp_path / "a"))
    with pytest.raises(WrongInput, match=r"/a/p0.parquet is missing"):
        open_record(plan_in(job, tmp_path / "b"), str(run))


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_run_that_skips_reads_the_others_where_they_are_when_a_file_is_gone(
    job, run, tmp_path, is_copied
):
    begin(run, plan_in(job, "set", on_bad_file="skip"))
    there = moved(job) if is_copied else tmp_path / "_ray_pkg_1"
    path = there / "set" if is_copied else job / "set"
    there.mkdir(exist_ok=True)
    (path / "p4.parquet").unlink()
    record = open_record(plan_in(there, path, on_bad_file="skip"), str(run))
    assert [f.path for f in record.plan.files] == [f"set/p{i}.parquet" for i in range(5)]
    rows, _ = epoch_rows(record.plan, 0, "row")
    assert sorted(rows) == list(range(ROWS - 64))
