"""What a user may set for a run: `RunConfig` and the values in it, checked where they meet.

No defaults live anywhere else; nothing here starts anything.
"""

import math
import re
import warnings
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, cast

from elastic.protocol.mesh import Parallel
from elastic.protocol.placing import Need, parse_amounts, parse_labels
from elastic.protocol.spot import parse_spot
from elastic.protocol.timeouts import timeouts_of

REDUCTIONS = ("fast", "bitwise")
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
MOST_TRIED = 1 << 16
"""Divisors that are looked for."""
NUMA_BINDINGS = ("node", "none")
ON_STORAGE_ERROR = ("warn", "fail")
SLIP = re.compile(r"(s3|gs|gcs|abfss?|hdfs|viewfs|https?|file)(?::/*|//+)(?=[^/])")
"""A URI without one of its three marks, which would be a folder of this machine."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class FaultPolicy:
    """What to do about faults that do not kill a worker."""

    max_nonfinite: int = 8
    """Steps in a row that may be skipped because a gradient is not finite; default 8."""
    verify_every: int | None = None
    """Compare the replicas' weights and optimizer state every so many steps; default None: never.
    Rows that one rank holds alone ("fsdp") cannot be compared.

    A rank that differs from the majority is replaced from a good peer, before any gradient that
    it computed after the last comparison's step is applied if this is 1. Without a majority the
    run fails. Of sharded state only what all ranks hold is compared.
    """
    replace_stragglers: float | None = None
    """Replace a rank whose machine stays so many times slower than the median of its peers, as soon
    as a successor holds the state; default None: never. Waiting for data does not count."""
    validate: bool = True
    """Check after each event of a worker that the state of its protocol is one that can be, which
    takes microseconds; default True. A worker in another state says so and is replaced."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """From settings by name. ValueError for a name that is none."""
        known = [f.name for f in fields(cls)]
        for name in values.keys() - set(known):
            raise ValueError(f"faults.{name} is unknown: choose from {', '.join(known)}")
        return cls(**values)

    def __post_init__(self) -> None:
        check_whole("faults.max_nonfinite", self.max_nonfinite, at_least=0)
        if self.verify_every is not None:
            check_whole("faults.verify_every", self.verify_every, at_least=1)
        if not is_switch(self.validate):
            raise ValueError(f"faults.validate must be True or False, got {self.validate!r}")
        factor = self.replace_stragglers
        if factor is not None and not (is_number(factor) and 1 < factor < math.inf):
            raise ValueError(
                f"faults.replace_stragglers must be a number above 1, such as 3, or None, got "
                f"{factor!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """What of the state is kept, how often, and what follows if it cannot be."""

    checkpoint_every: int | None = None
    """Steps between checkpoints; default None: no such number. With `storage`, or this, a run also
    saves when its newest checkpoint is ten minutes old, and at its end."""
    keep: tuple[int, int | None] = (2, None)
    """Checkpoints to keep: (the last so many, and every so many steps); default (2, None). The
    newest two always stay."""
    snapshot_every: int = 1
    """Steps between copies of the shards in peer memory, where they are sharded; default 1."""
    on_storage_error: str = "warn"
    """What a failing storage does to the run: "warn" or "fail"; default "warn"."""

    def __post_init__(self) -> None:
        check_whole("snapshot_every", self.snapshot_every, at_least=1)
        check_word("on_storage_error", self.on_storage_error, ON_STORAGE_ERROR)
        if self.checkpoint_every is not None:
            check_whole("checkpoint_every", self.checkpoint_every, at_least=1)
        keep = tuple(self.keep)
        if len(keep) != 2:
            raise ValueError(f"keep must be (the last so many, every so many steps), got {keep!r}")
        check_whole("keep (last)", keep[0], at_least=0)
        if keep[1] is not None:
            check_whole("keep (every)", keep[1], at_least=1)
        object.__setattr__(self, "keep", keep)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Where the workers run, and what each of them has."""

    device: str = "auto"
    """"cuda": one GPU per worker, which the run waits for; "cpu"; or "auto": GPUs if the cluster
    has, or can add, some that the torch of its nodes can use. Default "auto"."""
    cpus_per_worker: int = 1
    """CPU slots and intra-op threads per worker; default 1. A bitwise run keeps its number."""
    numa_binding: str = "node"
    """"node": a worker with a GPU runs on the CPUs of the GPU's NUMA node, of those that it may run
    on; or "none". Default "node"."""
    labels: str | None = None
    """Nodes that workers may be placed on, by Ray's labels: "KEY=VALUE,KEY=VALUE", and behind a
    semicolon where else, in the order of preference; default None: on any node.

    "ray.io/market-type=spot; ray.io/market-type=on-demand" is spot first. A value may be "!VALUE"
    or "in(A,B)", the last choice "any".
    """
    accelerator_type: str | None = None
    """Kind of accelerator that the node of each worker has, in Ray's words, such as "A100"; default
    None: any."""
    worker_resources: str | None = None
    """Further resources of Ray's that each worker takes, "NAME=AMOUNT,NAME=AMOUNT"; default
    None."""
    address: str | None = None
    """Ray cluster to use; default None: one that is found, else Ray starts embedded."""
    spot: str | None = None
    """Ask on each machine whether its cloud takes it away: "aws", "gcp", "azure", or "auto" for
    whichever answers; default None: only Ray's drains and SIGTERM count."""

    def __post_init__(self) -> None:
        check_whole("cpus_per_worker", self.cpus_per_worker, at_least=1)
        check_word("device", self.device, DEVICES)
        check_word("numa_binding", self.numa_binding, NUMA_BINDINGS)
        if self.spot is not None:
            parse_spot(self.spot)
        if self.labels is not None:
            parse_labels(self.labels)
        if self.worker_resources is not None:
            parse_amounts(self.worker_resources)
        if self.accelerator_type is not None and not NAME.fullmatch(self.accelerator_type):
            raise ValueError(
                f"accelerator_type={self.accelerator_type!r} is no name, such as A100: see "
                "`ray.util.accelerators`"
            )

    def need(self, device: str) -> Need:
        """Of each worker. device: "cpu" or "cuda", whatever `device` here says."""
        return Need(
            self.cpus_per_worker,
            int(device == "cuda"),
            parse_labels(self.labels) if self.labels is not None else (),
            self.accelerator_type or "",
            parse_amounts(self.worker_resources) if self.worker_resources is not None else {},
        )


