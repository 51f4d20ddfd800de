"""Goodput, badput and recoveries of small hand-made runs."""

from dataclasses import replace

import pytest

from elastic.control.accounting import Account, Recovery, account, open_account
from elastic.control.events import (
    Adopted,
    CollectiveFailed,
    Committed,
    Done,
    Ended,
    Event,
    Joined,
    Loaded,
    Stepped,
    Suspended,
    Tick,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.standing import Standing
from elastic.control.state import Decision, Ledger, Limits, Phase, Running
from elastic.control.transition import start, transition
from elastic.protocol.membership import Membership
from tests.control.small_run import BEGIN, LIMITS


def play(events: list[Event], limits: Limits = LIMITS) -> tuple[Account, Decision]:
    decision = start(limits, 0.0)
    so_far = open_account(0.0)
    for event in events:
        before = decision
        decision = transition(before.ledger, before.phase, event, limits)
        so_far = account(so_far, event, before, decision)
    return so_far, decision


def test_every_second_of_a_run_with_one_loss_is_in_one_place():
    so_far, _ = play(
        [
            *BEGIN,
            Committed(2, 3, 1.0, 8.5),
            WorkerLost(0, "process_died", last_seen=9.0, at=9.25),
            Suspended(2, 1, 3, False, False, 9.5),
            Joined(3, 0, 0.25, 10.0),
            Committed(3, 4, 1.0, 11.0),
            Done(3, 0, 4, 11.0),
            Ended(3, 0, "ab", 11.5),
        ]
    )
    assert so_far.badput_s == {
        "starting": 4.0,
        "growing": 0.5,
        "retried": 0.5,  # 8.5 to the last sign of life
        "recovering": 1.0,
        "ending": 0.5,
    }
    assert so_far.goodput_s == 5.0
    assert so_far.goodput == pytest.approx(5.0 / 11.5)
    assert so_far.recoveries == (
        Recovery(
            cause="process_died",
            detect_s=0.25,
            fence_s=0.25,
            form_s=0.25,
            state_s=0.25,
            first_step_s=1.0,
            total_s=2.0,
            lost_steps=0,
        ),
    )
    assert so_far.lost_steps == 0


def test_what_members_wait_for_each_other_in_steps_is_idle_and_no_goodput():
    calm, _ = play([*BEGIN, Committed(2, 3, 1.0, 8.5)])
    so_far, _ = play(
        [
            *BEGIN,
            Committed(2, 3, 1.0, 8.5, idle_s=0.25),
            Committed(2, 4, 0.5, 9.0, idle_s=7.0),  # clocks differ: no more than there was
        ]
    )
    assert so_far.badput_s == {**calm.badput_s, "idle": 0.25 + 0.5}
    assert so_far.goodput_s == calm.goodput_s - 0.25
    assert so_far.goodput_s + sum(so_far.badput_s.values()) == so_far.wall_s


def test_a_script_s_own_steps_end_a_recovery_and_are_work_before_they_are_committed():
    so_far, _ = play(
        [
            *BEGIN,
            Stepped(2, 8.5),
            WorkerLost(0, "process_died", 9.0, 9.25),
            Suspended(2, 1, 2, False, False, 9.5),
            Joined(3, 0, 0.0, 10.0),
            Stepped(2, 10.1),  # of the generation before
            Stepped(3, 10.25),
            Stepped(3, 11.0),
            Committed(3, 3, 1.0, 12.0),
        ]
    )
    (recovery,) = so_far.recoveries
    assert (recovery.first_step_s, recovery.total_s, recovery.lost_steps) == (0.25, 1.25, 0)
    assert so_far.badput_s["retried"] == 0.5
    assert so_far.goodput_s + sum(so_far.badput_s.values()) == so_far.wall_s


def test_a_fall_back_to_an_earlier_step_counts_its_lines_as_lost():
    so_far, _ = play(
        [
            *BEGIN,
            WorkerLost(0, "process_died", 8.0, 8.0),
            WorkerLost(1, "process_died", 8.0, 8.0),
            WorkerStarted(2, 10.0),
            Loaded(2, 0, 11.0),
            Joined(3, 0, 0.0, 11.5),
            Committed(3, 1, 1.0, 12.0),
        ]
    )
    assert (so_far.lost_steps, so_far.step) == (2, 1)
    assert so_far.badput_s["rolled_back"] == 3.0  # both steps took 3 s together
    assert so_far.badput_s["waiting"] == 3.0
    assert so_far.goodput_s == 0.5
    (recovery,) = so_far.recoveries
    assert (recovery.cause, recovery.lost_steps, recovery.total_s) == ("process_died", 2, 4.0)
    assert (recovery.fence_s, recovery.form_s, recovery.waiting_s) == (0.0, 3.5, 3.0)


def test_waiting_for_capacity_is_no_part_of_the_fence():
    """Twice: the generation between was given up."""
    so_far, _ = play(
        [
            *BEGIN,
            WorkerLost(0, "process_died", 8.0, 8.25),
            WorkerLost(1, "process_died", 8.5, 8.5),
            WorkerStarted(2, 10.0),
            Loaded(2, 2, 11.0),
            WorkerLost(2, "process_died", 11.5, 11.75),
            WorkerStarted(3, 12.0),
            Loaded(3, 2, 13.0),
            Joined(4, 0, 0.0, 13.5),
            Committed(4, 3, 1.0, 14.0),
        ],
        replace(LIMITS, max_failures=3),
    )
    (recovery,) = so_far.recoveries
    assert recovery == Recovery(
        cause="process_died",
        detect_s=0.25,
        fence_s=0.25 + 0.75,  # until both were lost, and the generation that was given up
        waiting_s=2.5 + 1.25,
        form_s=0.5 + 2.5 + 1.25,
        state_s=0.0,
        first_step_s=0.5,
        total_s=6.0,
        lost_steps=0,
    )
    assert so_far.badput_s["waiting"] == recovery.waiting_s


def test_joins_are_no_recoveries_and_repeated_commits_no_steps():
    so_far, _ = play([*BEGIN, Committed(2, 2, 1.0, 8.0)])
    assert so_far.recoveries == ()
    assert (so_far.step, so_far.goodput_s) == (2, 3.0)


def test_ticks_without_news_may_be_left_out():
    phase: Phase = Running(Membership(1, (0,)))
    so_far = open_account(0.0)
    ledger = Ledger(generation=1)
    same = Decision(ledger, phase)
    assert account(so_far, Tick(5.0), same, same) == so_far


def test_a_member_that_a_new_controller_does_not_find_is_a_recovery():
    standing = Standing(0, "stopped", 2, 0, 2, 2)
    so_far, _ = play(
        [
            *BEGIN,
            Adopted((standing,), 9.0),
            Suspended(7, 0, 2, False, False, 9.5),
            Joined(8, 0, 0.0, 10.0),
            Committed(8, 3, 1.0, 11.0),
        ]
    )
    (recovery,) = so_far.recoveries
    assert (recovery.cause, recovery.detect_s) == ("process_died", 1.5)  # since the journal's last
    assert recovery.total_s == 3.5


def test_steps_without_a_controller_are_work_and_no_first_step_of_a_recovery():
    """Two steps of 0.5 s were committed before a worker was lost, too: at 8.0 and 8.5."""
    late = [Committed(8, 3, 0.5, 10.0), Committed(8, 4, 0.5, 10.0)]
    so_far, _ = play(
        [
            *BEGIN,
            Adopted((Standing(0, "stopped", 2, 0, 2, 4),), 9.0),
            Suspended(7, 0, 4, False, False, 9.5),
            Joined(8, 0, 0.0, 10.0),
            *late,
            Committed(8, 5, 1.0, 11.0),
        ],
        replace(LIMITS, steps=9),
    )
    (recovery,) = so_far.recoveries
    assert recovery == Recovery(
        cause="process_died",
        detect_s=0.5,  # since the last step that the lost one has voted for
        fence_s=0.5,
        form_s=0.5,
        state_s=0.0,
        first_step_s=1.0,
        total_s=2.5,
        lost_steps=0,
    )
    assert so_far.goodput_s == 3.0 + 1.0 + 1.0
    assert "retried" not in so_far.badput_s
    assert so_far.badput_s["recovering"] == 0.5 + 0.5 + 0.5
    assert so_far.goodput_s + sum(so_far.badput_s.values()) == 11.0


def test_a_committed_step_that_its_successors_tell_is_not_the_first_after_a_loss():
    """The lowest rank was lost before it could tell of step 3."""
    so_far, _ = play(
        [
            *BEGIN,
            WorkerLost(0, "process_died", last_seen=9.0, at=9.25),
            Suspended(2, 1, 3, False, False, 9.5),
            Joined(3, 0, 0.0, 10.0),
            Committed(3, 3, 1.0, 10.0),
            Committed(3, 4, 1.0, 11.0),
        ]
    )
    assert [(r.first_step_s, r.total_s) for r in so_far.recoveries] == [(1.0, 2.0)]
    assert so_far.goodput_s == 3.0 + 1.0 + 1.0
    assert so_far.badput_s["retried"] == 0.5


HUNG = WorkerLost(1, "hung", 500.0, 500.0)


@pytest.mark.parametrize(
    ("joined", "cause", "end"),
    [(1, "join_timeout", [Tick(11.0)]), (2, "hung", [Tick(11.0), Tick(499.0), HUNG])],
)
def test_who_never_answers_is_a_recovery(joined: int, cause: str, end: list[Event]):
    events = BEGIN[: len(BEGIN) - 2 + joined]
    failed = CollectiveFailed(2, 0, "reset", 8.0)
    answer = Suspended(2, 0, 2, False, False, 8.5)
    at = end[-1].at
    rest = [*end, Joined(3, 0, 0.0, at + 1), Committed(3, 3, 1.0, at + 2)]
    so_far, _ = play([*events, failed, answer, *rest])
    assert [(r.cause, r.total_s) for r in so_far.recoveries] == [(cause, 2.0)]
