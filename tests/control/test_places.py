"""Machines that cannot serve a run are not tried again and again while others train."""

from dataclasses import replace

from elastic.control.commands import Form, Spawn
from elastic.control.events import Committed, Joined, Tick, WorkerLost
from elastic.control.state import Forming, Refused, Running, Waiting
from elastic.control.transition import transition
from elastic.protocol.membership import Membership
from tests.control.transitions import LEDGER, LIMITS, play, some, suspended

AB = Membership(7, (0, 1))
TWO_OR_THREE = replace(LIMITS, min_workers=2, max_workers=3, max_failures=8)


def unfit(worker: int, at: float) -> WorkerLost:
    return WorkerLost(worker, "unfit", at - 0.1, at, f"w{worker} computes other bits")


def entering(worker: int) -> Forming:
    """It and two others, at the step of LEDGER."""
    return Forming(Membership(7, (0, 1, worker)), 39.0, newcomers=some(worker))


def refused(ledger, worker, at, limits=TWO_OR_THREE):
    """By the others, who go on without it and commit a step."""
    ledger = replace(ledger, generation=7, step=40, next_worker=worker + 1)
    answers = suspended(0, 40), suspended(1, 40)
    ledger, phase, commands = play(
        ledger, entering(worker), unfit(worker, at), *answers, limits=limits
    )
    assert Form(Membership(8, (0, 1)), 40) in commands
    joined = (Joined(8, rank, 0.0, at) for rank in (0, 1))
    committed = Committed(8, 41, 0.1, at + 0.1, origin=8)
    return play(ledger, phase, *joined, committed, limits=limits)


def test_the_place_of_an_unfit_machine_is_left_empty_and_said_so():
    decision = transition(replace(LEDGER, next_worker=4), entering(3), unfit(3, 10.0), TWO_OR_THREE)
    assert "w3 lost (unfit: w3 computes other bits), 2 of 3 left" in decision.reason
    assert decision.reason.endswith("; nobody is asked for in its place for 60 s")
    ledger, phase, commands = refused(LEDGER, 3, 10.0)
    assert not any(isinstance(command, Spawn) for command in commands)
    assert play(ledger, phase, Tick(69.0), limits=TWO_OR_THREE)[2] == []
    assert play(ledger, phase, Tick(71.0), limits=TWO_OR_THREE)[2] == [Spawn((4,))]


def test_other_places_are_filled_meanwhile():
    limits = replace(TWO_OR_THREE, max_workers=4)
    ledger, phase, _ = refused(LEDGER, 3, 10.0, limits)
    assert play(ledger, phase, Tick(14.0), limits=limits)[2] == [Spawn((4,))]


def test_it_is_tried_ever_more_seldom_until_one_comes_that_is_fit():
    ledger, at, pauses = LEDGER, 10.0, list[float]()
    for worker in range(3, 12):
        ledger, _, _ = refused(ledger, worker, at)
        pauses.append(ledger.losses.refused.until - at)
        assert ledger.losses.refused.places == 1
        at = ledger.losses.refused.until + 1.0
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    ledger = replace(ledger, generation=7, step=40)
    joined = (Joined(7, rank, 0.0, at) for rank in (0, 1, 2))
    ledger, _, _ = play(ledger, entering(12), *joined, limits=TWO_OR_THREE)
    ledger, _, _ = refused(ledger, 13, at)
    assert ledger.losses.refused.until - at == 60


def test_two_that_are_refused_at_once_leave_two_places_empty():
    four = Forming(Membership(7, (0, 1, 3, 4)), 39.0, newcomers=some(3, 4))
    limits = replace(TWO_OR_THREE, max_workers=4)
    ledger, _, _ = play(LEDGER, four, unfit(3, 10.0), unfit(4, 10.1), limits=limits)
    assert (ledger.losses.refused.places, ledger.losses.refused.in_a_row) == (2, 2)


def test_who_does_not_even_start_on_its_machine_is_treated_alike():
    ledger = replace(LEDGER, spawned=some(3), next_worker=4)
    ledger, phase, commands = play(ledger, Running(AB), unfit(3, 10.0), limits=TWO_OR_THREE)
    assert commands == []
    assert play(ledger, phase, Tick(69.0), limits=TWO_OR_THREE)[2] == []
    assert play(ledger, phase, Tick(71.0), limits=TWO_OR_THREE)[2] == [Spawn((4,))]


def test_a_run_that_lacks_workers_asks_again_soon_and_in_the_end_says_what_to_do():
    limits = replace(TWO_OR_THREE, min_workers=3)
    ledger = replace(LEDGER, next_worker=4)
    ledger, phase, _ = play(
        ledger, entering(3), unfit(3, 10.0), suspended(0, 40), suspended(1, 40), limits=limits
    )
    assert isinstance(phase, Waiting)
    assert play(ledger, phase, Tick(12.0), limits=limits)[2] == [Spawn((4,))]
    spent = replace(LEDGER, next_worker=12).with_losses(failures=8)
    _, phase, _ = play(spent, entering(11), unfit(11, 90.0), limits=limits)
    assert phase.outcome == "failed"
    assert phase.reason.startswith("w11 lost (unfit: w11 computes other bits): 9 failures since")


def test_a_run_that_has_lost_its_members_since_asks_for_enough_all_the_same():
    limits = replace(TWO_OR_THREE, max_workers=4)
    waiting = replace(LEDGER, next_worker=9)
    waiting = waiting.with_losses(refused=Refused(in_a_row=7, places=4, until=3600.0))
    _, _, commands = play(waiting, Waiting("few"), Tick(10.0), limits=limits)
    assert commands == [Spawn((9, 10))]
