"""The run directory of a script: steps of its optimizers are in metrics.jsonl, the engine's own in
commits.jsonl, and a controller's successor goes on with both."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elastic.control.transition import start
from elastic.controller.recorder import Recorder
from elastic.driver.resume import SCRIPT
from elastic.protocol.messages.to_controller import ScriptSteps
from elastic.protocol.step_record import NONE_APPLIED, AppliedRecord
from elastic.store import run_directory
from elastic.store.before import look_at
from elastic.store.files import Folder, open_folder
from elastic.store.journal import read_lines
from elastic.store.run_directory import RunDirectory
from elastic.store.script_directory import ScriptDirectory
from tests.scripts.test_applied import lines
from tests.store.test_claim import bucket
from tests.store.test_run_directory import metrics, samples
from tests.test_recorder import close, record, recorder, settled


def on_record(folder: Folder, name: str = "metrics.jsonl") -> list[tuple[int, int]]:
    """Step and generation of each line."""
    return [(line["step"], line["generation"]) for line in read_lines(folder, name)]


def of_script(storage: Path) -> Recorder:
    return recorder(str(storage), content={"steps": 9, "target": f"{SCRIPT}train.py"})


def test_a_successor_goes_on_with_steps_and_reports(tmp_path):
    async def run() -> None:
        died = of_script(tmp_path)
        await died.open_at(0, [])
        died.record(None, None, start(died.limits, 5.0))
        died.record_applied(ScriptSteps(1, 0, tuple(lines(1, 1, 2, 3))))
        record(died, 1)
        await settled(died)
        died.writer.executor.shutdown()
        successor = of_script(tmp_path)
        past = await successor.reopen()
        assert past is not None
        assert past.last_metrics == metrics(1)
        successor.record_applied(ScriptSteps(1, 0, tuple(lines(1, 2, 3, 4))))
        successor.record_applied(ScriptSteps(5, 2, tuple(lines(5, 3))))
        record(successor, 2)
        await close(successor)

    asyncio.run(run())
    folder = open_folder(str(tmp_path / "r"))
    assert on_record(folder) == [(1, 1), (2, 1), (3, 5)]
    assert on_record(folder, "metrics.rolledback.jsonl") == [(3, 1), (4, 1)]
    assert [step for step, _ in on_record(folder, "commits.jsonl")] == [1, 2]
    assert list((tmp_path / "r" / "tensorboard").iterdir())


def test_a_store_that_cannot_append_has_each_step_once(tmp_path, monkeypatch: Any):
    monkeypatch.setattr(run_directory, "UPLOAD_EVERY_S", 24 * 3600.0)
    store = bucket(tmp_path / "bucket")
    run = ScriptDirectory(store, "r", spool=tmp_path / "spool", launch="a")
    run.record_applied(1, 0, lines(1, 1, 2, 3))
    assert run.safe_applied == NONE_APPLIED, "storage has none of them"
    run.flush(with_status=False)
    assert run.safe_applied == AppliedRecord(1, 3, 1)
    run.record_applied(4, 1, lines(4, 2))
    assert run.record_step(metrics(1), samples(1))
    run.flush(with_status=False)  # the controller dies here
    again = ScriptDirectory(store, "r", spool=tmp_path / "another node", launch="a")
    again.record_applied(4, 1, lines(4, 2, 3))
    assert again.last_step == 1
    again.close()
    assert on_record(store.at("r")) == [(1, 1), (2, 4), (3, 4)]
    assert on_record(store.at("r"), "metrics.rolledback.jsonl") == [(2, 1), (3, 1)]
    assert on_record(store.at("r"), "commits.jsonl") == [(1, 1)]


@pytest.mark.parametrize("is_bucket", [False, True], ids=["local", "bucket"])
def test_a_run_of_an_earlier_version_keeps_its_record(tmp_path, is_bucket):
    """Of which the engine's lines are in metrics.jsonl, and those that were moved aside."""
    store = bucket(tmp_path / "bucket") if is_bucket else open_folder(str(tmp_path))
    before = RunDirectory(store, "r", spool=tmp_path / "spool", launch="a")
    for step in (1, 2, 3):
        assert before.record_step(metrics(step), samples(step))
    before.roll_back(2)
    before.close()
    folder = store.at("r")
    held = look_at(folder)
    kept = {name: read_lines(folder, name) for name in ("metrics.jsonl", "samples.jsonl")}
    undone = ScriptDirectory(store, "r", spool=tmp_path / "another node", launch="a")
    undone.undo(held)
    for spool in ("a third one", "a fourth one"):
        run = ScriptDirectory(store, "r", spool=tmp_path / spool, launch="a")
        assert run.last_step == 2
        run.close()
    assert read_lines(folder, "commits.jsonl") == kept["metrics.jsonl"]
    assert read_lines(folder, "samples.jsonl") == kept["samples.jsonl"]
    assert [step for step, _ in on_record(folder, "commits.rolledback.jsonl")] == [3]
    assert on_record(folder) == []
    assert "metrics.rolledback.jsonl" not in folder.names()