GROUPS: dict[str, type[Checkpointing] | type[Resources]] = {
    "checkpointing": Checkpointing,
    "resources": Resources,
}
"""By the field of RunConfig that holds one; a group's fields are keywords of RunConfig, too."""


@dataclass(frozen=True, init=False)
class RunConfig:
    """One run's settings. `V` below is `global_batch // micro_batch`.

    The fields of `Checkpointing` and `Resources` are keywords, too: `RunConfig(device="cpu", ...)`.
    """

    workers: int | tuple[int, int] = 1
    """How many workers: a number, or (min, max) to be elastic; default 1.

    Below min the run waits and says so; a max above V is capped with a warning.
    """
    steps: int
    """Optimizer steps of the whole run; required."""
    global_batch: int
    """Samples per optimizer step, whatever the number of workers; required."""
    micro_batch: int
    """Samples per forward pass, a divisor of `global_batch`; required."""
    parallel: Parallel = field(default_factory=Parallel)
    """How the model is spread over the workers: a `Parallel`, or its words; default "ddp".

    The words are "ddp", "fsdp", "fsdp-grad-op", "hsdp:S" (S ranks in a replica), or "pp:S" (S
    stages of a pipeline; "pp:S/GPipe", "pp:S/Interleaved1F1B" and "pp:S/ZBVZeroBubble" for other
    schedules than 1F1B). "pp:S" also goes together with "fsdp-grad-op".
    "package.module:function" names a strategy of your own, behind a comma or alone.
    """
    reduction: str = "fast"
    """"fast": stock collectives. "bitwise": weights equal for every history. Default "fast"."""
    precision: str = "fp32"
    """Number format of the computation; default "fp32"."""
    clip_norm: float | None = None
    """Clip the global gradient norm to this; default None: no clipping."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory; default False."""
    offload: bool = False
    """Keep parameters and optimizer state in host memory; default False."""
    seed: int = 0
    """Seeds initial weights, sample order and all randomness of the steps; default 0."""
    storage: str | None = None
    """Folder or `pyarrow.fs` URI of the runs; default None: a temporary run directory.

    A relative folder is made absolute here: other processes have other working directories.
    """
    name: str | None = None
    """The run's folder in `storage`; default None: the workload's class and UTC time."""
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    """What of the state is kept; default `Checkpointing()`."""
    standby: int = 0
    """Warm workers beyond max that wait to replace a lost one; default 0."""
    detect_s: float | None = 3.0
    """Silence in seconds after which a worker counts as hung; default 3.0. None: never."""
    max_failures: int = 8
    """Workers that may be lost since the last committed step, or falls back to a checkpoint without
    getting further; default 8."""
    resources: Resources = field(default_factory=Resources)
    """Where the workers run; default `Resources()`."""
    eval_every: int | None = None
    """Steps between calls of the workload's `evaluate`; default None: never."""
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    """What to do about faults that do not kill a worker; default `FaultPolicy()`."""

    def __init__(self, **settings: Any) -> None:
        """settings: fields, and those of the groups. TypeError if one is unknown or missing."""
        if isinstance(settings.get("parallel"), str):
            settings["parallel"] = Parallel.of(settings["parallel"])
        for name, group in GROUPS.items():
            _gather(settings, name, group)
        for setting in fields(self):
            value = settings.pop(setting.name) if setting.name in settings else _default(setting)
            object.__setattr__(self, setting.name, value)
        for name in settings:
            raise TypeError(
                f"RunConfig has no setting {name!r}: choose from {', '.join(keywords())}"
            )
        self._check()

    def _check(self) -> None:
        if self.storage is not None and "://" not in self.storage and self.storage:
            if slip := SLIP.match(self.storage):
                meant = f"{slip[1]}://{self.storage[slip.end() :]}"
                raise ValueError(
                    f"storage {self.storage!r} is no URI: write {meant!r}, or './...' for a folder"
                )
            place = str(Path(self.storage).expanduser().absolute())
            object.__setattr__(self, "storage", place)
        self._check_parallel()
        self._check_sizes()
        self._check_words()
        self._check_optional()

    @property
    def num_microbatches(self) -> int:
        """V: the micro-batches of a step, and the highest degree of data parallelism."""
        return self.global_batch // self.micro_batch

    @property
    def min_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def max_workers(self) -> int:
        """The wanted maximum, capped where all V micro-batches are shared out."""
        wanted = self.workers if isinstance(self.workers, int) else self.workers[1]
        return min(wanted, self._most_workers)

    @property
    def _most_workers(self) -> int:
        return self.num_microbatches * self.parallel.ranks_per_microbatch

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values by keyword, whatever group they are in; `from_json` gives an equal
        RunConfig."""
        values = asdict(self)
        for name in GROUPS:
            values |= values.pop(name)
        values["parallel"] = str(self.parallel)
        for name in ("workers", "keep"):
            if isinstance(values[name], tuple):
                values[name] = list(values[name])
        return {name: values[name] for name in keywords()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_json`; entries that are no keywords (`target`, ...) are left out."""
        known = {name: values[name] for name in keywords() if name in values}
        if isinstance(known.get("faults"), dict):
            known["faults"] = FaultPolicy(**known["faults"])
        with warnings.catch_warnings():  # the cap was announced where the run was configured
            warnings.simplefilter("ignore", UserWarning)
            return cls(**known)

    def _check_sizes(self) -> None:
        for name in ("steps", "global_batch", "micro_batch"):
            check_whole(name, getattr(self, name), at_least=1)
        for name in ("seed", "standby", "max_failures"):
            check_whole(name, getattr(self, name), at_least=0)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}: choose a smaller one")
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch={self.global_batch} is not a multiple of micro_batch="
                f"{self.micro_batch}: choose a micro_batch that divides it, "
                f"such as {nearest_divisor(self.global_batch, self.micro_batch)}"
            )
        object.__setattr__(self, "workers", as_bounds(self.workers))
        self._check_workers()

    def _check_workers(self) -> None:
        low, high = self.workers if isinstance(self.workers, tuple) else (self.workers,) * 2
        if low > high:
            raise ValueError(
                f"workers={low}..{high}: min {low} is above max {high}: give (min, max) in order"
            )
        together, most = self.parallel.ranks_per_microbatch, self._most_workers
        limit = "V = " if together == 1 else f"{together} * V = {together} * "
        limit += f"global_batch / micro_batch = {most}, the micro-batches of a step"
        if low > most:
            raise ValueError(
                f"workers: min {low} is above {limit}: lower min or micro_batch, or raise "
                "global_batch"
            )
        if high > most:
            warnings.warn(
                f"workers: max {high} is above {limit}; capped at {most}",
                UserWarning,
                stacklevel=5,
            )

    def _check_words(self) -> None:
        check_word("reduction", self.reduction, REDUCTIONS)
        check_word("precision", self.precision, PRECISIONS)

    def _check_optional(self) -> None:
        if self.eval_every is not None:
            check_whole("eval_every", self.eval_every, at_least=1)
        for name in ("clip_norm", "detect_s"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a number above 0, or None, got {value!r}")
        timeouts_of(self.detect_s)  # everything that derives from it can hold
        if self.name is not None and not RUN_NAME.fullmatch(self.name):
            raise ValueError(
                f"name={self.name!r} is no folder name: use letters, digits, '.', '_' and '-', "
                "and begin with a letter, a digit or '_'"
            )
        if self.storage is not None and not self.storage:
            raise ValueError("storage is empty: give a folder or a URI, or leave it out")

    def _check_parallel(self) -> None:
        if not isinstance(self.parallel, Parallel):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"parallel must be words or a Parallel, got {self.parallel!r}")
        if self.offload and self.parallel.pp > 1:
            raise ValueError(
                f"offload=True moves shards to host memory, and the stages of parallel="
                f"'{self.parallel}' are none: leave one of them out"
            )
        if missing := self.parallel.missing:
            raise ValueError(f"parallel='{self.parallel}' is not available yet{missing}")
        if self.offload and self.parallel.is_whole:
            raise ValueError(
                f"offload=True moves shards to host memory, and parallel='{self.parallel}' has "
                "none: leave it out, or give parallel='fsdp'"
            )


