"""A disk that is really full: training goes on, the run says so, and resumes once there is room."""

import contextlib
import json
import os

import pytest

from elastic.chaos.storage_faults import BALLAST
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.cluster.live import assert_complete, begin
from tests.small_disk import small_disk

pytestmark = pytest.mark.cluster

OPTIONS = {"steps": 120, "checkpoint_every": 20, "set": ["sleep=0.02"]}


@pytest.fixture
def tmp_path(tmp_path):
    with small_disk(tmp_path, size_mb=4) as found:
        yield found


def fill(path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1 << 12))


@pytest.mark.slow
def test_a_full_disk_costs_checkpoints_and_no_step(start, reference, tmp_path):
    with start("Toy", workers=2, **OPTIONS) as run:
        run.wait_for(lambda s: (s.get("committed_checkpoint") or 0) >= 20)
        fill(tmp_path / "ballast")
        end = run.finish()
    sha256, samples = reference(steps=120)
    assert end["status"] == 0, end["err"]
    assert json.loads(end["out"])["weights_sha256"] == sha256
    warning = next(x for x in end["err"].splitlines() if x.startswith("elastic: warning:"))
    assert "saves failed, the last at step 120: OSError: [Errno 28] No space left" in warning
    catalogue = Catalogue(open_folder(str(run.directory)).at("checkpoints"))
    newest = catalogue.steps()[-1]
    assert f"the newest checkpoint is of step {newest};" in warning
    assert sum(catalogue.verify(newest)) == catalogue.manifest(newest).size_bytes
    (tmp_path / "ballast").unlink()
    with start("Toy", workers=2, **OPTIONS) as again:
        end = again.finish()
    assert end["status"] == 0, end["err"]
    assert end["result"]["weights_sha256"] == sha256
    assert_complete(again, 120)
    assert [s["sha256"] for s in again.lines("samples.jsonl")] == samples
    assert catalogue.steps()[-1] == 120


@pytest.mark.slow
def test_a_full_disk_ends_a_run_that_must_save(start, tmp_path):
    with start("Toy", workers=2, on_storage_error="fail", **OPTIONS) as run:
        run.wait_for(lambda s: (s.get("committed_checkpoint") or 0) >= 20)
        fill(tmp_path / "ballast")
        end = run.finish()
    assert end["status"] == 1
    assert "No space left" in end["err"]
    assert json.loads(end["out"])["outcome"] == "failed"


@pytest.mark.slow
def test_a_disk_that_chaos_fills_for_a_while_costs_no_step(start, reference, tmp_path):
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("faults: [{what: fill, for_s: 3, when: {step: 25}}]")
    with start("Toy", workers=2, **OPTIONS) as run:
        run.wait_for(lambda s: s["step"] > 0)
        chaos = begin(run.env, "-m", "elastic", "chaos", scenario, run.directory)
        ballast = run.directory / BALLAST
        run.wait_for(lambda s: ballast.exists() and os.statvfs(tmp_path).f_bavail == 0)
        run.wait_for(lambda s: not ballast.exists())
        end = run.finish()
        out, err = chaos.communicate(timeout=60)
    assert chaos.returncode == 0, err
    assert "fill" in out
    sha256, _ = reference(steps=120)
    assert end["status"] == 0, end["err"]
    assert end["result"]["weights_sha256"] == sha256
    assert end["result"]["recoveries"] == []
    assert_complete(run, 120)
