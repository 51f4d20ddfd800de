"""A slow sample goes from worker to worker with its losses: one pays for it, and no more."""

from dataclasses import replace

from elastic.control.commands import Abort, Form
from elastic.control.detection.hang import Watch, slow_in, suspects, watch
from elastic.control.detection.patience import Costly, PhaseOfStep
from elastic.control.events import Adopted, Committed, Suspended, WorkerLost
from elastic.control.replay import JOURNAL_TYPES
from elastic.control.standing import Standing
from elastic.control.state import Finished, Ledger, Limits, Running, Suspending
from elastic.control.transition import transition
from elastic.protocol.encoding import dumps, loads
from elastic.protocol.membership import Membership, NumberSet
from elastic.protocol.messages.pulse import Heartbeat

LIMITS = Limits(
    min_workers=1,
    max_workers=3,
    standby=0,
    steps=100,
    max_failures=2,
    join_timeout_s=30.0,
    confirm_timeout_s=3.0,
    end_timeout_s=300.0,
)
ABC = Membership(7, (0, 1, 2))
DATA = PhaseOfStep(40, "data")
COSTLY = (Costly(DATA, NumberSet.of((0,))),)
LEDGER = Ledger(generation=7, step=40, next_worker=3)
SLOW = Heartbeat(1, 8, 40, "data", 6.0, 0.1, False, "S")
WAITS = replace(SLOW, worker=2, phase="reduce", phase_s=5.9, waits_for_peers=True)
WHY = "others have waited for it for 5.9 s; 6.0 s in data of step 41 (usually under 0.10 s)"


def taken(worker: int, at: float, place: PhaseOfStep | None = DATA) -> WorkerLost:
    return WorkerLost(worker, "hung", at - 4.0, at, "too long", place)


def found(*beats: Heartbeat, costly: tuple[Costly, ...] = COSTLY) -> dict[int, str]:
    return dict(suspects([Watch(b, 10.0) for b in beats], 10.0, 3.0, costly=costly))


def test_who_repeats_what_cost_its_predecessor_the_life_is_as_patiently_awaited_as_a_first_pass():
    assert found(SLOW, WAITS, costly=()) == {1: WHY}
    assert found(SLOW, WAITS) == {}
    late = replace(SLOW, phase_s=300.5), replace(WAITS, phase_s=300.4)
    assert found(*late) == {
        1: "others have waited for it for 300.4 s; "
        "300.5 s in data of step 41 (usually under 0.10 s)"
    }


def test_patience_is_for_that_phase_of_that_step_only():
    for other in (replace(SLOW, phase="compute"), replace(SLOW, step=41)):
        assert set(found(other, replace(WAITS, step=other.step))) == {1}


def test_who_is_gone_or_stopped_or_silent_is_found_in_a_costly_place_as_anywhere():
    dead = replace(SLOW, process_state="Z")
    assert found(dead) == {1: "its process is dead (state Z)"}
    stopped = watch(watch(None, replace(SLOW, process_state="T"), 6.0), dead, 10.0)
    assert slow_in(replace(stopped, stopped_since=6.0), 10.0, 3.0) is None
    silent = Watch(SLOW, 3.9), Watch(WAITS, 10.0)
    assert dict(suspects(silent, 10.0, 3.0, costly=COSTLY)) == {1: "no heartbeat for 6.1 s"}


def test_of_several_who_are_slow_in_the_same_place_at_once_one_pays_for_it():
    """As where the storage pauses for all."""
    others = [replace(SLOW, worker=w) for w in (3, 4, 5)]
    elsewhere = replace(SLOW, worker=6, phase="compute")
    assert list(found(SLOW, *others, elsewhere, WAITS, costly=())) == [1, 6]


def test_a_place_that_cost_a_life_is_remembered_and_told_until_its_step_is_committed():
    decision = transition(LEDGER, Running(ABC), taken(0, 9.0), LIMITS)
    assert decision.reason == (
        "w0 lost (hung: too long), 2 of 3 left, min 1, budget 1/2; data of step 41 took the life "
        "of w0: the next one there has 300 s"
    )
    assert decision.ledger.losses.costly == COSTLY
    again = transition(LEDGER.with_losses(costly=COSTLY), Running(ABC), taken(1, 310.0), LIMITS)
    assert again.ledger.losses.costly == (Costly(DATA, NumberSet.of((0, 1))),)
    assert "data of step 41 took the life of w0 w1: the next one" in again.reason
    compute = transition(
        again.ledger, Running(ABC), taken(2, 320.0, PhaseOfStep(40, "compute")), LIMITS
    ).ledger
    assert [str(c.place) for c in compute.losses.costly] == [
        "data of step 41",
        "compute of step 41",
    ]
    committed = Committed(7, 41, 0.1, 400.0)
    assert transition(compute, Running(ABC), committed, LIMITS).ledger.losses.costly == ()


def test_a_loss_that_is_no_slowness_makes_no_place_costly():
    died = WorkerLost(0, "process_died", 8.0, 9.0)
    assert transition(LEDGER, Running(ABC), died, LIMITS).ledger.losses.costly == ()
    assert transition(LEDGER, Running(ABC), taken(0, 9.0, None), LIMITS).ledger.losses.costly == ()


def test_a_deadlock_of_the_program_ends_the_run_and_is_named():
    ledger, phase = LEDGER, Running(ABC)
    for worker, at in ((0, 9.0), (1, 310.0), (2, 611.0)):
        ledger, phase, _, _ = transition(ledger, phase, taken(worker, at), LIMITS)
        if isinstance(phase, Finished):
            break
        assert isinstance(phase, Suspending)
        for rank, member in enumerate(phase.membership.workers):
            if member != worker:
                answer = Suspended(phase.membership.generation, rank, 40, False, False, at)
                ledger, phase, commands, _ = transition(ledger, phase, answer, LIMITS)
        assert isinstance(commands[-1], Form)
        phase = Running(commands[-1].membership)
    assert phase == Finished(
        "failed",
        "w2 lost (hung: too long; data of step 41 took the life of w0 w1 w2): 3 failures since "
        "step 40 was committed, max_failures is 2",
    )


def test_a_controllers_successor_is_as_patient():
    ledger = loads(dumps(LEDGER.with_losses(costly=COSTLY)), JOURNAL_TYPES)
    assert ledger.losses.costly == COSTLY
    event = loads(dumps(taken(0, 9.0)), JOURNAL_TYPES)
    assert event == taken(0, 9.0)
    for kind in ("working", "stopped"):
        standings = tuple(Standing(w, kind, 7, w, 3, 40) for w in range(3))
        adopted = transition(ledger, Running(ABC), Adopted(standings, 20.0), LIMITS)
        assert adopted.ledger.losses.costly == COSTLY


def test_the_survivors_regroup_as_after_any_loss():
    decision = transition(LEDGER, Running(ABC), taken(0, 9.0), LIMITS)
    assert decision.commands == (Abort(ABC),)
