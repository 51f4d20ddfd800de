"""The worker's machine, event by event, without a process around it."""

from dataclasses import replace

import pytest

from elastic.protocol.errors import CollectiveRefused, GivenUp, PeerLost
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages.to_worker import (
    Abort,
    Checkpoint,
    Finish,
    Form,
    Keep,
    Load,
    Pause,
    Recall,
    Sync,
)
from workers.membership import actions as a
from workers.membership import events as e
from workers.membership.machine import UnexpectedEvent, transition
from workers.membership.state import (
    Broken,
    BrokenInvariant,
    Done,
    Forming,
    Holding,
    InPool,
    Paused,
    Source,
    State,
    Suspended,
    Working,
    validate,
)

FORM = Form(3, 1, 2, 40, False, 39, ("h", 1, "s"), None, None, ())
HOLDER = State(holding=Holding.STATE, step=40)
ABORT, RECALL = Abort(3, 1, 2), Recall(4, 0, 2)


def play(state, *events):
    """The last state, and all actions."""
    done = []
    for event in events:
        state, actions = transition(state, event)
        validate(state)
        done += actions
    return state, done


def obeyed(*commands):
    return [event for c in commands for event in (e.Heard(c), e.Obeyed(c))]


WORKING, _ = play(HOLDER, *obeyed(FORM), e.CaughtUp(), e.Met(), e.EverybodyEntered())


def said(actions):
    return [action.report for action in actions if isinstance(action, a.Say)]


def test_a_generation_forms_step_by_step():
    state, actions = play(HOLDER, *obeyed(FORM))
    assert state.phase == Forming(FORM)
    assert actions == [
        a.LeaveGroup(FORM), a.BeginGroup(FORM), a.DropGradients(), a.CatchUp(40)
    ]  # fmt: skip
    state, actions = play(state, e.CaughtUp())
    assert actions == [a.RenewFollowers(), a.Meet()]
    state, actions = play(state, e.Met())
    assert actions == [
        a.StopCopy(), a.Say(r.Joined(3, 1, 0.0, 40)), a.TakeEvaluation(None), a.MeetAll(FORM)
    ]  # fmt: skip
    assert (state.kind, state.is_at_work) == ("stopped", False), "others still get their state"
    state, actions = play(state, e.EverybodyEntered())
    assert (state.phase, state.kind, actions) == (Working(should_pause=False), "working", [])
    assert state == WORKING


def test_the_lowest_rank_repeats_what_is_not_on_record():
    first = replace(FORM, rank=0)
    _, actions = play(HOLDER, *obeyed(first), e.CaughtUp(), e.Met())
    assert a.SayUnrecorded(39) in actions


def test_an_abort_that_is_heard_in_a_step_frees_the_main_thread_which_answers_later():
    state, actions = play(replace(WORKING, prepared_by=WORKING.seat.generation), e.Heard(ABORT))
    assert actions == [a.Abandon(3)]
    assert (state.is_at_work, state.is_cancelled, state.kind) == (False, True, "stopped")
    state, actions = play(state, e.PeersLost("gone"))
    assert actions == [], "the controller knows"
    state, actions = play(state, e.Obeyed(ABORT))
    (report,) = said(actions)
    assert (report.generation, report.rank, report.step) == (3, 1, 40)
    assert (report.prepared_by, report.is_between_steps) == (3, False)
    assert state.phase == Suspended()


def test_a_collective_that_fails_is_said_once():
    state, actions = play(WORKING, e.PeersLost("reset"), e.PeersLost("again"))
    assert actions == [a.Abandon(3), a.Say(r.CollectiveFailed(3, 1, "reset", False))]
    assert (state.phase, state.kind) == (Broken(), "stopped")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PeerLost("reset"), (False, False)),
        (CollectiveRefused("sizes differ"), (True, False)),
        (GivenUp("the script raised"), (False, True)),
    ],
)
def test_what_explains_a_failure_is_said_with_it(error, said):
    _, actions = play(WORKING, e.PeersLost.of(error))
    assert actions[1] == a.Say(r.CollectiveFailed(3, 1, str(error), *said))


def test_who_is_prepared_rolls_forward_with_the_vote_of_others():
    form = replace(FORM, generation=4, step=41, vote={}, origin=3)
    prepared = replace(WORKING, prepared_by=WORKING.seat.generation)
    state, actions = play(prepared, *obeyed(ABORT), *obeyed(form))
    assert a.RollForward(form) in actions
    state, _ = play(state, e.StepCommitted(41, should_pause=True))
    assert (state.step, state.origin, state.is_prepared) == (41, 3, False)
    assert state.phase == Forming(form)


