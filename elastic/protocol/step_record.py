"""What is known of a committed step: its lines of metrics.jsonl and samples.jsonl, and its vote.

Who says it is a message's matter (messages/to_controller.py, messages/peer.py); who writes the
files is elastic/store/run_directory.py.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int
    time: float
    """Of the commit, in Unix seconds."""
    loss: float | None
    """None if it is not finite."""
    generation: int
    world_size: int
    samples: int
    """Of the run, up to this step."""
    step_s: float
    """Of the attempt that was committed."""
    applied: bool
    """False: the gradients were not finite, and the weights are those of before."""
    user: dict[str, float | None]
    """What was logged, by name; None if it is not finite."""
    bubble: float | None = None
    """The share of the step in which a stage waited for its neighbours; None without stages."""
    learning_rate: float | None = None
    """That the step was taken with, of the optimizer's first group; None if nobody knows."""
    gradient_norm: float | None = None
    """Before clipping; None if it is not finite."""

    def to_line(self) -> dict[str, Any]:
        line = {field.name: getattr(self, field.name) for field in fields(self)}
        return line if self.bubble is not None else {k: line[k] for k in line if k != "bubble"}


METRICS_FIELDS = frozenset(f.name for f in fields(StepMetrics) if f.default is MISSING)
"""That every line has."""
OF_OPTIMIZER = ("learning_rate", "gradient_norm")
"""What a script's own optimizers do is none of the lines of its reports."""
MORE_METRICS = ("bubble", *OF_OPTIMIZER)


@dataclass(frozen=True, slots=True)
class AppliedRecord:
    """How far the steps of a script's optimizers are on record."""

    call: int = 0
    """The generation in which the newest call of the script has begun that has told of some."""
    step: int = 0
    generation: int = 0
    """In which that step was taken."""

    def has(self, step: StepMetrics) -> bool:
        """Of this call's; a step that was done again, after a loss, is another one."""
        return step.step <= self.step and step.generation <= self.generation


NONE_APPLIED = AppliedRecord()


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A line of samples.jsonl."""

    step: int
    first: int
    """Position in the stream."""
    count: int
    sha256: str
    """Over the ids of the rows, in micro-batch order."""

    def to_line(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class StepRecord:
    metrics: StepMetrics
    samples: SampleRecord
    idle_s: float = 0.0
    """Of its seconds a rank waited so long for slower ones, the mean over ranks."""

    @property
    def step(self) -> int:
        return self.metrics.step


@dataclass(frozen=True, slots=True)
class VoteHead:
    """Of a completed vote all but its content."""

    step: int
    """That counts with it."""
    log_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KnownSteps:
    """Steps that are not on record yet, in order, and the newest vote."""

    steps: tuple[StepRecord, ...]
    vote: VoteHead | None
    content: str = ""
    """Of the vote, in base 64."""


STEP_RECORD = (StepMetrics, SampleRecord, StepRecord, VoteHead, KnownSteps)
"""What messages are made of where they tell of steps."""
