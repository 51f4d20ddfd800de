"""Every public name of Ray Train is in the table of docs/your-script.md; what is refused is refused
before anything starts."""

import inspect
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.collective
import ray.train.torch
from pyarrow.fs import LocalFileSystem
from ray.train import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchConfig, TorchTrainer

from elastic import ray_train
from elastic.driver.scripts import ScriptRun, amounts_of, labels_of
from elastic.on_ray.trainer_settings import FIELDS, REFUSED, NoEffect, notes, refusal

CLASSES = (ScalingConfig, RunConfig, FailureConfig, CheckpointConfig, LoggingConfig, TorchConfig)
PAGE = Path(__file__).parents[2] / "docs" / "your-script.md"


class OwnSplit(DataConfig):
    def configure(self, *_: Any, **__: Any) -> Any:
        return []


def trainer(**settings: Any) -> TorchTrainer:
    settings.setdefault("scaling_config", ScalingConfig(num_workers=2))
    return TorchTrainer(lambda: None, **settings)


def in_table() -> set[str]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.parametrize("module", [ray.train, ray.train.torch, ray.train.collective])
def test_every_public_name_is_in_the_table(module):
    assert set(module.__all__) - in_table() == set()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"datasets": {"train": [1]}}, "datasets['train'] is a list, and no ray.data.Dataset"),
        (
            {
                "datasets": {"train": list},
                "dataset_config": DataConfig(datasets_to_split=["valid"]),
            },
            "datasets_to_split names 'valid', and datasets= has none of it",
        ),
        (
            {"datasets": {"train": list}, "dataset_config": OwnSplit()},
            "OwnSplit.configure() is not supported: rows are dealt by elastic",
        ),
        ({"torch_config": TorchConfig(backend="mpi")}, "backend 'mpi' is not supported"),
        (
            {"scaling_config": ScalingConfig(num_workers=2, resources_per_worker={"memory": 1})},
            "['memory'] is not supported: workers are placed by CPUs, GPUs and",
        ),
        (
            {"scaling_config": ScalingConfig(num_workers=2, label_selector=[{"a": "b"}, {}])},
            "label_selector must be the same for all workers",
        ),
        (
            {"scaling_config": ScalingConfig(num_workers=2, placement_strategy="STRICT_PACK")},
            "no placement group can be resized",
        ),
        (
            {"run_config": RunConfig(worker_runtime_env={"env_vars": {"A": "1"}})},
            "worker_runtime_env is not supported yet",
        ),
    ],
)
def test_what_is_refused_is_refused_with_one_line(settings, why):
    with pytest.raises(ValueError, match=re.escape(why)) as found:
        ray_train.fit(trainer(**settings))
    assert "\n" not in str(found.value)


def test_fit_is_ours_once_it_is_imported():
    assert TorchTrainer.fit is ray_train.fit


def test_the_variable_that_cannot_be_sent_is_named():
    import threading

    held = threading.Lock()

    def train():
        return held

    with pytest.raises(ValueError, match="because of its variable 'held'"):
        ray_train.fit(TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)))


def test_what_has_no_effect_is_told(monkeypatch):
    """Each setting in one line, once it is not Ray's default."""
    for name in [name for name in os.environ if name.startswith("RAY_TRAIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    assert notes(trainer()) == []
    monkeypatch.setenv("RAY_TRAIN_B", "2")
    monkeypatch.setenv("RAY_TRAIN_A", "1")
    scaling = {"placement_strategy": "SPREAD", "elastic_resize_monitor_interval_s": 1.0}
    failure = {
        "max_failures": 3,
        "controller_failure_limit": 3,
        "max_preemption_failures": 1,
        "relax_collectives_on_preemption": True,
        "preemption_grace_s": 3.0,
    }
    asked = trainer(
        scaling_config=ScalingConfig(num_workers=2, **scaling),
        run_config=RunConfig(
            failure_config=FailureConfig(**failure), logging_config=LoggingConfig("DEBUG")
        ),
        torch_config=TorchConfig(timeout_s=60, init_method="tcp"),
        dataset_config=DataConfig(enable_shard_locality=False),
    )
    found = notes(asked)
    assert "TorchConfig timeout_s has no effect: a lost worker is noticed in 3 s at most" in found
    assert found[-1] == "RAY_TRAIN_A, RAY_TRAIN_B in the environment: no effect under elastic"
    without = [
        f"{kind} {name}"
        for kind, settings in FIELDS.items()
        for name, meaning in settings.items()
        if isinstance(meaning, NoEffect)
    ]
    assert sorted(line.partition(" has no")[0] for line in found[:-1]) == sorted(without)


@pytest.mark.parametrize("of", [*CLASSES, DataConfig, TorchTrainer])
def test_every_setting_has_its_meaning_or_is_refused_or_told(of):
    has_fields = of in CLASSES
    given = {f.name: f.default for f in fields(of)} if has_fields else parameters(of)
    assert given.keys() == FIELDS[of.__name__].keys()
    told = {n: m.default for n, m in FIELDS[of.__name__].items() if isinstance(m, NoEffect)}
    assert told == {name: given[name] for name in told}


def parameters(of: type) -> dict[str, Any]:
    found = inspect.signature(of).parameters.values()
    return {parameter.name: parameter.default for parameter in found}


def test_every_setting_that_is_refused_is():
    asked = {
        ("TorchTrainer", "validation_config"): trainer(),
        ("ScalingConfig", "use_tpu"): trainer(),
        ("ScalingConfig", "topology"): trainer(
            scaling_config=ScalingConfig(num_workers=2, topology="2x2")
        ),
        ("RunConfig", "storage_filesystem"): trainer(
            run_config=RunConfig(storage_filesystem=LocalFileSystem())
        ),
        ("RunConfig", "worker_runtime_env"): trainer(
            run_config=RunConfig(worker_runtime_env={"env_vars": {"A": "1"}})
        ),
    }
    asked["TorchTrainer", "validation_config"].validation_config = object()
    asked["ScalingConfig", "use_tpu"].scaling_config.use_tpu = True
    all_refused = {(k, n) for k, of in FIELDS.items() for n, m in of.items() if m == REFUSED}
    assert asked.keys() == all_refused
    assert refusal(trainer()) is None
    assert all(refusal(each) for each in asked.values())


def test_where_workers_may_be_placed_is_asked_of_ray():
    selector = {"ray.io/market-type": "in(spot,on-demand)", "disk": "!hdd"}
    labels = labels_of(selector)
    assert (
        labels
        == labels_of([selector, selector])
        == ("ray.io/market-type=in(spot,on-demand),disk=!hdd")
    )
    assert labels_of(None) is labels_of({}) is amounts_of({"CPU": 2}) is amounts_of(None) is None
    assert amounts_of({"TPU": 0}) is None
    assert amounts_of({"a": 10, "b": 1e-05, "c": 123456.7}) == "a=10,b=0.00001,c=123456.7"
    asked = ScriptRun(
        script="s.py", folder=None, storage="/runs", name="r", workers=(1, 2), is_range=False,
        device="cpu", max_failures=0, labels=labels, accelerator_type="A100",
        worker_resources=amounts_of({"CPU": 2, "nic": 0.5}),
    )  # fmt: skip
    need = asked.config.resources.need("cpu")
    assert (need.labels, need.accelerator_type, need.others) == ((selector,), "A100", {"nic": 0.5})


def test_half_of_the_workers_are_enough():
    assert ray_train.num_workers(ScalingConfig(num_workers=3)) == (2, 3)
    assert ray_train.num_workers(ScalingConfig(num_workers=(1, 4))) == (1, 4)
