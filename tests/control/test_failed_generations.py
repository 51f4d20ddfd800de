"""Generations that fail without a known loss, or never form."""

from dataclasses import replace

import pytest

from elastic.control.commands import (
    Abort,
    Form,
    Retire,
)
from elastic.control.events import (
    CollectiveFailed,
    Committed,
    Joined,
    Suspended,
    SyncFailed,
    Tick,
    WorkerLost,
)
from elastic.control.recovery import MAX_IN_VAIN
from elastic.control.state import (
    Finished,
    Forming,
    Running,
    Suspending,
)
from elastic.control.transition import transition
from elastic.protocol.membership import Membership
from tests.control.transitions import ABC, LEDGER, LIMITS, lost, play, some, suspended


def test_a_failed_collective_waits_for_the_loss_that_explains_it():
    failed = CollectiveFailed(7, 1, "connection reset", 9.0)
    _, _, commands = play(
        LEDGER, Running(ABC), failed, suspended(1, 40), suspended(2, 40), lost(0, 9.1)
    )
    assert commands == [Abort(ABC), Form(Membership(8, (1, 2)), 40)]


def test_a_call_that_the_backend_refused_surfaces_if_no_loss_explains_it():
    failed = CollectiveFailed(7, 1, "sizes differ", 9.0, is_refused=True)
    answers = [suspended(rank, 40) for rank in range(3)]
    _, phase, commands = play(LEDGER, Running(ABC), failed, *answers, Tick(11.9), Tick(12.0))
    assert phase == Finished("failed", "no worker is lost, but sizes differ")
    assert commands == [Abort(ABC), Retire((0, 1, 2))]


@pytest.mark.parametrize(
    "said",
    [
        "unbound_buffer.cc:78] Timed out waiting 300000ms for recv operation to complete",
        "pair.cc:612] Application timeout caused pair closure",
        "pair.cc:553] Connection closed by peer [127.0.0.1]:7603.",
        "pair.cc:537] Read error [127.0.0.1]:5044: Connection reset by peer.",
        "Gloo connectFullMesh failed with [pair.cc:144] no error",
        "Wait timeout",
        "Connect timeout [127.0.0.1]:5044",
        "Failed to recv, got 0 bytes. Connection was likely closed.",
        "Remote peer closed the connection.",
        "words of a release to come",
    ],
)
def test_whatever_a_backend_says_of_its_connections_the_same_members_try_again(said: str):
    failed = CollectiveFailed(7, 1, said, 9.0)
    answers = [suspended(rank, 40) for rank in range(3)]
    _, _, commands = play(LEDGER, Running(ABC), failed, *answers, Tick(12.0))
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1, 2)), 40)]


def test_a_connection_that_broke_between_the_living_is_made_again_but_not_for_ever():
    ledger, phase, commands = LEDGER, Running(ABC), []
    for generation in (7, 8):
        failed = CollectiveFailed(generation, 1, "Read error: Connection reset by peer", 9.0)
        answers = [Suspended(generation, rank, 40, False, False, 9.0) for rank in range(3)]
        joined = [Joined(generation + 1, rank, 0.0, 12.0, 40) for rank in range(3)]
        ledger, phase, new = play(ledger, phase, failed, *answers, Tick(12.0), *joined)
        commands += new
    again = [Membership(n, (0, 1, 2)) for n in (8, 9)]
    assert [c.membership for c in commands if isinstance(c, Form)] == again
    assert ledger.losses.failures == 2
    failed = CollectiveFailed(9, 1, "Read error: Connection reset by peer", 13.0)
    answers = [Suspended(9, rank, 40, False, False, 13.0) for rank in range(3)]
    _, phase, _ = play(ledger, phase, failed, *answers, Tick(16.0))
    assert isinstance(phase, Finished)
    assert phase.outcome == "failed"