def test_who_has_rolled_forward_is_between_steps_until_its_loop_knows():
    """It may evaluate then: the next generation takes nobody in who has not made the step."""
    form = replace(FORM, generation=4, step=41, vote={}, origin=3)
    state, _ = play(WORKING, e.LoopMoved(e.Loop.STEP), e.StepPrepared(), *obeyed(ABORT, form))
    assert not state.is_between_steps
    state, _ = play(state, e.StepCommitted(41, should_pause=False), e.PeersLost("reset"))
    state, actions = play(state, *obeyed(Abort(4, 1, 2)))
    assert said(actions)[-1].is_between_steps
    assert not play(state, e.LoopMoved(e.Loop.OUTSIDE))[0].is_between_steps


def test_gradients_of_a_generation_do_not_become_the_step_of_another():
    """Another one has done the step as well, with other bits: its vote is of those."""
    form = replace(FORM, generation=5, step=41, vote={}, origin=4)
    prepared = replace(WORKING, prepared_by=WORKING.seat.generation)
    state, actions = play(prepared, *obeyed(ABORT, form))
    assert not any(isinstance(action, a.RollForward) for action in actions)
    assert a.CatchUp(41, 4) in actions
    assert not state.is_prepared


def test_who_followed_a_lost_generation_does_not_join_with_its_state_of_the_same_step():
    state, _ = play(State(), *obeyed(Sync(0, ("h", 1))), e.StateReplaced(40, 2), e.CopyLevel())
    form = replace(FORM, origin=1)
    other, actions = play(state, *obeyed(form), e.CaughtUp(), e.Met())
    assert actions[-1] == a.CatchUpLate(40, 1)
    assert not said(actions)[1:], "it has not joined"
    _, actions = play(other, e.StateReplaced(40, 1), e.StateEntered(40))
    assert said(actions) == [r.Joined(3, 1, 0.0, 40)]


def test_a_copied_state_is_said_to_be_one_until_the_loop_comes_to_a_boundary_with_it():
    """Others may be evaluating after the step: it does not know of that."""
    state, _ = play(State(), *obeyed(Sync(0, ("h", 1))), e.StateReplaced(40), e.CopyLevel())
    _, actions = play(replace(state, source=Source.NONE), *obeyed(RECALL))
    assert [report.is_copied for report in said(actions)] == [True]
    state, _ = play(state, *obeyed(FORM), e.CaughtUp(), e.Met(), e.EverybodyEntered())
    _, actions = play(state, e.BoundaryReached(), *obeyed(ABORT))
    assert [report.is_copied for report in said(actions)] == [False]


def test_gradients_do_not_outlive_a_generation_that_does_not_roll_them_forward():
    prepared = replace(WORKING, prepared_by=WORKING.seat.generation)
    state, actions = play(prepared, *obeyed(ABORT, replace(FORM, generation=4)))
    assert not state.is_prepared
    assert not any(isinstance(action, a.RollForward) for action in actions)


def test_gradients_do_not_outlive_the_state_that_they_are_of():
    """The former double of the simulation knew it; the member that it stood for did not."""
    prepared = replace(WORKING, prepared_by=WORKING.seat.generation)
    state, _ = play(prepared, *obeyed(ABORT, Load("/run", 38)), e.StateLoaded(38))
    assert (state.step, state.is_prepared) == (38, False)


def test_who_is_recalled_takes_its_place_in_a_generation_that_never_formed():
    state, actions = play(WORKING, e.Heard(RECALL))
    assert actions == [a.Abandon(4)]
    state, actions = play(state, e.PeersLost("gone"), e.Obeyed(RECALL))
    assert actions[0] == a.StopCopy()
    (report,) = said(actions)
    assert (report.generation, report.rank, report.step) == (4, 0, 40)


def test_a_form_of_a_generation_that_is_given_up_already_is_not_begun():
    state, actions = play(HOLDER, e.Heard(FORM), e.Heard(ABORT), e.Obeyed(FORM))
    assert (state.phase, actions) == (Broken(), [a.Abandon(3), a.LeaveGroup(FORM)])
    state, actions = play(state, e.Obeyed(ABORT))
    assert said(actions)[0].generation == 3


@pytest.mark.parametrize("until", [0, 1])
def test_a_generation_that_is_given_up_while_it_forms_is_left_without_a_word(until):
    events = [e.CaughtUp(), e.Met()]
    state, _ = play(HOLDER, *obeyed(FORM), *events[:until])
    state, actions = play(state, e.Heard(ABORT), events[until])
    assert (state.phase, said(actions)) == (Broken(), [])


