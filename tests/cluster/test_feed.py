"""Fed by Parquet and Ray Data through real losses: each row exactly once per epoch, one order."""

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from elastic.cli.app import main
from elastic.data import parquet
from elastic.data.footers import make_plan, open_filesystem
from elastic.data.reading import read_window
from tests.cluster.jobs.dropping import third_dropped
from tests.cluster.live import LiveRun, assert_complete
from tests.cluster.processes import sibling
from tests.object_store import uri
from workers.train_state.digest import weights_sha256

pytestmark = pytest.mark.cluster
SIZES = (101, 0, 57, 333, 1, 210)
ROWS = sum(SIZES)
STEPS, BATCH = 44, 48  # three epochs and six rows


@pytest.fixture(scope="session")
def rows_set(tmp_path_factory):
    """Files of odd sizes and odd row groups; `row` is the row's number."""
    folder = tmp_path_factory.mktemp("rows") / "set"
    folder.mkdir()
    first = 0
    for i, size in enumerate(SIZES):
        table = pa.table({"row": np.arange(first, first + size), "noise": np.ones(size)})
        pq.write_table(table, folder / f"p{i}.parquet", row_group_size=23 + i)
        first += size
    return folder


@pytest.fixture
def fed(start, rows_set):
    def make(name, target="Counts", settings=(), path=rows_set, **options):
        options = {"steps": STEPS, "global_batch": BATCH, "micro_batch": 6, **options}
        what = [f"path={str(path)!r}", f"rows={ROWS}", *settings]
        return start(target, name, job="fed", set=what, **options)

    return make


@pytest.fixture(scope="session")
def planned(rows_set):
    """What the uninterrupted run leaves, from the plan alone: its hash, and its sample records."""
    known = {}

    def of(transform=False):
        if transform not in known:
            transforms = third_dropped if transform else None
            sizes = {"window_bytes": 4000, "prefetch_bytes": 16000}
            known[transform] = left_by(
                make_plan(parquet(rows_set, transform=transforms, **sizes), 0)
            )
        return known[transform]

    return of


def left_by(plan) -> tuple[str, list[str]]:
    rows, ids = np.empty(0, np.int64), np.empty(0, np.int64)
    for epoch in itertools.count():
        for window in range(len(plan.windows(epoch))):
            found, _ = read_window(plan, epoch, window)
            rows = np.concatenate([rows, found.table["row"].to_numpy()])
            ids = np.concatenate([ids, found.ids])
        if len(ids) >= STEPS * BATCH:
            break
    steps = ids[: STEPS * BATCH].astype("<i8").reshape(STEPS, BATCH)
    records = [hashlib.sha256(step.tobytes()).hexdigest() for step in steps]
    return counted_sha256(rows[: STEPS * BATCH]), records