def test_a_generation_in_which_everybody_waits_is_tried_again_but_not_for_ever():
    ledger, phase, commands = LEDGER, Running(ABC), []
    for generation in (7, 8):
        stall = CollectiveFailed(generation, 0, "all 3 members wait", 9.0, is_stall=True)
        answers = [Suspended(generation, rank, 40, False, False, 9.0) for rank in range(3)]
        joined = [Joined(generation + 1, rank, 0.0, 9.0, 40) for rank in range(3)]
        ledger, phase, new = play(ledger, phase, stall, *answers, *joined)
        commands += new
    again = [Membership(n, (0, 1, 2)) for n in (8, 9)]
    assert commands == [Abort(ABC), Form(again[0], 40), Abort(again[0]), Form(again[1], 40)]
    assert phase == Running(again[1])
    stall = CollectiveFailed(9, 0, "all 3 members wait", 9.0, is_stall=True)
    assert transition(ledger, phase, stall, LIMITS).phase == Finished(
        "failed",
        "all 3 members wait: 3 failures since step 40 was committed, max_failures is 2",
    )


@pytest.mark.parametrize("answered_before", [0, 2, 3])
def test_what_needs_no_loss_is_heard_behind_its_consequences(answered_before):
    closed = CollectiveFailed(7, 1, "Connection closed by peer", 9.0)
    explained = CollectiveFailed(7, 0, "the script raised", 9.1, is_stall=True)
    answers = [suspended(rank, 40) for rank in range(3)]
    events = [closed, *answers[:answered_before], explained, *answers[answered_before:]]
    ledger, _, commands = play(LEDGER, Running(ABC), *events)
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1, 2)), 40)]
    assert ledger.losses.failures == 1


def test_a_refused_call_is_told_though_its_consequences_were_heard_first():
    closed = CollectiveFailed(7, 1, "Connection closed by peer", 9.0)
    refused = CollectiveFailed(7, 0, "sizes differ", 9.1, is_refused=True)
    answers = [suspended(rank, 40) for rank in range(3)]
    _, phase, _ = play(LEDGER, Running(ABC), closed, refused, *answers, Tick(12.0))
    assert phase == Finished("failed", "no worker is lost, but sizes differ")


TIMED_OUT = "unbound_buffer.cc:78] Timed out waiting 300000ms for recv operation to complete"
ONE_COMPUTES = [CollectiveFailed(7, 1, TIMED_OUT, 9.0), suspended(1, 40), suspended(2, 40)]
"""w0 is inside a long micro-batch, and cannot answer before it has ended."""
LATER = [Tick(12.0), Tick(312.0), Tick(9e3)]
"""Longer than any phase may take without a usual time."""


def test_who_computes_while_a_collective_fails_is_waited_for_and_the_same_go_on():
    """Whether it hangs is suspicion's to say, by its own usual time."""
    ledger, phase, commands = play(LEDGER, Running(ABC), *ONE_COMPUTES, *LATER)
    assert commands == [Abort(ABC)]
    assert isinstance(phase, Suspending)
    ledger, phase, commands = play(ledger, phase, suspended(0, 40))
    assert commands == [Form(Membership(8, (0, 1, 2)), 40)]
    assert ledger.losses.failures == 1


def test_what_was_refused_surfaces_once_who_computes_has_answered():
    refused = CollectiveFailed(7, 1, "sizes differ", 9.0, is_refused=True)
    answers = [suspended(1, 40), suspended(2, 40), *LATER, suspended(0, 40)]
    _, phase, _ = play(LEDGER, Running(ABC), refused, *answers)
    assert phase == Finished("failed", "no worker is lost, but sizes differ")


@pytest.mark.parametrize("cause", ["process_died", "hung"])
def test_who_computes_and_is_lost_after_all_explains_the_failure(cause: str):
    gone = WorkerLost(0, cause, 9e3, 9e3)
    ledger, _, commands = play(LEDGER, Running(ABC), *ONE_COMPUTES, *LATER, gone)
    assert commands == [Abort(ABC), Form(Membership(8, (1, 2)), 40)]
    assert ledger.losses.failures == 1


def test_a_loss_explains_the_failure_though_others_answer_after_it():
    refused = CollectiveFailed(7, 1, "sizes differ", 9.0, is_refused=True)
    events = [refused, suspended(1, 40), *LATER, lost(0, 9e3), suspended(2, 40, at=9e3)]
    ledger, _, commands = play(LEDGER, Running(ABC), *events)
    assert commands == [Abort(ABC), Form(Membership(8, (1, 2)), 40)]
    assert ledger.losses.failures == 1