def test_a_pause_is_taken_at_the_boundary_after_what_the_loop_is_in():
    asked, _ = play(WORKING, e.Heard(Pause(3, 1, 2)), e.LoopMoved(e.Loop.STEP))
    assert asked.wants_pause
    state, actions = play(asked, e.StepPrepared(), e.StepCommitted(41, should_pause=True))
    assert (state.phase, actions) == (Working(should_pause=True), [])
    state, actions = play(state, e.BoundaryReached())
    assert actions == [a.ProtectState(is_pausing=True), a.Say(r.Paused(3, 1, 41, origin=3))]
    assert (state.phase, state.is_cancelled) == (Paused(), False)
    _, actions = play(state, *obeyed(Keep(3, 1, 2)))
    assert actions == [a.SaveState(), a.Say(r.Kept(3, 1))]
    _, actions = play(state, e.Heard(ABORT), *obeyed(Keep(3, 1, 2)))
    assert actions == [a.Abandon(3)], "nobody saves for a generation that is given up"


@pytest.mark.parametrize(
    ("loop", "phase"),
    [
        (e.Loop.OUTSIDE, Paused()),
        (e.Loop.STEP, Working(should_pause=True)),
        (e.Loop.EVALUATION, Working(should_pause=True)),
        (e.Loop.RETURNED, Working(should_pause=True)),
    ],
)
def test_a_generation_that_pauses_at_once_waits_for_what_the_loop_is_in(loop, phase):
    form = replace(FORM, then_pause=True)
    state, _ = play(
        replace(HOLDER, loop=loop), *obeyed(form), e.CaughtUp(), e.Met(), e.EverybodyEntered()
    )
    assert state.phase == phase


def test_who_has_returned_says_so_and_is_between_steps():
    state, actions = play(WORKING, e.LoopReturned())
    assert actions == [a.ProtectState(is_pausing=False), a.Say(r.Done(3, 1, 40))]
    assert (state.phase, state.kind) == (Done(), "stopped")
    _, actions = play(state, *obeyed(ABORT))
    assert said(actions)[0].is_between_steps
    broken, _ = play(WORKING, e.PeersLost("reset"))
    state, actions = play(broken, e.LoopReturned())
    assert (state.phase, actions) == (Broken(), []), "it returns again in the next generation"


def test_what_was_obeyed_and_is_said_again_changes_nothing():
    broken, _ = play(WORKING, e.Heard(ABORT), e.PeersLost("gone"))
    assert play(broken, e.Heard(FORM), e.Obeyed(FORM)) == (broken, [])
    finish = Finish(3, 1, 2, "succeeded", None, 40)
    ended, actions = play(replace(WORKING, phase=Done()), *obeyed(finish))
    assert actions[-1] == a.WriteFinal(3, None)
    assert play(ended, *obeyed(finish)) == (ended, [])
    given_up, _ = play(ended, *obeyed(ABORT))
    assert given_up.phase == Suspended()
    assert play(given_up, *obeyed(finish)) == (given_up, [])


def test_a_newcomer_copies_follows_and_loses_its_source():
    state, actions = play(State(), *obeyed(Sync(0, ("h", 1))))
    assert actions == [a.StopCopy(), a.Follow(("h", 1))]
    assert state.kind == "syncing"
    state, actions = play(state, e.StateReplaced(40), e.CopyLevel(), e.CopyLevel())
    assert said(actions) == [r.Synced(40)]
    assert state.kind == "synced"
    state, actions = play(state, e.StepFollowed(41), e.SourceLost("closed"))
    assert actions == [a.StopCopy(), a.Say(r.SyncFailed("closed"))]
    assert (state.kind, state.step, state.source) == ("stopped", 41, Source.NONE)


def test_who_lags_gets_its_state_while_the_others_wait():
    state, _ = play(State(), *obeyed(Sync(0, ("h", 1))), e.StateReplaced(38), e.CopyLevel())
    state, actions = play(state, *obeyed(FORM), e.CaughtUp(), e.Met())
    assert actions[-2:] == [a.Say(r.Connected(3, 1)), a.CatchUpLate(40)]
    lost, actions = play(state, e.CatchUpFailed("gone"))
    assert (lost.phase, actions) == (Broken(), [a.StopCopy(), a.Say(r.SyncFailed("gone", 3))])
    state, actions = play(state, e.StateReplaced(40), e.StateEntered(40))
    assert said(actions) == [r.Joined(3, 1, 0.0, 40)]


