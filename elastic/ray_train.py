# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""`import elastic.ray_train`: from then on `TorchTrainer(...).fit()` of Ray Train runs on elastic.

The rest of a script, and of `ray.train`, stays what it is. Here is the driver's side: what the
trainer asks for, and what `fit()` gives back. What of a trainer's settings is refused is
elastic/on_ray/trainer_settings.py's; in the workers it is elastic/on_ray/train_api.py.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, cast

from elastic.driver.followed import Followed
from elastic.driver.launch import Result as OwnResult
from elastic.driver.launch import RunFailed
from elastic.driver.script_level import VARIABLE, may_go_on_in_place
from elastic.driver.scripts import ScriptRun, amounts_of, labels_of, run_script
from elastic.protocol.errors import WrongInput
from elastic.store.files import place_of, reach_folder
from elastic.store.remote import shown_uri

TESTED = ("2.60",)
"""Versions of Ray whose ray.train is known here."""


class Refused(WrongInput, ValueError):
    """What the trainer asks for and elastic does not support; nothing has started."""


num_fits: int = 0
"""How many `fit()`s have run here, or in the trials of a Tuner: a script without one is to be told
so."""


def count_fit() -> None:
    global num_fits
    num_fits += 1


def install() -> None:
    """Make `fit()` ours, in the trials of a Tuner, too. WrongInput for a Ray that is not known
    here."""
    import ray

    if not any(ray.__version__.startswith(f"{version}.") for version in TESTED):
        raise WrongInput(
            f"elastic.ray_train knows ray.train of Ray {', '.join(TESTED)}, and this is Ray "
            f"{ray.__version__}: install ray[train]=={TESTED[-1]}.0, or leave elastic.ray_train out"
        )
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from elastic.on_ray.trials import on_elastic

    trainer: Any = DataParallelTrainer
    if trainer.fit is not fit:
        trainer.rays_own_fit = trainer.fit
        trainer.fit = fit
        on_elastic(partial(begin_trial, os.environ.get(VARIABLE)), count_fit)


def begin_trial(level: str | None) -> None:
    """In the process of a Tuner's trial. level: as it was asked for where the Tuner is."""
    if level is not None:
        os.environ[VARIABLE] = level
    install()


def fit(trainer: Any) -> Any:
    """`TorchTrainer.fit()` on elastic: Ray's `Result`, or Ray's TrainingFailedError.

    ValueError for what the trainer asks for and elastic does not support, before anything starts.
    """
    from ray.train.torch import TorchTrainer

    from elastic.on_ray.trainer_settings import notes, refusal

    is_ours = isinstance(trainer, cast(Any, TorchTrainer))
    if not is_ours or trainer.scaling_config.num_workers == 0:
        if not is_ours:
            name = type(trainer).__name__
            print(f"elastic: {name} is not ours: Ray Train's own fit() runs it", file=sys.stderr)
        return trainer.rays_own_fit()
    if (why := refusal(trainer)) is not None:
        raise Refused(f"elastic.ray_train: {why}")
    count_fit()
    for note in notes(trainer):
        print(f"elastic: {note}", file=sys.stderr)
    try:
        result = run_trainer(trainer)
    except WrongInput as error:
        raise Refused(str(error)) from error
    except RunFailed as error:
        raise failure(error) from error.__cause__
    if result.outcome == "stopped":
        raise KeyboardInterrupt
    return rays_result(result)


def run_trainer(trainer: Any) -> OwnResult:
    """Raises what `run_config` raises."""
    from ray.train import ControllerError

    from elastic.cli.worker_output import WorkerOutput
    from elastic.on_ray.train_api import answering, ray_version
    from workers.script_loop import ScriptLoop
    from workers.scripts.reports import Retention

    least, most = num_workers(trainer.scaling_config)
    run, keep = trainer.run_config, trainer.run_config.checkpoint_config
    storage = str(Path(run.storage_path).expanduser()) if is_path(run) else run.storage_path
    failures: int = run.failure_config.max_failures
    loop = ScriptLoop(
        function=trainer._get_train_func(),
        place=place_of(storage, run.name),
        name=run.name,
        max_failures=failures,
        retention=Retention(
            keep.num_to_keep, keep.checkpoint_score_attribute, keep.checkpoint_score_order
        ),
        ray_version=ray_version(),
        installed=partial(answering, datasets=datasets_of(trainer, most)),
        keeps_all_metrics=bool(run.callbacks),
        goes_in_place=may_go_on_in_place(),
    )
    refuse_unpicklable(trainer, loop)
    asked = ScriptRun(
        script=script_name(),
        folder=script_folder(),
        storage=storage,
        name=run.name,
        workers=(least, most),
        is_range=not isinstance(trainer.scaling_config.num_workers, int),
        device="cuda" if trainer.scaling_config.use_gpu else "cpu",
        max_failures=failures,
        cpus_per_worker=cpus_of(trainer.scaling_config),
        labels=labels_of(trainer.scaling_config.label_selector),
        accelerator_type=trainer.scaling_config.accelerator_type,
        worker_resources=amounts_of(trainer.scaling_config.resources_per_worker),
    )
    check_settings(asked)
    print(f"elastic: {level_line(trainer, least, most)}", file=sys.stderr)
    print(f"elastic: run directory {shown_uri(loop.place)}", file=sys.stderr)
    output = WorkerOutput(loop.place)
    if not run.callbacks:
        return run_script(asked, loop, output)
    followed = followed_for(trainer, loop.place)

    def on_progress(place: str) -> None:
        output(place)
        followed(place)

    try:
        return run_script(asked, loop, on_progress)
    finally:
        followed(loop.place)
        if followed.error is not None:
            raise ControllerError(followed.error) from followed.error


