"""`elastic data plan` and `elastic data check`, on files and records made by hand."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.cli.app import main
from elastic.data import parquet
from elastic.data.footers import make_plan
from elastic.data.reading import read_window
from elastic.data.record import open_record
from elastic.driver.redaction import redacted

TARGET = """
import elastic

class Fed(elastic.Workload):
    def __init__(self, path): self.path = path
    def build_model(self): ...
    def build_optimizer(self, params): ...
    def loss(self, model, batch): ...
    def dataset(self):
        return elastic.data.parquet(self.path, window_bytes=300, transform=TRANSFORM)

class MapStyle(Fed):
    def dataset(self):
        return list(range(70))
"""
ROWS, BATCH, STEPS = 70, 12, 15
EVERY_SECOND = "lambda t: t.take(list(range(0, t.num_rows, 2)))"


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    for i in range(2):
        table = pa.table({"x": np.arange(i * 35, i * 35 + 35)})
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=9)
    return folder


def record(place: Path, folder: Path, ids: np.ndarray, name="Fed", transform="None") -> Path:
    """A run directory whose steps used these ids."""
    target = place / f"job_{place.name}.py".replace("-", "_")
    target.write_text(TARGET.replace("TRANSFORM", transform))
    run = place / "run"
    run.mkdir()
    config = {"target": f"{target}:{name}", "arguments": {"path": str(folder)}}
    (run / "config.json").write_text(json.dumps({**config, "seed": 4, "global_batch": BATCH}))
    with (run / "samples.jsonl").open("w") as file:
        for step in range(STEPS):
            rows = ids[step * BATCH : (step + 1) * BATCH].astype("<i8")
            sha256 = hashlib.sha256(rows.tobytes()).hexdigest()
            line = {"step": step + 1, "first": step * BATCH, "count": BATCH, "sha256": sha256}
            file.write(json.dumps(line) + "\n")
    return run


def planned_ids(folder: Path, transform=None) -> np.ndarray:
    plan = make_plan(parquet(folder, window_bytes=300, transform=transform), 4)
    windows = [(e, w) for e in range(6) for w in range(len(plan.windows(e)))]
    return np.concatenate([read_window(plan, e, w)[0].ids for e, w in windows])


def test_plan_tells_units_rows_steps_and_memory(folder, capsys):
    assert main(["data", "plan", str(folder), "--global-batch", "12"]) == 0
    said = capsys.readouterr().out
    assert "8 row groups of 8 to 9 rows" in said
    assert "5 steps of 12 and 10 rows" in said
    assert main(["data", "plan", str(folder / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["data", "plan", str(folder), "--global-batch", "0"]) == 2
    assert "--global-batch" in capsys.readouterr().err


def test_check_confirms_a_planned_run(folder, tmp_path, capsys):
    run = record(tmp_path, folder, planned_ids(folder))
    assert main(["data", "check", str(run)]) == 0
    assert "15 steps used 180 rows, each as planned: 2 whole epochs" in capsys.readouterr().out


def test_check_takes_a_relative_run_directory_and_leaves_the_process_where_it_was(
    folder, tmp_path, capsys, monkeypatch
):
    """`dataset()` runs in the target's folder, as in a worker; the rest of the process does not."""
    run = record(tmp_path, folder, planned_ids(folder))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["data", "check", f"../{run.name}"]) == 0
    assert "each as planned" in capsys.readouterr().out
    assert Path.cwd() == tmp_path / "elsewhere"


def test_check_finds_relative_data_in_the_folder_of_the_target_wherever_it_is(
    folder, tmp_path, capsys, monkeypatch
):
    """Recorded by the feed where Ray had unpacked the folder, read where it was submitted."""
    run = record(tmp_path, Path("set"), planned_ids(folder))
    package = tmp_path / "_ray_pkg_0"
    shutil.copytree(folder, package / "set")
    source = parquet("set", window_bytes=300).within(str(package))
    open_record(make_plan(source, 4), str(run)).write()
    monkeypatch.chdir(tmp_path.parent)
    assert main(["data", "check", str(run)]) == 0
    assert "each as planned" in capsys.readouterr().out
    pq.write_table(pa.table({"x": np.arange(35)}), folder / "1.parquet")
    assert main(["data", "check", str(run)]) == 2
    assert "set/1.parquet changed: " in capsys.readouterr().err


