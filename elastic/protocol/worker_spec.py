"""What a worker is given: plain values and callables, so that `workers` never sees Ray."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.protocol.mesh import DDP, Parallel
from elastic.protocol.timeouts import Timeouts


@dataclass(frozen=True, slots=True)
class Cpus:
    """Of one worker."""

    num_threads: int
    """Of an operation."""
    numa_binding: str = "none"
    """"node": its process runs on those near its GPU; or "none"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything a worker process needs to know before it connects to the controller."""

    worker: int
    run_id: str
    token: str
    """Secret of the run; opens every connection between its processes."""
    controller: tuple[str, int]
    host: str = ""
    """The address of this worker's node, as its peers reach it; set where the worker runs."""
    node: str = ""
    """Of this worker, in Ray's words; set where the worker runs."""
    device: str  # "cpu" or "cuda"
    cpus: Cpus
    folder: str | None
    """Folder of the workload's module on this node; None where Ray has shipped it."""
    place: str = ""
    """The run directory, whether it exists already or not."""
    steps: int
    global_batch: int
    micro_batch: int
    parallel: Parallel = DDP
    reduction: str
    precision: str = "fp32"
    activation_checkpointing: bool = False
    offload: bool = False
    clip_norm: float | None
    seed: int
    eval_every: int | None
    checkpoint_every: int | None
    """Steps between checkpoints, None for none but the last."""
    snapshot_every: int = 1
    """Steps between copies of the shards in peer memory."""
    has_checkpoints: bool
    """Whether the run ends with a checkpoint."""
    max_nonfinite: int
    verify_every: int | None = None
    """Steps between comparisons of the replicas' bits, None for none."""
    validate: bool = True
    """The invariants of the worker's machine are checked after each event."""
    detect_s: float | None
    timeouts: Timeouts
    spot: str | None = None
    """Which cloud's notices are asked for on the worker's machine."""
    is_newcomer: bool = False
    """Started while others train."""
    is_standby: bool = False
    """Started while others train, in a run with standbys: it may start slowly and leave the cores
    to them."""

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // self.micro_batch


@dataclass(frozen=True, slots=True)
class ParquetWindow:
    """A part of the stream that a feed has read."""

    first: int
    """The position of its first element in the stream."""
    count: int
    rows: Any
    """elastic.data.reading.WindowRows; its memory may be shared and read-only."""

    @property
    def end(self) -> int:
        return self.first + self.count


class Feed(Protocol):
    """Where a worker gets the windows of its data; elastic/on_ray/feed/client.py, or a test's."""

    row_length: int
    """Elements of the stream per row."""

    def window_at(self, element: int, committed: int, is_over: Callable[[], bool]) -> ParquetWindow:
        """The window that holds this element; any thread.

        committed: what lies before it need not be kept. StepCancelled soon after is_over turns
        true; BadData or WrongInput if it cannot be read.
        """
        ...
