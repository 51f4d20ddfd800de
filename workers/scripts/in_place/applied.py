"""Steps of a script's optimizers, in a call that goes on through losses: lines of metrics.jsonl.

All members count alike, and the lowest rank tells the controller now and then. How each line comes
to be on record once is elastic/store/applied_steps.py's.
"""

import math
import time
from collections import deque
from typing import Protocol

from elastic.protocol.messages.to_controller import ScriptSteps
from elastic.protocol.step_record import AppliedRecord, StepMetrics

TOLD_EVERY_S = 0.25
NEVER = -math.inf


class Members(Protocol):
    """The group at hand."""

    def size(self) -> int: ...


class Recording(Protocol):
    """What is asked of the call."""

    generation: int
    """Today's."""

    def tell_steps(self, said: ScriptSteps) -> AppliedRecord:
        """To the controller, if this is the lowest rank. Gives what is known to be on record."""
        ...


class Applied:
    """Of one call, on one member."""

    def __init__(self, members: Members, recording: Recording) -> None:
        self._members, self._recording = members, recording
        self._call, self._base = recording.generation, 0
        self.steps = self.samples = 0
        """So far, with those that were on record when the call began."""
        self._num_units = self._fresh = 0
        """Since the last step, and the samples that were used in them."""
        self._lines: deque[StepMetrics] = deque()
        """That are not known to be on record: a lowest rank that is lost may have told them to a
        controller that is lost, too."""
        self._told, self._told_at = 0, NEVER
        """The last step that needs no telling."""
        self._began: float | None = None
        """When work on the step at hand did; None: it has not."""

    def begin_at(self, steps: int, samples: int, lines: deque[StepMetrics]) -> None:
        """So many come before the call's own. lines: of them those that are not known to be on
        record; the call's own are added."""
        self._base = self._told = self.steps = steps
        self.samples, self._lines = samples, lines

    def begin(self) -> None:
        """A batch to train on is asked for, or a forward begins."""
        if self._began is None:
            self._began = time.monotonic()

    def end_unit(self, samples: int) -> None:
        """Gradients have met that come of so many samples of all members, used for the first
        time."""
        self._num_units += 1
        self._fresh += samples

    def hear_step(self, learning_rate: float | None) -> None:
        """An optimizer has stepped. Of several that step between two units it is one step, and the
        first one's. learning_rate: that it has stepped with; None if nobody knows."""
        if not self._num_units:
            return
        now = time.monotonic()
        self.steps += 1
        self.samples += self._fresh
        self._lines.append(
            StepMetrics(
                step=self.steps,
                time=time.time(),
                loss=None,
                generation=self._recording.generation,
                world_size=self._members.size(),
                samples=self.samples,
                step_s=now - (self._began or now),
                applied=True,
                user={},
                learning_rate=learning_rate,
            )
        )
        self._num_units, self._fresh, self._began = 0, 0, None
        if now - self._told_at >= TOLD_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """What is not told yet."""
        new = tuple(line for line in self._lines if line.step > self._told)
        self._told, self._told_at = self.steps, time.monotonic()
        if not new:
            return
        recorded = self._recording.tell_steps(ScriptSteps(self._call, self._base, new))
        while recorded.call == self._call and self._lines and recorded.has(self._lines[0]):
            self._lines.popleft()

    def go_on(self) -> None:
        """A loss is survived: the lowest rank that is left tells all again that may not have come.
        Work on the step at hand counts from here."""
        self._told_at = NEVER  # with the first step it is over
        if self._began is not None:
            self._began = time.monotonic()
        if self._lines:
            self._told = self._lines[0].step - 1
