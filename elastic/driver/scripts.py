"""A script's run, once it is known what is asked for: the engine's own settings, and its start.

What of Ray Train's trainer or of torchrun's options it comes from is elastic/ray_train.py's and
elastic/torchrun.py's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from elastic.config import RunConfig
from elastic.driver.launch import Result, run_config
from elastic.driver.resume import SCRIPT
from elastic.driver.waiting import Progress

NO_END = 1_000_000_000
"""A script says itself when it is over."""
LOSSES = 8
"""Workers that may be lost between two reports with a checkpoint."""
UNLIMITED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """What a script's run needs of the engine."""

    script: str
    """By this name it is in config.json."""
    folder: Path | None
    """What every node needs; None: it has it."""
    storage: str
    name: str
    workers: tuple[int, int]
    """With how many at least it goes on, and how many are wanted."""
    is_range: bool
    """It begins with the least; else with all."""
    device: str
    max_failures: int
    """Exceptions of the script's own; -1: any number."""
    cpus_per_worker: int = 1
    labels: str | None = None
    """As these three are in RunConfig."""
    accelerator_type: str | None = None
    worker_resources: str | None = None

    @property
    def config(self) -> RunConfig:
        """Raises ValueError for a name that no run may have and the like."""
        most, failures = self.workers[1], self.max_failures
        return RunConfig(
            workers=self.workers if self.is_range else most,
            steps=NO_END,
            global_batch=most,
            micro_batch=1,
            storage=self.storage,
            name=self.name,
            max_failures=UNLIMITED if failures < 0 else LOSSES + failures,
            device=self.device,
            cpus_per_worker=self.cpus_per_worker,
            labels=self.labels,
            accelerator_type=self.accelerator_type,
            worker_resources=self.worker_resources,
        )


def labels_of(selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None) -> str | None:
    """Ray Train's, one for all workers or one for each, which are alike."""
    if not selector:
        return None
    of_all = selector if isinstance(selector, Mapping) else selector[0]
    return ",".join(f"{key}={value}" for key, value in of_all.items()) or None


def amounts_of(resources: Mapping[str, float] | None) -> str | None:
    """Ray Train's `resources_per_worker`, but for what RunConfig has other words for."""
    others = {name: n for name, n in (resources or {}).items() if n and name not in ("CPU", "GPU")}
    texts = (f"{name}={n:f}".rstrip("0").rstrip(".") for name, n in others.items())
    return ",".join(texts) or None


def run_script(run: ScriptRun, loop: Any, on_progress: Progress | None = None) -> Result:
    """loop: a ScriptLoop. Raises what `run_config` raises, and ValueError."""
    from workers.scripts.workload import ScriptWorkload

    return run_config(
        cast(Any, ScriptWorkload(run.workers[1])),
        run.config,
        target=f"{SCRIPT}{run.script}",
        arguments={},
        folder=run.folder,
        loop=loop,
        on_progress=on_progress,
        then_workers=None if run.is_range else run.workers,
    )