def test_parts_are_put_together_by_the_members_and_may_be_of_an_earlier_step():
    parts = State(is_whole=False)
    state, actions = play(parts, *obeyed(Sync(0, None)))
    assert actions == [a.StopCopy(), a.ForgetState(), a.Say(r.Synced(0))]
    assert state.kind == "synced"
    state, actions = play(state, *obeyed(FORM), e.Met())
    assert actions[-1] == a.AssembleState(FORM)
    missing, actions = play(state, e.PartBegun(), e.PartsMissing("row 3"))
    assert said(actions) == [r.Connected(3, 1), r.SyncFailed("row 3", 3)]
    _, actions = play(missing, *obeyed(ABORT))
    assert said(actions)[0].step == -1
    state, actions = play(state, e.PartBegun(), e.StateEntered(39))
    assert (state.phase, state.step) == (Working(should_pause=False), 39)


def test_a_part_that_is_copied_ahead_holds_nobody_up():
    """It is worth waiting for as long as it may come; what it is of, the members find out."""
    sync = Sync(0, None, members=(("h", 1),), rank=1)
    state, actions = play(State(is_whole=False), *obeyed(sync))
    assert actions == [a.StopCopy(), a.ForgetState(), a.CopyAhead(sync)]
    assert state.kind == "syncing"
    level, actions = play(state, e.CopyLevel(), e.CopyLevel(), e.SourceLost("its generation ends"))
    assert (level.kind, level.holding, actions) == ("synced", state.holding, [a.Say(r.Synced(0))])
    lost, actions = play(state, e.SourceLost("gone"), e.SourceLost("gone"))
    assert (lost, actions) == (level, [a.StopCopy(), a.Say(r.Synced(0))])
    assert play(level, *obeyed(FORM), e.Met())[1][-1] == a.AssembleState(FORM)


def test_the_end_is_said_with_the_hash_and_again_if_a_member_is_lost():
    done, _ = play(WORKING, e.LoopReturned())
    finish = Finish(3, 1, 2, "succeeded", "/run", 40)
    state, actions = play(done, *obeyed(finish))
    assert actions == [a.StopCopy(), a.WriteFinal(3, "/run")]
    assert state.kind == "ended"
    state, actions = play(state, e.FinalWritten("ab"))
    assert said(actions) == [r.Ended(3, 1, "ab")]
    again = replace(finish, generation=4, rank=0, world_size=1)
    _, actions = play(state, *obeyed(again))
    assert actions == [a.StopCopy(), a.SayUnrecorded(40), a.WriteFinal(4, "/run")]


def test_a_checkpoint_is_asked_for_one_generation():
    state, actions = play(WORKING, e.Heard(Checkpoint(3, 1, 2, 50)))
    assert (state.word.save_asked, actions) == ((3, 50), [])


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (WORKING, e.Obeyed(ABORT)),
        (WORKING, e.StepCommitted(41, should_pause=False)),
        (WORKING, e.Met()),
        (HOLDER, e.StepPrepared()),
        (HOLDER, e.CopyLevel()),
        (HOLDER, e.PeersLost("reset")),
        (HOLDER, e.FinalWritten("ab")),
    ],
)
def test_what_cannot_happen_is_an_error(state, event):
    with pytest.raises(UnexpectedEvent):
        transition(state, event)


@pytest.mark.parametrize(
    "state",
    [
        replace(WORKING, holding=Holding.NOTHING),
        replace(WORKING, source=Source.LEVEL),
        replace(WORKING, formed=2),
        replace(HOLDER, holding=Holding.NOTHING, prepared_by=3),
        replace(HOLDER, holding=Holding.PROMISED),
        replace(HOLDER, phase=Forming(FORM)),
        replace(WORKING, prepared_by=4),
    ],
)
def test_a_state_that_contradicts_itself_is_found(state):
    with pytest.raises(BrokenInvariant):
        validate(state)


def test_a_word_that_comes_twice_changes_nothing():
    for command in (FORM, ABORT, RECALL, Pause(3, 1, 2), Checkpoint(3, 1, 2, 50)):
        once, _ = play(WORKING, e.Heard(command))
        assert play(once, e.Heard(command))[0] == once


def test_who_left_a_generation_answers_for_it_no_more():
    state, _ = play(WORKING, *obeyed(ABORT, RECALL))
    state, actions = play(state, e.Obeyed(ABORT))
    assert actions == []
    assert state.phase == Suspended()
    assert play(state, *obeyed(Sync(0, ("h", 1))))[0].phase == InPool()


def test_gradients_of_a_state_in_parts_are_dropped_where_the_next_generation_forms():
    """Given up in the middle of that, it does not say that it has them."""
    state = replace(WORKING, is_whole=False, prepared_by=WORKING.seat.generation)
    form = replace(FORM, generation=4)
    state, actions = play(state, *obeyed(ABORT, form))
    assert a.DropGradients() in actions
    _, actions = play(state, e.Heard(Abort(4, 1, 2)), e.Met(), e.Obeyed(Abort(4, 1, 2)))
    assert [report.prepared_by for report in said(actions)] == [0]
