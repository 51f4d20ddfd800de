"""A run directory is Ray Train's as well as ours: Ray's own `Result` reads ours, and a run that Ray
Train has begun goes on here."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.train import Checkpoint, CheckpointConfig, Result
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext

from elastic.driver.launch import Result as OwnResult
from elastic.ray_train import rays_result
from tests.scripts.test_reports import names, opened, reported
from workers.scripts.reports import SNAPSHOT, Retention


def rays_manager(tmp_path: Path, config: CheckpointConfig) -> CheckpointManager:
    """Ray Train's own, over the run directory."""
    storage = StorageContext(storage_path=str(tmp_path), experiment_dir_name="run", read_only=True)
    return CheckpointManager(config, storage)


def begun_by_ray(tmp_path: Path, config: CheckpointConfig, scores: list[float]) -> None:
    """Ray Train has reported so many checkpoints there."""

    async def report() -> None:
        manager = rays_manager(tmp_path, config)
        for number, score in enumerate(scores):
            folder = tmp_path / "run" / f"checkpoint_{number}"
            folder.mkdir(parents=True)
            (folder / "w.pt").write_text(str(number))
            told = SimpleNamespace(
                checkpoint=Checkpoint(str(folder)), metrics={"score": score}, validation=False
            )
            manager.register_checkpoint(cast(Any, told))

    asyncio.run(report())


def test_a_run_that_ray_train_has_begun_goes_on_and_ray_reads_on(tmp_path):
    best_two = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    begun_by_ray(tmp_path, best_two, [5.0, 9.0, 1.0])
    assert (tmp_path / "run" / SNAPSHOT).exists()
    reports = opened(tmp_path, Retention(2, "score"))
    reports.sweep()
    assert names(reports) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert reports.newest() == "checkpoint_2"
    reported(tmp_path, reports, "checkpoint_ours", score=7.0)
    assert names(reports) == ["checkpoint_1", "checkpoint_2", "checkpoint_ours"]
    assert not (tmp_path / "run" / "checkpoint_0").exists()

    manager = rays_manager(tmp_path, best_two)
    found = [(Path(r.checkpoint.path).name, r.metrics) for r in manager.best_checkpoint_results]
    assert found == [("checkpoint_ours", {"score": 7.0}), ("checkpoint_1", {"score": 9.0})]
    assert manager.latest_checkpoint_result.checkpoint.path.endswith("/checkpoint_ours")


def test_a_checkpoint_of_ray_train_that_is_gone_is_told_and_the_one_before_is_given(
    tmp_path, capsys
):
    begun_by_ray(tmp_path, CheckpointConfig(), [1.0, 2.0])
    (tmp_path / "run" / "checkpoint_1" / "w.pt").unlink()
    (tmp_path / "run" / "checkpoint_1").rmdir()
    assert opened(tmp_path).newest() == "checkpoint_0"
    assert "checkpoint checkpoint_1 is damaged: it is not there" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "best"), [("max", "a"), ("min", "b")])
def test_what_ray_s_result_tells_of_our_run(tmp_path, mode, best):
    reports = opened(tmp_path, Retention(3, "score", mode))
    for name, score in (("a", 9), ("b", 1), ("c", 5)):
        reported(tmp_path, reports, name, score=score, loss=score / 2)
    result = Result.from_path(tmp_path / "run")
    assert result.metrics == {"score": 5, "loss": 2.5}
    assert result.metrics_dataframe is not None
    assert sorted(result.metrics_dataframe["score"]) == [1, 5, 9]
    assert list(result.metrics_dataframe.columns) == ["score", "loss"]
    chosen = result.get_best_checkpoint("score", mode)
    assert chosen is not None
    assert Path(chosen.path).name == best
    with chosen.as_directory() as folder:
        assert (Path(folder) / "part" / "w.pt").read_bytes() == b"weights"
    assert (result.error, result.path) == (None, str(tmp_path / "run"))


def test_what_fit_gives_of_a_run_with_and_without_checkpoints(tmp_path):
    reports = opened(tmp_path)
    reports.folder.at("script").create()
    reports.folder.at("script").write("returned.json", b'{"accuracy": 0.5}')
    own = OwnResult(
        outcome="succeeded", badput={}, recoveries=[], run_directory=str(tmp_path / "run")
    )
    without = rays_result(own)
    assert (without.metrics, without.checkpoint, without.best_checkpoints) == (None, None, [])
    assert (without.return_value, without.error) == ({"accuracy": 0.5}, None)
    reported(tmp_path, reports, "a", score=3)
    found = rays_result(own)
    assert (found.metrics, Path(found.checkpoint.path).name) == ({"score": 3}, "a")
    assert (found.path, found.return_value) == (str(tmp_path / "run"), {"accuracy": 0.5})