def keywords() -> list[str]:
    """What RunConfig takes and config.json has: the fields of its groups in the place of these."""
    found: list[str] = []
    for setting in fields(RunConfig):
        group = GROUPS.get(setting.name)
        found += [setting.name] if group is None else [f.name for f in fields(group)]
    return found


def _gather(settings: dict[str, Any], name: str, group: type) -> None:
    """Put the settings that are fields of `group` into one, under its `name`."""
    given = {f.name: settings.pop(f.name) for f in fields(group) if f.name in settings}
    if given and name in settings:
        raise ValueError(f"{name} and {', '.join(given)} are both given: put them into {name}")
    if given:
        settings[name] = group(**given)


def _default(setting: Field[Any]) -> Any:
    if setting.default is not MISSING:
        return setting.default
    if setting.default_factory is MISSING:
        raise TypeError(f"RunConfig needs {setting.name}=...")
    return setting.default_factory()


def as_bounds(workers: object) -> int | tuple[int, int]:
    """`workers` as a number or a (min, max) of numbers that are at least 1."""
    if isinstance(workers, list | tuple):
        bounds = tuple(cast("list[object]", workers))
        if len(bounds) == 2:
            return (
                check_whole("workers (min)", bounds[0], at_least=1),
                check_whole("workers (max)", bounds[1], at_least=1),
            )
        raise ValueError(f"workers must be a number or (min, max), got {workers!r}")
    return check_whole("workers", workers, at_least=1)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_switch(value: object) -> bool:
    return isinstance(value, bool)


def nearest_divisor(whole: int, wanted: int) -> int:
    """Of `whole`; the smaller one of two that are as near."""
    small = [n for n in range(1, min(math.isqrt(whole), MOST_TRIED) + 1) if whole % n == 0]
    return min((*small, *(whole // n for n in small)), key=lambda n: (abs(n - wanted), n))


def check_whole(name: str, value: object, *, at_least: Literal[0, 1]) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}")
    return value


def check_word(name: str, value: object, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(words)}")
