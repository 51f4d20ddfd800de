"""Who has started a script's run is told what its ranks report and raise: Ray's UserCallbacks."""

import json
from typing import Any

import pytest
from ray.train import RunConfig, UserCallback

from elastic import ray_train
from elastic.driver.followed import ScriptRaised
from tests.scripts.test_names import trainer
from tests.scripts.test_reports import opened, reported


class Heard(UserCallback):
    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.raised: list[Any] = []
        self.contexts: list[Any] = []

    def after_report(self, run_context, metrics, checkpoint) -> None:
        self.contexts.append(run_context)
        self.reports.append((metrics, checkpoint and checkpoint.path))

    def after_exception(self, run_context, worker_exceptions) -> None:
        self.raised.append(worker_exceptions)


def line(metrics: list[dict[str, Any]], checkpoint: str | None = None) -> dict[str, Any]:
    return {"metrics": metrics[0], "metrics_of_ranks": metrics, "checkpoint": checkpoint}


def followed(tmp_path, *callbacks: UserCallback):
    asked = trainer(run_config=RunConfig(callbacks=[*callbacks]))
    return asked, ray_train.followed_for(asked, str(tmp_path / "run"))


def test_each_report_is_told_once_with_the_metrics_of_all_ranks_and_its_checkpoint(tmp_path):
    reports = opened(tmp_path)
    reports.log(line([{"of": "an earlier launch"}]))
    heard = Heard()
    asked, told = followed(tmp_path, heard)
    told(str(tmp_path / "run"))
    assert heard.reports == []
    reports.log(line([{"loss": 1.0}, {"loss": 3.0}]))
    reported(tmp_path, reports, "checkpoint_a")
    with (tmp_path / "run" / "reports.jsonl").open("a") as file:
        text = json.dumps(line([{"loss": 0.5}, {}], "checkpoint_a"))
        file.write(text[:20])
        file.flush()
        told(str(tmp_path / "run"))
        assert len(heard.reports) == 1, "half a line is none yet"
        file.write(text[20:] + "\n")
    told(str(tmp_path / "run"))
    told(str(tmp_path / "run"))
    path = str(tmp_path / "run" / "checkpoint_a")
    assert heard.reports == [([{"loss": 1.0}, {"loss": 3.0}], None), ([{"loss": 0.5}, {}], path)]
    assert heard.contexts == [asked.train_run_context] * 2


def test_what_ranks_raise_in_one_call_is_told_together(tmp_path):
    reports = opened(tmp_path)
    reports.add_failure("before", 1, 0, "KeyError: 'x'")
    heard = Heard()
    _, told = followed(tmp_path, heard)
    reports.add_failure("ab-cd", 3, 1, "ValueError: of rank 1")
    reports.add_failure("ab-cd", 3, 0, "ValueError: of rank 0")
    reports.add_failure("ab-cd", 10, 2, "OSError")
    for _ in range(2):
        told(str(tmp_path / "run"))
    assert [[*of_call] for of_call in heard.raised] == [[0, 1], [2]]
    assert isinstance(heard.raised[0][1], ScriptRaised)
    assert str(heard.raised[0][1]) == "ValueError: of rank 1"


def test_a_callback_that_raises_is_told_no_more(tmp_path):
    class Wrong(UserCallback):
        def after_report(self, run_context, metrics, checkpoint) -> None:
            raise KeyError("mine")

    reports = opened(tmp_path)
    heard = Heard()
    _, told = followed(tmp_path, Wrong(), heard)
    for number in range(2):
        reports.log(line([{"number": number}]))
    told(str(tmp_path / "run"))
    assert isinstance(told.error, KeyError)
    assert heard.reports == []


def test_callbacks_for_ray_train_s_controller_are_refused():
    from ray.train.v2.api.callback import RayTrainCallback

    asked = trainer(run_config=RunConfig(callbacks=[RayTrainCallback()]))
    with pytest.raises(ValueError, match="talk to Ray Train's controller"):
        ray_train.fit(asked)
