"""Real workers call a script of Ray Train's again after a kill and after its own exception: the
weights are those of the run that nothing has happened to."""

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.scripts import jobs
from tests.scripts.local_run import LocalRun
from workers.script_loop import ScriptLoop

WORKERS, LEAST = 3, 2


def started(place: Path, max_failures: int = 0, **settings) -> LocalRun:
    from elastic.on_ray.train_api import answering

    loop = ScriptLoop(
        function=partial(jobs.learn, settings),
        place=str(place),
        name=place.name,
        max_failures=max_failures,
        ray_version="2.60.0",
        installed=answering,
    )
    run = LocalRun(loop, place, WORKERS, least=LEAST)
    run.can_replace = False
    return run.start()


def reports(place: Path) -> list[dict]:
    return [json.loads(line) for line in (place / "reports.jsonl").read_text().splitlines()]


def weights(place: Path) -> torch.Tensor:
    name = reports(place)[-1]["checkpoint"]
    return torch.load(place / name / "state.pt")["weights"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("undisturbed") / "run"
    run = started(place)
    assert run.wait() == "succeeded"
    assert run.level is not None
    assert run.level.level == 0
    return place


def test_without_a_fault_the_script_is_called_once(undisturbed):
    found = reports(undisturbed)
    epochs = [r["metrics"]["epoch"] for r in found if r["checkpoint"]]
    assert epochs == list(range(jobs.EPOCHS))
    assert {r["generation"] for r in found} == {1}
    assert {r["world_size"] for r in found} == {WORKERS}


@pytest.mark.parametrize("rank", [0, 2])
def test_after_a_kill_it_is_called_again_in_the_same_processes(undisturbed, tmp_path, rank):
    place = tmp_path / "run"
    run = started(place, sleep_s=0.05)
    deadline = time.monotonic() + 90
    while not (place / "reports.jsonl").exists() or len(reports(place)) < 6:
        assert time.monotonic() < deadline, run.decisions
        time.sleep(0.01)
    before = reports(place)[-1]
    run.kill(run.members[rank])
    assert run.wait() == "succeeded"
    found = reports(place)
    last = found[-1]
    assert last["world_size"] == WORKERS - 1
    assert last["generation"] > 1
    assert set(last["metrics"]["pids"]) < set(before["metrics"]["pids"])  # no process was started
    done = [r["metrics"]["epoch"] for r in found if r["checkpoint"]]
    assert done == list(range(jobs.EPOCHS))  # a report that has returned is not done again
    assert torch.equal(weights(place), weights(undisturbed))


def test_its_own_exceptions_count(undisturbed, tmp_path):
    place = tmp_path / "run"
    run = started(place, max_failures=1, raise_at=3, raise_times=1)
    assert run.wait() == "succeeded"
    assert torch.equal(weights(place), weights(undisturbed))
    assert {r["world_size"] for r in reports(place)} == {WORKERS}
    assert not [d for d in run.decisions if "a collective of" in d], "no loss was waited for"

    place = tmp_path / "too_often"
    run = started(place, max_failures=1, raise_at=3, raise_times=2)
    assert run.wait() == "failed"
    assert "ValueError: the script's own" in run.failure