def test_a_newcomer_whose_source_died_goes_back_and_nobody_is_blamed():
    forming = Forming(ABC, 30.0, joined=some(0))
    ledger, _, commands = play(
        LEDGER,
        forming,
        SyncFailed(2, "source is gone", 5.0),
        suspended(0, 40),
        suspended(1, 40),
        suspended(2, -1),
    )
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1)), 40)]
    assert (ledger.standbys, ledger.losses.failures) == (some(2), 0)


def test_a_newcomer_that_cannot_catch_up_after_others_formed_goes_back_to_the_pool():
    ledger, _, commands = play(
        LEDGER,
        Running(ABC),
        SyncFailed(2, "source is gone", 5.0),
        suspended(0, 40),
        suspended(1, 40),
        suspended(2, 39),
    )
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1)), 40)]
    assert (ledger.standbys, ledger.losses.failures) == (some(2), 0)


def test_generations_that_never_get_their_state_end_the_run_with_the_reason():
    failed = SyncFailed(2, "nobody holds row 3 of model/w", 5.0)
    ledger, phase, _ = play(LEDGER.with_losses(in_vain=MAX_IN_VAIN - 1), Forming(ABC, 30.0), failed)
    assert (ledger.losses.in_vain, type(phase)) == (MAX_IN_VAIN, Suspending)
    _, phase, commands = play(ledger, Forming(ABC, 30.0), failed)
    assert commands == [Retire((0, 1, 2))]
    assert phase == Finished(
        "failed",
        f"{MAX_IN_VAIN + 1} generations in a row could not get the state of step 40, the last: "
        "w2: nobody holds row 3 of model/w",
    )
    ledger, _, _ = play(ledger, Running(ABC), Committed(7, 41, 0.1, 6.0))
    assert ledger.losses.in_vain == 0


def test_a_newcomer_that_holds_the_step_counts_as_a_survivor():
    _, _, commands = play(LEDGER, Forming(ABC, 30.0), lost(0), suspended(1, 40), suspended(2, 40))
    assert commands[1] == Form(Membership(8, (1, 2)), 40)


def test_who_is_two_steps_behind_cannot_roll_forward():
    ledger, _, commands = play(
        LEDGER,
        Running(ABC),
        *(lost(2), suspended(0, 40, prepared=True), suspended(1, 42)),
        limits=replace(LIMITS, min_workers=1),
    )
    assert commands == [Abort(ABC), Form(Membership(8, (1,)), 42)]
    assert (ledger.step, ledger.standbys) == (42, some(0))


def test_the_step_falls_by_one_when_only_a_follower_of_the_lost_source_is_left():
    limits = replace(LIMITS, min_workers=1)
    forming = Forming(Membership(7, (0, 1)), 30.0)
    decision = transition(LEDGER, forming, lost(0), limits)
    decision = transition(decision.ledger, decision.phase, suspended(1, 39), limits)
    assert decision.commands[0] == Form(Membership(8, (1,)), 39)
    assert decision.reason.startswith("whoever held step 40 is lost: back to 39; generation 8")


def test_a_generation_that_does_not_form_in_time_gives_up_the_silent():
    forming = Forming(ABC, 30.0, joined=some(0))
    ledger, _, commands = play(
        LEDGER,
        forming,
        Tick(30.0),
        suspended(0, 40, at=30.1),
        suspended(1, 40, at=30.1),
        Tick(33.0),
    )
    assert commands == [Abort(ABC), Retire((2,)), Form(Membership(8, (0, 1)), 40)]
    assert ledger.losses.failures == 1


def test_a_generation_that_did_not_form_although_all_live_is_tried_again_at_a_cost():
    answers = [suspended(rank, 40, at=30.1) for rank in range(3)]
    ledger, _, commands = play(LEDGER, Forming(ABC, 30.0), Tick(30.0), *answers)
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1, 2)), 40)]
    assert ledger.losses.failures == 1