def test_the_plan_of_a_folder_is_the_same_wherever_it_is(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    for path in ("set", str(folder)):
        assert main(["data", "plan", path]) == 0
        said.append(capsys.readouterr().out)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(folder, tmp_path / "elsewhere" / "set")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["data", "plan", "set"]) == 0
    assert said == [capsys.readouterr().out] * 2


def test_check_says_what_was_left_out(folder, tmp_path, capsys):
    """A file that was damaged before the run began: an epoch is what the others hold."""
    (folder / "1.parquet").write_bytes(b"PAR1 no more")
    plan = make_plan(parquet(folder, window_bytes=300, on_bad_file="skip"), 4)
    windows = [(e, w) for e in range(6) for w in range(len(plan.windows(e)))]
    ids = np.concatenate([read_window(plan, e, w)[0].ids for e, w in windows])
    run = record(tmp_path, folder, ids, transform='None, on_bad_file="skip"')
    assert main(["data", "check", str(run)]) == 0
    said = capsys.readouterr().out
    assert "5 whole epochs without 1 file that could not be read, no row lost" in said


def test_check_reads_again_what_a_transform_decides(folder, tmp_path, capsys):
    ids = planned_ids(folder, lambda t: t.take(list(range(0, t.num_rows, 2))))
    run = record(tmp_path, folder, ids, transform=EVERY_SECOND)
    assert main(["data", "check", str(run)]) == 0
    assert "each as planned: 4 whole epochs" in capsys.readouterr().out


def test_check_finds_swapped_rows_and_lost_steps(folder, tmp_path, capsys):
    ids = planned_ids(folder)
    ids[[30, 31]] = ids[[31, 30]]
    run = record(tmp_path, folder, ids)
    assert main(["data", "check", str(run)]) == 1
    said = capsys.readouterr().out
    assert said == (
        "step 3: used other rows than the plan has there\nNOT exactly once: 1 of 15 steps differ\n"
    )
    lines = (run / "samples.jsonl").read_text().splitlines()
    (run / "samples.jsonl").write_text("\n".join(lines[:4] + lines[5:]) + "\n")
    assert main(["data", "check", str(run)]) == 1
    assert "step 5: the record goes on with step 6" in capsys.readouterr().out


def test_check_misses_steps_that_were_committed_and_are_not_on_record(folder, tmp_path, capsys):
    run = record(tmp_path, folder, planned_ids(folder))
    steps = [json.dumps({"step": i + 1}) for i in range(STEPS + 2)]
    (run / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    assert main(["data", "check", str(run)]) == 1
    assert "17 steps are committed, and the record has 15" in capsys.readouterr().out


def test_check_knows_map_style_datasets(folder, tmp_path, capsys):
    from workers.data.order import SampleOrder

    run = record(tmp_path, folder, SampleOrder(ROWS, 4).rows(0, STEPS * BATCH), name="MapStyle")
    assert main(["data", "check", str(run)]) == 0
    assert "2 whole epochs of 70 rows" in capsys.readouterr().out


def test_check_compares_the_secrets_that_it_is_given(folder, tmp_path, capsys):
    from workers.data.order import SampleOrder

    run = record(tmp_path, folder, SampleOrder(ROWS, 4).rows(0, STEPS * BATCH), name="MapStyle")
    config = json.loads((run / "config.json").read_text())
    config["arguments"] = {"path": str(folder), "api_key": "right"}
    (run / "config.json").write_text(json.dumps(redacted(config)))
    given = ["data", "check", str(run), "--set"]
    assert main([*given, "api_key=wrong"]) == 2
    said = "the argument 'api_key', a secret, is not the one of the run"
    assert said in capsys.readouterr().err
    assert main([*given, "api_key=right"]) == 2
    assert "does not fit" in capsys.readouterr().err  # this workload takes none: it was let through


def test_check_says_what_changed_in_the_data(folder, tmp_path, capsys):
    run = record(tmp_path, folder, planned_ids(folder))
    plan = make_plan(parquet(folder, window_bytes=300), 4)
    found = {"plan_sha256": plan.hash, "plan": plan.to_json(), "counts": [], "skipped": []}
    (run / "data.json").write_text(json.dumps(found))
    assert main(["data", "check", str(run)]) == 0
    (folder / "1.parquet").unlink()
    assert main(["data", "check", str(run)]) == 2
    assert "1.parquet is missing" in capsys.readouterr().err
