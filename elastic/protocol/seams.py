"""What a worker is given: plain values and callables, so that `workers` never sees Ray."""

from dataclasses import dataclass


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
    device: str  # "cpu" or "cuda"
    num_threads: int
    folder: str | None
    """Folder of the workload's module on this node; None where Ray has shipped it."""
    steps: int
    global_batch: int
    micro_batch: int
    parallel: str = "ddp"
    """One of elastic.protocol.mesh."""
    reduction: str
    clip_norm: float | None
    seed: int
    eval_every: int | None
    checkpoint_every: int | None
    """Steps between checkpoints, None for none but the last."""
    has_checkpoints: bool
    """Whether the run ends with a checkpoint."""
    max_nonfinite: int
    detect_s: float | None
    heartbeat_s: float
    join_timeout_s: float
    operation_timeout_s: float
    """The backend's own limit per collective: a last resort only."""
    lease_s: float

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // self.micro_batch
