"""Tune around `TorchTrainer.fit()`: each trial is a run of its own, which survives the loss of a
worker without a checkpoint and without a FailureConfig."""

import json

import pytest

from tests.cluster.live import environment, python

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SCRIPT = """import os, signal, sys
from pathlib import Path

import ray.train
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

place = Path(sys.argv[1])


def train(config):
    import torch
    import torch.distributed as dist

    total = torch.tensor(0.0)
    for epoch in range(4):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        total += ones.item() / dist.get_world_size()
        rank = ray.train.get_context().get_world_rank()
        killed = place / "killed"
        if config["lr"] == 2.0 and epoch == 2 and rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        ray.train.report({"epoch": epoch, "score": total.item() * config["lr"], "rank": rank})


def trial(config):
    name = f"trial-{config['lr']:g}"
    result = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name, storage_path=str(place / "runs"), callbacks=[TuneReportCallback()]
        ),
    ).fit()
    assert result.path == str(place / "runs" / name)


tuner = tune.Tuner(
    trial,
    param_space={"lr": tune.grid_search([1.0, 2.0])},
    tune_config=tune.TuneConfig(metric="score", mode="max"),
    run_config=tune.RunConfig(name="tuned", storage_path=str(place), verbose=0),
)
results = tuner.fit()
assert not results.errors, results.errors
print("BEST", results.get_best_result().metrics["score"])
for result in results:
    print("TRIAL", result.config["lr"], result.metrics["score"], len(result.metrics_dataframe))
"""


def test_each_trial_is_a_run_of_its_own(shared_head, ray_temp, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}
    ended = python(env, "-m", "elastic", "run", script, tmp_path, patience_s=240)
    assert ended.returncode == 0, (ended.stdout[-4000:], ended.stderr[-4000:])
    said = [line.split() for line in ended.stdout.splitlines()]
    assert ["BEST", "8.0"] in said
    trials = {words[1]: words[2:] for words in said if words[:1] == ["TRIAL"]}
    assert trials["1.0"] == ["4.0", "4"]
    assert trials["2.0"][0] == "8.0"
    assert int(trials["2.0"][1]) >= 4, "the killed trial reports from its beginning again"
    for name, num_losses in (("trial-1", 0), ("trial-2", 1)):
        result = json.loads((tmp_path / "runs" / name / "result.json").read_text())
        assert (result["outcome"], len(result["recoveries"])) == ("succeeded", num_losses)
    assert (tmp_path / "killed").exists()
    shared_head.assert_empty()
