"""What a simulated run has on record: its steps, in order and without a gap."""

from typing import Any

from elastic.protocol.step_record import (
    NONE_APPLIED,
    AppliedRecord,
    SampleRecord,
    StepMetrics,
    StepRecord,
)


def step_record(step: int, generation: int = 1) -> StepRecord:
    """Of a run of one worker, in which a second passes with each step."""
    metrics = StepMetrics(step, float(step), 1.0, generation, 1, step, 1.0, True, {})
    return StepRecord(metrics, SampleRecord(step, step - 1, 1, ""))


class FakeRecord:
    """See elastic/controller/recorder.py; nothing of it is lost."""

    place = "/run"

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    @property
    def safe_step(self) -> int:
        return len(self.steps)

    @property
    def safe_applied(self) -> AppliedRecord:
        return NONE_APPLIED

    @property
    def generation(self) -> int | None:
        """Of the last one."""
        return self.steps[-1].metrics.generation if self.steps else None

    def record_step(self, step: StepRecord) -> None:
        number = step.step
        assert number == len(self.steps) + 1, f"{number} is recorded after {len(self.steps)}"
        self.steps.append(step)

    def roll_back(self, step: int) -> None:
        assert step <= len(self.steps), f"back to {step}, {len(self.steps)} is on record"
        del self.steps[step:]

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        pass