def followed_for(trainer: Any, place: str) -> Followed:
    """Its callbacks are told in this process what the ranks report and raise."""
    from ray.train import Checkpoint

    callbacks, context = trainer.run_config.callbacks, trainer.train_run_context

    def after_report(metrics: list[dict[str, Any]], name: str | None) -> None:
        folder = reach_folder(place)
        found = None if name is None else Checkpoint(folder.at(name).path, folder.filesystem)
        for callback in callbacks:
            callback.after_report(run_context=context, metrics=metrics, checkpoint=found)

    def after_exception(exceptions: dict[int, Exception]) -> None:
        for callback in callbacks:
            callback.after_exception(run_context=context, worker_exceptions=exceptions)

    return Followed(place, after_report, after_exception)


def datasets_of(trainer: Any, most: int) -> Any:
    """As the workers are given them, None: there are none. WrongInput for what is no data set."""
    if not trainer.datasets:
        return None
    from elastic.on_ray.feed.datasets import pack

    scaling = trainer.scaling_config
    gpus = most if scaling.use_gpu else 0
    cpus, folder = most * cpus_of(scaling), str(script_folder())
    return pack(trainer.datasets, trainer.data_config, cpus, gpus, folder)


def check_settings(asked: ScriptRun) -> None:
    """ValueError that says where it comes from, for a name that no run may have and the like."""
    try:
        _ = asked.config
    except ValueError as error:
        raise Refused(f"elastic.ray_train: {error}") from error


def level_line(trainer: Any, least: int, most: int) -> str:
    """The level of a run and why, in its first lines."""
    from workers.script_loop import NOT_HIGHER

    function = getattr(trainer.train_loop_per_worker, "__name__", "the training function")
    if may_go_on_in_place():
        return (
            f"{function} runs at level 1, commit in place, on {most} workers (at least {least}): "
            "after a loss it goes on where it is, if its model is in "
            "DistributedDataParallel and its data in a DistributedSampler's; else it is called "
            "again"
        )
    return (
        f"{function} runs at level 0, restart in place, on {most} workers (at least {least}): "
        "after a loss it is called again in the same processes, from its newest reported "
        f"checkpoint; {NOT_HIGHER}"
    )


def num_workers(scaling: Any) -> tuple[int, int]:
    """A number n is wanted, and training goes on down to half of it."""
    wanted = scaling.num_workers
    return (ceil(wanted / 2), wanted) if isinstance(wanted, int) else tuple(wanted)


def is_path(run: Any) -> bool:
    return "://" not in run.storage_path


def cpus_of(scaling: Any) -> int:
    return max(1, ceil((scaling.resources_per_worker or {}).get("CPU", 1)))


# --- what cannot be sent ---------------------------------------------------------------------
def refuse_unpicklable(trainer: Any, loop: Any) -> None:
    """ValueError that names the variable."""
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

    try:
        cloudpickle.dumps(loop)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        culprit = unpicklable_in(trainer.train_loop_per_worker, trainer.train_loop_config or {})
        raise Refused(
            f"elastic.ray_train: the training function cannot be sent to the workers{culprit}: "
            f"{what}; make that inside the function"
        ) from error


def unpicklable_in(function: Callable[..., Any], config: dict[str, Any]) -> str:
    """Which variable it is, in words; empty if it cannot be said."""
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

    found = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    captured = {**found.globals, **found.nonlocals} if found else {}
    named = {f"variable {name!r}": value for name, value in captured.items()}
    named |= {f"train_loop_config[{key!r}]": value for key, value in config.items()}
    for name, value in named.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f" because of its {name}"
    return ""


# --- where the script is ----------------------------------------------------------------------
def main_file() -> Path | None:
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).resolve() if file else None


def is_of_ray(file: Path) -> bool:
    """The process is one of Ray's workers, as that of a Tune trial."""
    import ray

    return file.is_relative_to(Path(ray.__file__).resolve().parent)


def script_name() -> str:
    file = main_file()
    if file is None:
        return "interactive"
    return "trial" if is_of_ray(file) else file.name


def script_folder() -> Path | None:
    """Where a script's own imports come from; None: Ray has brought them to all its workers."""
    file = main_file()
    if file is None:
        return Path.cwd()
    return None if is_of_ray(file) else file.parent


# --- how it ended -----------------------------------------------------------------------------
def rays_result(result: OwnResult) -> Any:
    """Ray's own, read from the run directory as `ray.train.Result.from_path` reads it."""
    from ray.train import Result

    from workers.script_loop import RETURNED
    from workers.scripts.reports import MANIFESTS, SNAPSHOT

    folder = reach_folder(result.run_directory)
    if folder.exists(SNAPSHOT):
        found: Any = Result.from_path(folder.path, folder.filesystem)
    else:
        found = Result(
            metrics=None,
            checkpoint=None,
            error=None,
            path=folder.path,
            best_checkpoints=[],
            _storage_filesystem=folder.filesystem,
        )
    found.return_value = json.loads(folder.at(MANIFESTS).read(RETURNED))
    return found


def failure(error: RunFailed) -> Exception:
    """As Ray Train has it: the user's exception by the rank that raised it."""
    from ray.train import WorkerGroupError

    cause = error.__cause__
    failures: dict[int, Any] = {}
    if isinstance(cause, Exception):
        failures[error.rank or 0] = cause
    return WorkerGroupError(str(error), failures)


install()
