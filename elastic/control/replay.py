"""Re-running a journal: do the same events still lead to the same decisions?

Reading the journal's file is not done here (elastic/store).
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from elastic.control import commands, events, state
from elastic.control.commands import Command
from elastic.control.detection.patience import Costly, PhaseOfStep
from elastic.control.events import Event, Tick
from elastic.control.planning import Nodes
from elastic.control.standing import Standing
from elastic.control.state import Decision, Ledger, Limits, Phase
from elastic.control.transition import start, transition
from elastic.protocol.encoding import Registry, registry
from elastic.protocol.membership import Membership
from elastic.protocol.mesh import Parallel


@dataclass(frozen=True, slots=True)
class Started:
    """The first entry of a journal."""

    limits: Limits
    at: float
    commands: tuple[Command, ...]
    reason: str
    earlier_generations: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """An event and what was decided."""

    event: Event
    commands: tuple[Command, ...]
    reason: str
    ledger: Ledger | None = None
    """Every so many entries: all that the decisions so far amount to..."""
    phase: Phase | None = None
    """...and the phase."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    index: int
    """Position in the journal; 0 is `Started`."""
    event: Event | None
    recorded: tuple[object, ...]
    replayed: tuple[object, ...]

    def __str__(self) -> str:
        return (
            f"entry {self.index}, {self.event or 'start'}: "
            f"recorded {self.recorded}, replayed {self.replayed}"
        )


def limits_of(**fields: Any) -> Limits:
    """As a journal has them, also one of before `is_whole`."""
    if "is_sharded" in fields:
        fields["is_whole"] = not fields.pop("is_sharded")
    return Limits(**fields)


LOSSES = tuple(field.name for field in dataclasses.fields(state.Losses))
SAVES = {
    "save": "current",
    "saved_at": "published_at",
    "save_asked_at": "asked_at",
    "kept_step": "kept_step",
}
"""What was a field of the ledger, and how it is called now."""


def ledger_of(**fields: Any) -> Ledger:
    """As a journal has it, also one of before `standbys` and `with_state` had these names, one
    with the losses and saves as fields of its own, or one that did not say whose copies were slow.
    """
    fields.pop("is_copy_slow", None)
    if "holders" in fields:
        fields["standbys"], fields["with_state"] = fields.pop("ready"), fields.pop("holders")
    losses = {name: fields.pop(name) for name in LOSSES if name in fields}
    saves = {new: fields.pop(old) for old, new in SAVES.items() if old in fields}
    if losses or saves:
        fields |= {"losses": state.Losses(**losses), "saves": state.Saves(**saves)}
    return Ledger(**fields)


def standing_of(**fields: Any) -> Standing:
    """As a journal has it, also one in which a standby was called ready."""
    if fields["kind"] == "ready":
        fields["kind"] = "standby"
    return Standing(**fields)


_CLASSES = registry(
    Membership,
    Ledger,
    state.Save,
    state.Saves,
    state.Losses,
    state.DeviceFault,
    state.Refused,
    state.Notice,
    Nodes,
    Parallel,
    Standing,
    PhaseOfStep,
    Costly,
    Started,
    Entry,
    *(c for union in (state.Phase, events.Event, commands.Command) for c in get_args(union)),
)
JOURNAL_TYPES: Registry = {
    **_CLASSES,
    "Limits": limits_of,
    "Ledger": ledger_of,
    "Standing": standing_of,
    "WorkerReady": events.WorkerStarted,  # as it was called
    "Place": PhaseOfStep,  # likewise
}
"""For `elastic.protocol.encoding.decode`."""


def is_news(event: Event, decision: Decision) -> bool:
    """Whether the journal needs it: replay is exact without ticks that decided nothing."""
    return not isinstance(event, Tick) or bool(decision.commands or decision.reason)


def replay(journal: Iterable[Started | Entry]) -> Iterator[Mismatch]:
    """Every entry that would be decided otherwise now. Raises ValueError without `Started`."""
    entries = iter(journal)
    head = next(entries, None)
    if not isinstance(head, Started):
        raise ValueError(f"the journal does not begin with its limits, but with {head!r}")
    decision = start(head.limits, head.at, head.earlier_generations)
    recorded = (head.commands, head.reason)
    if recorded != (decision.commands, decision.reason):
        yield Mismatch(0, None, recorded, (decision.commands, decision.reason))
    for index, entry in enumerate(entries, start=1):
        assert isinstance(entry, Entry)
        decision = transition(decision.ledger, decision.phase, entry.event, head.limits)
        recorded, replayed = [entry.commands, entry.reason], [decision.commands, decision.reason]
        if entry.ledger is not None and entry.phase is not None:
            recorded += [entry.ledger, entry.phase]
            replayed += [decision.ledger, decision.phase]
        if recorded != replayed:
            yield Mismatch(index, entry.event, tuple(recorded), tuple(replayed))