def counted_sha256(rows) -> str:
    """The weights that count these rows: commit() divides by the sum of the weights, one each."""
    model = nn.Module()
    uses = np.bincount(rows, minlength=ROWS).astype(np.float32)
    model.uses = nn.Parameter(torch.from_numpy(0.0 - uses / (BATCH // 6)))  # no -0.0
    return weights_sha256(model)


def samples(run: LiveRun) -> list[str]:
    return [s["sha256"] for s in run.lines("samples.jsonl")]


def feed_pid(run: LiveRun) -> int:
    """The feed's process: Ray names processes after their actor."""
    return sibling(run.status()["controller"]["pid"], b"ray::FeedActor")


def test_killed_workers_and_a_killed_feed_leave_no_trace_in_three_planned_epochs(fed, planned):
    with fed("kills", workers="2..3", settings=["sleep=0.2"]) as run:
        run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 3)
        run.kill(rank=1)
        run.wait_for(lambda s: s["generation"] > 2 and s["phase"] == "running")
        os.kill(feed_pid(run), signal.SIGKILL)
        run.kill(rank=0)
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert (end["result"]["weights_sha256"], samples(run)) == planned()
    assert_complete(run, STEPS)
    plan = json.loads((run.directory / "data.json").read_text())
    assert sum(sum(rows) for _, rows in plan["plan"]["files"].values()) == ROWS


@pytest.mark.slow
def test_filtered_and_repeated_rows_resume_exactly(fed, planned):
    settings = ["transform=True"]
    with fed("resumed", workers=2, steps=21, settings=settings) as run:
        assert run.finish()["status"] == 0
    with fed("resumed", workers=3, settings=settings) as run:
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert (end["result"]["weights_sha256"], samples(run)) == planned(transform=True)


def test_a_run_fed_from_a_bucket_resumes_and_outlives_its_feed(
    fed, planned, rows_set, s3, s3_server
):
    path = uri(s3_server.new_bucket(), "set", s3.port)
    filesystem, inside = open_filesystem(path)
    for file in rows_set.iterdir():
        with filesystem.open_output_stream(f"{inside}/{file.name}") as copy:
            copy.write(file.read_bytes())
    settings = ["sleep=0.06"]
    with fed("bucket", path=path, workers=2, steps=21, settings=settings) as run:
        end = run.finish()
        assert end["status"] == 0, end["err"]
    with fed("bucket", path=path, workers=2, settings=settings) as run:
        run.wait_for(lambda s: s["step"] > 21)
        os.kill(feed_pid(run), signal.SIGKILL)
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert (end["result"]["weights_sha256"], samples(run)) == planned()


def test_a_ray_dataset_is_fed_in_its_own_order_and_resumes(fed, nodes, monkeypatch):
    rows = np.tile(np.arange(ROWS), 4)[: STEPS * BATCH].astype("<i8").reshape(STEPS, BATCH)
    order = [hashlib.sha256(step.tobytes()).hexdigest() for step in rows]
    sha256 = counted_sha256(rows.reshape(-1))
    # On the shared head Ray Data would start a process for each of its CPUs; idle ones stay here.
    monkeypatch.setenv("RAY_num_workers_soft_limit", "30")
    nodes.add_node(num_cpus=4, object_store_memory=200 * 2**20)
    with fed("ray", "FromRay", workers=2, steps=21, address=nodes.address) as first:
        assert first.finish()["status"] == 0
    with fed("ray", "FromRay", workers=3, address=nodes.address) as second:
        end = second.finish()
    assert end["status"] == 0, end["err"]
    assert (end["result"]["weights_sha256"], samples(second)) == (sha256, order)


def damaged(folder: Path, source: Path) -> Path:
    """A copy of the set with the data of one row group overwritten."""
    shutil.copytree(source, folder)
    path = folder / "p3.parquet"
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(2).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    content[start + 4 : start + 60] = bytes(56)
    path.write_bytes(content)
    return folder


def test_a_damaged_row_group_ends_the_run_with_its_name(fed, tmp_path, rows_set):
    with fed("damaged", path=damaged(tmp_path / "bad", rows_set), workers=2) as run:
        end = run.finish()
    assert end["status"] in (1, 2), "found by the first try of a micro-batch, or later"
    assert "p3.parquet, row group 2: cannot be read" in end["err"]


@pytest.mark.slow
def test_a_damaged_row_group_is_left_out_and_journaled(fed, tmp_path, rows_set):
    path, settings = damaged(tmp_path / "bad", rows_set), ["on_bad_file='skip'"]
    with fed("skips", path=path, settings=settings, workers=2) as run:
        end = run.finish()
    assert end["status"] == 0, end["err"]
    notes = [line["data"] for line in run.lines("journal.jsonl") if "data" in line]
    assert {n["epoch"] for n in notes} >= {0, 1, 2}
    assert all("p3.parquet, row group 2: cannot be read" in n["skipped"] for n in notes)


SMALL = ["limit_bytes=200_000", "context=32", "width=16", "heads=2", "layers=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("ParquetDigits", []), ("ParquetCharLM", SMALL)])
def test_a_shipped_workload_is_fed_and_its_record_checked(tmp_path, ray_temp, name, settings):
    settings = [f"folder={str(tmp_path / 'data')!r}", *settings]
    target = f"workers.workloads.parquet:{name}"
    with LiveRun(target, tmp_path, "shipped", ray_temp, workers=2, steps=40, set=settings) as run:
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert_complete(run, 40)
    assert main(["data", "check", str(run.directory)]) == 0


def test_an_iterable_dataset_is_refused_with_the_reason(fed):
    with fed("streaming", "Streaming") as run:
        end = run.finish()
    assert end["status"] == 2
    assert "an IterableDataset: its order depends on who iterates it" in end["err"]


def test_a_run_does_not_go_on_with_other_data(fed, tmp_path, rows_set):
    path = tmp_path / "copy"
    shutil.copytree(rows_set, path)
    with fed("changed", path=path, steps=5) as run:
        assert run.finish()["status"] == 0
    (path / "p5.parquet").unlink()
    with fed("changed", path=path, steps=9) as run:
        end = run.finish()
    assert end["status"] == 2
    assert "the data changed since the run" in end["err"]
    assert "p5.parquet is missing" in end["err"]


def random_part(run: LiveRun, draw: random.Random, stop: int) -> dict:
    """Lost workers and lost feeds at random steps until `stop`, the end or a drain (SIGTERM)."""
    while True:
        step = draw.randrange(stop)
        status = run.wait_or_end(lambda s, at=step: s["step"] >= at and s["workers"])
        if status is None or status["step"] >= stop:
            break
        with contextlib.suppress(AssertionError, ProcessLookupError, StopIteration):
            if draw.random() < 0.25:
                os.kill(feed_pid(run), signal.SIGKILL)
            elif status["world_size"] > 1:
                run.kill(rank=draw.randrange(status["world_size"]))
        run.wait_or_end(lambda s, at=status["step"]: s["step"] > at)
    if stop < STEPS:
        run.process.send_signal(signal.SIGTERM)
    return run.finish(asleep=stop < STEPS)


def assert_no_trace(fed, planned, seed, num_stops):
    """Up to four workers, another maximum after each stop."""
    draw = random.Random(seed)
    transform = bool(seed % 2)
    stops = sorted(draw.sample(range(4, STEPS - 4), num_stops))
    settings = [f"transform={transform}", "sleep=0.02"]
    for stop in [*stops, STEPS]:
        high = draw.randint(2, 4)
        with fed(f"random-{seed}", workers=f"1..{high}", settings=settings) as run:
            end = random_part(run, draw, stop)
    assert end["status"] == 0, end["err"]
    assert (end["result"]["weights_sha256"], samples(run)) == planned(transform)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100, 101, 102])
def test_no_random_history_leaves_a_trace(fed, planned, seed):
    assert_no_trace(fed, planned, seed, num_stops=seed % 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(40))
def test_no_random_history_with_restarts_leaves_a_trace(fed, planned, seed):
    assert_no_trace(fed, planned, seed, num_stops=2)
