"""Every (phase, event) pair is decided, ignored with a reason, or known to be impossible."""

from dataclasses import replace
from typing import get_args

import pytest

from elastic.control import events, state
from elastic.control.events import (
    Adopted,
    Cancelled,
    CollectiveFailed,
    Committed,
    Connected,
    Done,
    DrainNotice,
    Ended,
    Event,
    Joined,
    Kept,
    Loaded,
    PartFailed,
    PartSaved,
    Paused,
    Resized,
    Stepped,
    StillSaving,
    StopRequested,
    Suspended,
    Synced,
    SyncFailed,
    Tick,
    UserFailed,
    WorkerStarted,
)
from elastic.control.standing import Standing
from elastic.control.state import (
    Ending,
    Finished,
    Forming,
    Pausing,
    Phase,
    Running,
    Suspending,
    Waiting,
)
from elastic.control.transition import IGNORED, UnexpectedEvent, transition
from tests.control.transitions import ABC, LEDGER, LIMITS, lost, some, suspended

PHASES: tuple[Phase, ...] = (
    Waiting("few"),
    Forming(ABC, 99.0),
    Running(ABC),
    Pausing(ABC),
    Suspending(ABC, some(2), None),
    Suspending(ABC, some(2), None, standbys_by=99.0),
    Ending(ABC, "succeeded", "", 99.0),
    Finished("failed", ""),
)
SAMPLES: tuple[Event, ...] = (
    WorkerStarted(3, 1.0),
    lost(0),
    lost(4),
    lost(77),
    Loaded(5, 40, 1.0),
    Synced(6, 1.0),
    SyncFailed(6, "gone", 1.0),
    SyncFailed(1, "gone", 1.0),
    Adopted((Standing(0, "stopped", 7, 0, 3, 40), Standing(4, "standby")), 1.0),
    DrainNotice(0, "drain", 30.0, 1.0),
    DrainNotice(4, "drain", 30.0, 1.0),
    StopRequested("SIGINT", 1.0),
    Resized(1, 2, 1.0),
    UserFailed(0, "no", 1.0),
    Cancelled("stopped", "SIGINT twice", 1.0),
    Stepped(7, 1.0),
    Connected(7, 0, 1.0),
    Joined(7, 0, 0.0, 1.0),
    Committed(7, 41, 0.1, 1.0),
    Paused(7, 0, 41, 1.0),
    Kept(7, 0, 1.0),
    CollectiveFailed(7, 0, "reset", 1.0),
    suspended(0, 41),
    Done(7, 0, 100, 1.0),
    Ended(7, 0, "ab", 1.0),
    PartSaved(7, 0, 40, 1.0),
    PartFailed(7, 0, 40, "disk full", 1.0),
    StillSaving(7, 0, 1.0),
    Tick(1.0),
)
# A member answers only Abort with Suspended, only Finish with Ended and only Keep with Kept. All
# else of its generation it may say again over another connection. These would be bugs, and are
# told so.
IMPOSSIBLE = {
    *((phase, Suspended) for phase in (Forming, Running, Pausing, Ending)),
    *((phase, Ended) for phase in (Forming, Running, Pausing, Suspending)),
    *((phase, Kept) for phase in (Forming, Running)),
    *((phase, StillSaving) for phase in (Forming, Running, Pausing)),
}


def test_samples_cover_every_phase_and_event():
    assert {type(e) for e in SAMPLES} == set(get_args(events.Event))
    assert {type(p) for p in PHASES} == set(get_args(state.Phase))


@pytest.mark.parametrize("phase", PHASES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("event", SAMPLES, ids=str)
def test_every_pair_is_decided_or_ignored_with_a_reason(phase: Phase, event: Event):
    ledger = replace(LEDGER, spawned=some(3), standbys=some(4), loading=some(5), syncing=some(6))
    pair = (type(phase), type(event))
    if pair in IMPOSSIBLE:
        with pytest.raises(UnexpectedEvent):
            transition(ledger, phase, event, LIMITS)
        return
    decision = transition(ledger, phase, event, LIMITS)
    if pair in IGNORED:
        assert IGNORED[pair]
        assert decision == (ledger, phase, (), "")
    if decision.commands:
        assert decision.reason
        assert "\n" not in decision.reason
