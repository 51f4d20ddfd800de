"""Trackers of experiments, MLflow and Weights & Biases: what they are told of a run's steps.

They are fed from metrics.jsonl, which has each committed step once, and asked what they have:
whoever feeds one may come and go, and no step is logged twice. Who reads the file is
elastic/cli/track.py.
"""

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from elastic.observe.scalars import number, scalars_of
from elastic.protocol.errors import WrongInput
from elastic.store.run_directory import as_dict

KEY = "elastic.run"
"""The tag by which a run is found again in MLflow."""
STEP = "step"
"""The metric by which MLflow tells the last step; it comes after all others of its step."""
MOST_AT_ONCE = 1000
"""MLflow takes so many metrics in a call."""
MOST_PARAMETERS = 100
"""Likewise."""
FINISHED = {"succeeded": "FINISHED", "stopped": "KILLED"}
"""In MLflow's words; whatever else a run came to is FAILED."""

Line = Mapping[str, Any]
"""Of metrics.jsonl."""


class Tracker(Protocol):
    """One run in a tracker, made there or found again."""

    @property
    def last_step(self) -> int:
        """Of those that it has; 0 if it has none."""
        ...

    def log(self, lines: Sequence[Line]) -> None:
        """Steps after `last_step`, in order."""
        ...

    def close(self, outcome: str) -> None:
        """outcome: of result.json; empty while the run may go on."""
        ...


def key_of(place: str) -> str:
    """Of the run in a run directory, a path or URI: letters, digits and dashes."""
    bare = place.partition("?")[0].rstrip("/")
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in bare.rpartition("/")[2])
    return f"{name[:64]}-{hashlib.blake2b(bare.encode(), digest_size=6).hexdigest()}"


def logged_of(line: Line) -> dict[str, float]:
    """What is logged of a step: finite numbers only, the user's by the names that they have."""
    user = {name: number(value) for name, value in as_dict(line.get("user")).items()}
    return scalars_of(line) | {name: v for name, v in user.items() if math.isfinite(v)}


def client(package: str) -> Any:
    """The tracker's own package. WrongInput names the extra that brings it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise WrongInput(
            f"{package} cannot be imported ({error}): pip install 'elastic-ray-trainer[{package}]'"
        ) from error


class MLflow:
    """Its server is MLFLOW_TRACKING_URI's, as its own client has it."""

    def __init__(self, project: str, key: str, name: str, config: Mapping[str, Any]) -> None:
        """project: the experiment, which is made if there is none. config: of config.json."""
        mlflow = client("mlflow")
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        found = self._client.get_experiment_by_name(project)
        place = self._client.create_experiment(project) if found is None else found.experiment_id
        runs = self._client.search_runs([place], f"tags.`{KEY}` = '{key}'", max_results=1)
        if runs:
            self._run_id: str = runs[0].info.run_id
            self._last_step = int(runs[0].data.metrics.get(STEP, 0))
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = self._client.create_run(place, tags={KEY: key}, run_name=name).info.run_id
        self._last_step = 0
        values = [mlflow.entities.Param(k, str(v)) for k, v in config.items() if v is not None]
        self._client.log_batch(self._run_id, params=values[:MOST_PARAMETERS])

    @property
    def last_step(self) -> int:
        return self._last_step

    def log(self, lines: Sequence[Line]) -> None:
        waiting: list[Any] = []
        for line in lines:
            step, at_ms = int(line["step"]), round(1000 * float(line["time"]))
            scalars = {**logged_of(line), STEP: float(step)}
            of_step = [self._metric(k, v, at_ms, step) for k, v in scalars.items()]
            if len(waiting) + len(of_step) > MOST_AT_ONCE:
                self._send(waiting)
                waiting = []
            waiting += of_step
        self._send(waiting)
        self._last_step = int(lines[-1]["step"]) if lines else self._last_step

    def _send(self, metrics: list[Any]) -> None:
        for start in range(0, len(metrics), MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MOST_AT_ONCE])

    def close(self, outcome: str) -> None:
        if outcome:
            self._client.set_terminated(self._run_id, FINISHED.get(outcome, "FAILED"))


class WandB:
    """Server, key and user are those that its own client finds."""

    def __init__(self, project: str, key: str, name: str, config: Mapping[str, Any]) -> None:
        """project, config: as MLflow's."""
        wandb = client("wandb")
        self._run: Any = wandb.init(
            project=project, id=key, name=name, config=dict(config), resume="allow"
        )
        self._last_step = max(0, int(self._run.step) - 1) if self._run.resumed else 0

    @property
    def last_step(self) -> int:
        return self._last_step

    def log(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._run.log(logged_of(line), step=int(line["step"]))
            self._last_step = int(line["step"])

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome in ("", "succeeded", "stopped") else 1)


TRACKERS: dict[str, Callable[[str, str, str, Mapping[str, Any]], Tracker]] = {
    "mlflow": MLflow,
    "wandb": WandB,
}
"""By the word of the command line: (project, key, name, config) to a run in it."""
