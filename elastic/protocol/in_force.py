"""What is in force of what one end of a link has said: it is said again over another connection.

A connection that breaks loses what was on its way, and nobody knows how much. So commands and
reports may be heard twice, and each counts once: by its generation, or because the newest of its
kind replaces the others. Whoever dials is elsewhere: workers/membership/link.py.
"""

from collections import deque
from collections.abc import Iterable
from typing import TypeAlias, get_args

from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages import to_worker as t
from elastic.protocol.step_record import AppliedRecord

Told: TypeAlias = t.Command | t.SaveConcluded
Place: TypeAlias = t.Load | t.Sync | t.Form | t.Recall | t.Finish
"""What a worker is to be. The newest takes the place of all that was asked of it before."""
InPlace: TypeAlias = t.Pause | t.Checkpoint | t.Keep | t.Abort
OfGeneration: TypeAlias = (
    r.Connected
    | r.Joined
    | r.Committed
    | r.Held
    | r.Paused
    | r.Kept
    | r.Suspended
    | r.CollectiveFailed
    | r.SyncFailed
    | r.Done
    | r.Ended
)
Lasting: TypeAlias = r.Protected | r.UserFailed | r.WrongInput | r.ScriptLevel | r.Fingerprint
"""True until the next of its kind."""
PLACES, IN_PLACE = get_args(Place), get_args(InPlace)
MAX_CONCLUDED = 16
"""Saves whose end a worker may still wait to hear of."""


class CommandsInForce:
    """The controller's, for one worker."""

    def __init__(self) -> None:
        self._said: list[Told] = []

    def say(self, command: Told) -> None:
        match command:
            case t.SaveConcluded():
                concluded = [c for c in self._said if isinstance(c, t.SaveConcluded)]
                self._drop(*concluded[: 1 - MAX_CONCLUDED])
            case t.Load() | t.Sync() | t.Form() | t.Recall() | t.Finish():
                self._drop(*(c for c in self._said if isinstance(c, (*PLACES, *IN_PLACE))))
            case _:
                self._drop(*(c for c in self._said if type(c) is type(command)))
        self._said.append(command)

    def answered(self, report: r.Report) -> None:
        """What was done is not asked for again: it would be done again."""
        match report:
            case r.Loaded():
                self._drop(*(c for c in self._said if isinstance(c, t.Load)))
            case r.Synced() | r.SyncFailed():
                self._drop(*(c for c in self._said if isinstance(c, t.Sync)))
            case _:
                pass

    def again(self) -> tuple[Told, ...]:
        return tuple(self._said)

    def _drop(self, *commands: Told) -> None:
        self._said = [c for c in self._said if not any(c is each for each in commands)]


class ReportsInForce:
    """A worker's: those of its newest generation, and what is true whatever becomes of that."""

    def __init__(self) -> None:
        self._generation = 0
        self._of_generation: list[OfGeneration] = []
        self._lasting: list[Lasting] = []
        self._script_steps: list[r.ScriptSteps] = []
        """Of the newest call of the script."""

    def say(self, report: r.Report) -> None:
        if isinstance(report, Lasting):
            self._lasting = [s for s in self._lasting if type(s) is not type(report)] + [report]
        elif isinstance(report, r.ScriptSteps):
            if self._script_steps and self._script_steps[-1].call != report.call:
                self._script_steps.clear()
            self._script_steps.append(report)
        elif isinstance(report, OfGeneration) and report.generation:
            if report.generation > self._generation:
                self._generation = report.generation
                self._of_generation.clear()
            if report.generation == self._generation:
                if isinstance(report, r.Held):  # the newest says it of the steps before as well
                    others = (s for s in self._of_generation if not isinstance(s, r.Held))
                    self._of_generation = list(others)
                self._of_generation.append(report)

    def forget(self, recorded_step: int) -> None:
        """Steps up to this one are on record."""
        self._of_generation = [s for s in self._of_generation if counts(s, recorded_step)]

    def forget_applied(self, recorded: AppliedRecord) -> None:
        """Steps of a script up to this one are on record."""
        self._script_steps = [
            said
            for said in self._script_steps
            if said.call != recorded.call or any(not recorded.has(step) for step in said.steps)
        ]

    def again_after(self, unsent: Iterable[r.Report]) -> deque[r.Report]:
        """All that is to be said over another connection."""
        in_force = (*self._of_generation, *self._lasting, *self._script_steps)
        return deque((*(s for s in unsent if s not in in_force), *in_force))


def counts(report: OfGeneration, recorded_step: int) -> bool:
    """If the record ends there."""
    match report:
        case r.Committed(steps=steps):
            return steps[-1].step > recorded_step
        case r.Held(step=step):
            return step > recorded_step
        case _:
            return True
