"""Trackers, by doubles of their clients' documented interfaces: each step once, whoever comes and
goes."""

import json
import sys
from types import SimpleNamespace

import pytest

from elastic.cli.app import main
from elastic.observe.trackers import MOST_AT_ONCE, key_of, logged_of

STEPS = 300


class FakeClient:
    """What `mlflow.MlflowClient` does of what is asked of it, on a server that outlives it."""

    server: SimpleNamespace

    def get_experiment_by_name(self, name):
        return self.server.experiments.get(name)

    def create_experiment(self, name):
        self.server.experiments[name] = SimpleNamespace(experiment_id="7")
        return "7"

    def search_runs(self, places, filter_string, max_results):
        assert (places, max_results) == (["7"], 1)
        tags = {
            f"tags.`elastic.run` = '{run.tags['elastic.run']}'": run for run in self.server.runs
        }
        return [tags[filter_string]] if filter_string in tags else []

    def create_run(self, place, tags, run_name):
        info = SimpleNamespace(run_id=f"run{len(self.server.runs)}", name=run_name)
        data = SimpleNamespace(metrics={}, params={})
        self.server.runs.append(SimpleNamespace(info=info, data=data, tags=tags, history=[]))
        return self.server.runs[-1]

    def update_run(self, run_id, status):
        self.of(run_id).status = status

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= MOST_AT_ONCE
        assert len(params) <= 100
        run = self.of(run_id)
        run.data.params |= {p.key: p.value for p in params}
        for metric in metrics:
            run.data.metrics[metric.key] = metric.value
            run.history.append((metric.key, metric.step, metric.value, metric.timestamp))

    def set_terminated(self, run_id, status):
        self.of(run_id).status = status

    def of(self, run_id):
        return next(run for run in self.server.runs if run.info.run_id == run_id)


@pytest.fixture
def mlflow(monkeypatch):
    """The server."""
    server = SimpleNamespace(experiments={}, runs=[])

    def metric(key, value, timestamp, step):
        return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    def param(key, value):
        return SimpleNamespace(key=key, value=value)

    monkeypatch.setattr(FakeClient, "server", server, raising=False)
    entities = SimpleNamespace(Metric=metric, Param=param)
    package = SimpleNamespace(MlflowClient=FakeClient, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    return server


@pytest.fixture
def wandb(monkeypatch):
    """Its runs by id."""
    runs = {}

    def init(project, id, name, config, resume):
        assert resume == "allow"
        run = runs.setdefault(id, SimpleNamespace(history=[], step=0, project=project, name=name))
        run.resumed = bool(run.history)

        def log(values, step):
            assert step >= run.step, "W&B drops what comes too late"
            run.history.append((step, values))
            run.step = step + 1

        run.log, run.finish = log, lambda exit_code: setattr(run, "exit_code", exit_code)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return runs


def line(step: int) -> str:
    loss = None if step == 5 else 1 / step
    values = {"step": step, "time": 100.0 + step, "loss": loss, "step_s": 0.1, "world_size": 2}
    return (
        json.dumps({**values, "generation": 1, "samples": step, "user": {"accuracy": 0.5}}) + "\n"
    )


@pytest.fixture
def run(tmp_path):
    """One that has ended."""
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"steps": STEPS, "name": "my run", "seed": 0}))
    result = {"outcome": "succeeded", "steps": STEPS}
    (folder / "result.json").write_text(json.dumps(result))
    write(folder, STEPS)
    return folder


def write(folder, steps: int) -> None:
    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, steps + 1))))


def test_mlflow_has_each_step_once_whoever_comes_again(run, mlflow, capsys):
    write(run, 200)
    assert main(["track", str(run), "mlflow", "--project", "mine"]) == 0
    write(run, STEPS)  # resumed
    assert main(["track", str(run), "mlflow", "--project", "mine"]) == 0
    assert "from step 201 on" in capsys.readouterr().out
    (found,) = mlflow.runs
    assert list(mlflow.experiments) == ["mine"]
    steps = [step for key, step, _, _ in found.history if key == "step"]
    assert steps == list(range(1, STEPS + 1))
    losses = {step: value for key, step, value, _ in found.history if key == "loss"}
    assert losses == {step: 1 / step for step in range(1, STEPS + 1) if step != 5}
    assert ("accuracy", 300, 0.5, 400_000) in found.history
    assert (found.data.params["seed"], found.status) == ("0", "FINISHED")


def test_wandb_has_each_step_once_whoever_comes_again(run, wandb):
    write(run, 200)
    assert main(["track", str(run), "wandb"]) == 0
    write(run, STEPS)
    assert main(["track", str(run), "wandb"]) == 0
    (found,) = wandb.values()
    assert [step for step, _ in found.history] == list(range(1, STEPS + 1))
    assert found.history[0][1]["loss"] == 1.0
    assert "loss" not in found.history[4][1], "it was not finite"
    assert (found.project, found.name, found.exit_code) == ("elastic", "my run", 0)


def test_a_step_that_is_done_again_is_not_logged_again(run, wandb):
    from elastic.cli.track import feed
    from elastic.observe.trackers import WandB
    from elastic.store.files import open_folder
    from elastic.store.journal import LineTail

    tracker, tail = WandB("p", "k", "n", {}), LineTail(open_folder(str(run)), "metrics.jsonl")
    write(run, 20)
    feed(tracker, tail)
    write(run, 12)  # the run has fallen back to step 10
    feed(tracker, tail)
    write(run, 25)
    feed(tracker, tail)
    (found,) = wandb.values()
    assert [step for step, _ in found.history] == list(range(1, 26))


def test_a_tracker_that_is_none_and_one_that_is_not_installed_are_one_line(
    run, monkeypatch, capsys
):
    assert main(["track", str(run), "paper"]) == 2
    assert "'paper' is no tracker: choose from mlflow, wandb" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["track", str(run), "wandb"]) == 2
    assert "pip install 'elastic-ray-trainer[wandb]'" in capsys.readouterr().err


def test_a_run_is_the_same_wherever_it_is_asked_for_and_has_a_key_that_trackers_take():
    assert key_of("s3://b/runs/a b?region=x") == key_of("s3://b/runs/a b")
    assert key_of("s3://b/runs/a b").startswith("a-b-")
    assert key_of("/x/first") != key_of("/y/first")


def test_only_finite_numbers_are_logged():
    shown = {"loss": float("nan"), "step_s": 0.1, "user": {"a": True, "b": "x", "c": 2}}
    assert logged_of(shown) == {"step_s": 0.1, "c": 2.0}
    shown = {"step": 2, "samples": 16, "step_s": 0.5, "learning_rate": 0.1, "gradient_norm": None}
    assert logged_of(shown) == {
        **{"samples": 16, "step_s": 0.5, "learning_rate": 0.1, "samples_per_s": 16.0}
    }
