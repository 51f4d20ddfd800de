"""The run directory of a script: steps of its optimizers are in metrics.jsonl, the engine's own in
commits.jsonl, and a controller's successor goes on with both."""

import asyncio
from pathlib import Path
from typing import Any

from elastic.control.transition import start
from elastic.controller.recorder import Recorder
from elastic.driver.resume import SCRIPT
from elastic.protocol.messages.to_controller import ScriptSteps
from elastic.store import run_directory
from elastic.store.files import Folder, open_folder
from elastic.store.journal import read_lines
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
    run.flush(with_status=False)
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
