"""What needs no cluster is refused before one is looked for or started: to start Ray takes seconds.

A cluster that is asked for and not there would be the first line; it is not even dialled.
"""

import threading
from pathlib import Path
from typing import Any

import pytest

import elastic

NO_CLUSTER = "127.0.0.1:9"
NEEDED: dict[str, Any] = {"steps": 1, "global_batch": 2, "micro_batch": 1}


class Job(elastic.Workload):
    def build_model(self) -> Any: ...

    def build_optimizer(self, params: Any) -> Any: ...

    def dataset(self) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Any: ...


class WithLock(Job):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class WithoutLoaders(Job):
    loader_processes = 0


def refused(workload: Job, place: Path, **settings: Any) -> str:
    """The one line, after which nothing is there."""
    with pytest.raises(ValueError, match=r"\w") as refusal:
        elastic.run(workload, storage=str(place / "runs"), **{**NEEDED, **settings})
    assert not (place / "runs").exists()
    return str(refusal.value)


def test_a_workload_that_cannot_be_sent(tmp_path):
    told = refused(WithLock(), tmp_path, address=NO_CLUSTER)
    assert told.startswith("the workload cannot be sent to workers: TypeError: cannot pickle")


def test_a_workload_that_loads_nothing(tmp_path):
    told = refused(WithoutLoaders(), tmp_path, address=NO_CLUSTER)
    assert told == "loader_processes must be at least 1, got 0"


def test_gpus_that_this_machine_has_not(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    told = refused(Job(), tmp_path, address="local", device="cuda", workers=2)
    assert told == (
        "a GPU for each of 2 workers is needed, and this machine has 0; lower --workers, or use "
        "--device cpu"
    )
    assert not (tmp_path / "ray").exists(), "Ray has not been started"
