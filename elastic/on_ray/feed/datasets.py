# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What a trainer's `datasets=` and `dataset_config=` come to: data sets, packed for the feed."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray.cloudpickle as pickling

from elastic.protocol.errors import WrongInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """Of one run, as all its processes are given them."""

    packed: bytes
    """By name. What they refer to, the process that has packed them owns."""
    split: tuple[str, ...]
    """Names of those of which each rank has a share; of the others it has all."""
    whole: tuple[str, ...]
    folder: str | None
    """The script's, for what they import."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.split, *self.whole)


def pack(
    datasets: Mapping[str, Any], config: Any, cpus: float, gpus: float, folder: str | None = None
) -> Datasets:
    """config: Ray's DataConfig. cpus, gpus: what the workers have, which is not for reading.

    WrongInput for what is no data set and no function, for a name that there is none of, and for
    a DataConfig that deals by itself.
    """
    from ray.data import Dataset, ExecutionResources
    from ray.train import DataConfig

    if type(config).configure is not DataConfig.configure:
        raise WrongInput(
            f"{type(config).__name__}.configure() is not supported: rows are dealt by elastic; "
            "use DataConfig itself"
        )
    split: Any = config._datasets_to_split
    names = tuple(datasets) if split == "all" else tuple(split)
    if unknown := sorted(set(names) - set(datasets)):
        raise WrongInput(f"datasets_to_split names {unknown[0]!r}, and datasets= has none of it")
    trainers = ExecutionResources(cpu=cpus, gpu=gpus)
    found: dict[str, tuple[Any, Any]] = {}
    for name, given in datasets.items():
        if not isinstance(given, Dataset) and not callable(given):
            kind = type(given).__name__
            raise WrongInput(f"datasets[{name!r}] is a {kind}, and no ray.data.Dataset")
        with warnings.catch_warnings():  # Ray names exclude_resources deprecated, and sets it
            warnings.simplefilter("ignore")
            options = config._resolve_execution_options(name)
            options.exclude_resources = options.exclude_resources.add(trainers)
        options.preserve_order = True
        found[name] = given, options
    try:
        packed: bytes = pickling.dumps(found)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise WrongInput(f"datasets= cannot be sent to the workers: {what}") from error
    return Datasets(
        packed=packed,
        split=tuple(name for name in found if name in names),
        whole=tuple(name for name in found if name not in names),
        folder=folder,
    )


def unpacked(datasets: Datasets) -> dict[str, Any]:
    """By name, each set to run beside the workers, and in order. TypeError for a function that
    gives no data set."""
    from ray.data import DataContext, Dataset

    DataContext.get_current().enable_progress_bars = False
    given: dict[str, Any] = pickling.loads(datasets.packed)
    found: dict[str, Any] = {}
    for name, (dataset, options) in given.items():
        dataset = dataset() if callable(dataset) else dataset
        if not isinstance(dataset, Dataset):
            kind = type(dataset).__name__
            raise TypeError(f"datasets[{name!r}]() is a {kind}, and no ray.data.Dataset")
        found[name] = copied = Dataset.copy(dataset)
        copied.context.execution_options = options
        copied.context.enable_progress_bars = False
    return found
