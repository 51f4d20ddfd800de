"""The worker's half of the protocol as a function: what happened in, what to do out.

Two threads tell it: the link's, what has come (`Heard`, which may abandon a group at once), and
the main one, what it obeys and does. No clock, no I/O, no threads: member.py has those.
"""

from dataclasses import replace
from typing import NamedTuple

from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages.to_worker import (
    Abort,
    Checkpoint,
    Command,
    Finish,
    Form,
    Holders,
    Keep,
    Load,
    LogTo,
    Pause,
    Recall,
    Sync,
)
from workers.membership import actions as a
from workers.membership import events as e
from workers.membership.actions import Action
from workers.membership.events import Event, Loop
from workers.membership.state import (
    BUSY,
    Broken,
    Done,
    Ended,
    Entering,
    Forming,
    Holding,
    InPool,
    Paused,
    Source,
    State,
    Suspended,
    Word,
    Working,
    seat_in,
)


class Outcome(NamedTuple):
    state: State
    actions: tuple[Action, ...] = ()


class UnexpectedEvent(Exception):
    """An event that cannot happen in this state: a bug in this module or in who tells it."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event} in {state}")


def transition(state: State, event: Event) -> Outcome:  # noqa: C901
    match event:
        case e.Heard(command):
            return hear(state, command)
        case e.Obeyed(command):
            return obey(state, command)
        case e.LoopMoved(to):
            return Outcome(replace(state, loop=to, began_at=state.step))
        case e.BoundaryReached():
            return reach_boundary(replace(state, loop=Loop.OUTSIDE))
        case e.LoopReturned():
            return return_from_loop(replace(state, loop=Loop.RETURNED))
        case e.StepPrepared() if isinstance(state.phase, Working):
            return Outcome(replace(state, prepared_by=state.seat.generation))
        case e.GradientsDropped():
            return Outcome(replace(state, prepared_by=0))
        case e.StepCommitted() if state.is_prepared:
            return Outcome(commit(state, event))
        case e.PeersLost():
            return lose_peers(state, event)
        case e.CaughtUp() if isinstance(state.phase, Forming):
            if state.is_given_up:
                return Outcome(replace(state, phase=Broken()))
            return Outcome(state, (a.RenewFollowers(), a.Meet()))
        case e.CatchUpFailed(why) if isinstance(state.phase, Forming):
            return fail_to_catch_up(state, why)
        case e.Met() if isinstance(state.phase, Forming):
            return meet(state, state.phase.form)
        case e.PartBegun() if isinstance(state.phase, Forming):
            return Outcome(state, (connected(state),))
        case e.StateEntered(step) if isinstance(state.phase, Forming):
            return join(state, state.phase.form, step)
        case e.PartsMissing(why) if isinstance(state.phase, Forming):
            state = replace(without_part(state), phase=Broken())
            return Outcome(state, (a.Say(r.SyncFailed(why, state.seat.generation)),))
        case e.PartGone() if not state.is_whole:
            return Outcome(without_part(state))
        case e.EverybodyEntered() if isinstance(state.phase, Entering):
            return begin_work(state, state.phase.should_pause)
        case e.StateReplaced() | e.StepFollowed() | e.CopyLevel() | e.SourceLost():
            return follow(state, event)
        case e.StateLoaded(step, damaged, origin) if isinstance(state.phase, InPool):
            state = with_copy(state, step, origin)
            return Outcome(state, (a.Say(r.Loaded(step, damaged, origin)),))
        case e.FinalWritten(sha256) if isinstance(state.phase, Ended):
            ended = r.Ended(state.seat.generation, state.seat.rank, sha256)
            return Outcome(state, (a.Say(ended),))
        case _:
            raise UnexpectedEvent(state, event)


# --- what the link's thread says ------------------------------------------------------
def hear(state: State, command: Command) -> Outcome:
    """At once, what cannot wait for the main thread."""
    word = state.word
    match command:
        case Form() | Finish():
            word = told(word, command)
        case Recall(generation):
            word = told(replace(word, given_up=max(word.given_up, generation)), command)
            return Outcome(replace(state, word=word), (a.Abandon(generation),))
        case Abort(generation):
            word = replace(word, given_up=max(word.given_up, generation))
            return Outcome(replace(state, word=word), (a.Abandon(generation),))
        case Pause(generation):
            word = replace(word, pause_asked=generation)
        case Checkpoint(generation, step=step):
            word = replace(word, save_asked=(generation, step))
        case Holders(holders):
            return Outcome(state, (a.TakeHolders(holders),))
        case Load() | Sync() | LogTo() | Keep():
            return Outcome(state)
    return Outcome(replace(state, word=word))


def told(word: Word, command: Form | Finish | Recall) -> Word:
    return replace(word, told=seat_in(command), is_finishing=isinstance(command, Finish))


# --- what the main thread obeys -------------------------------------------------------
def obey(state: State, command: Command) -> Outcome:  # noqa: C901
    if state.is_at_work or isinstance(state.phase, BUSY):
        raise UnexpectedEvent(state, e.Obeyed(command))
    match command:
        case Form(generation) if generation <= state.seat.generation:
            return Outcome(state)  # said again over another connection
        case Finish() if seat_in(command) == state.seat and is_over(state):
            return Outcome(state)  # likewise
        case Form():
            return form(state, command)
        case Abort(generation) if generation == state.seat.generation:
            return say_suspended(state)
        case Recall():
            state = replace(state, seat=seat_in(command), source=Source.NONE)
            state, said = say_suspended(state)
            return Outcome(state, (a.StopCopy(), *said))
        case Load(place, recorded_step):
            state = replace(state, phase=InPool(), source=Source.NONE)
            return Outcome(state, (a.StopCopy(), a.LoadState(place, recorded_step)))
        case Sync(address=address) if state.is_whole:
            state = replace(state, phase=InPool(), source=Source.COPYING)
            return Outcome(state, (a.StopCopy(), a.Follow(address)))
        case Sync():
            return expect_part(state, command)
        case Keep() if isinstance(state.phase, Paused) and not state.is_given_up:
            kept = r.Kept(state.seat.generation, state.seat.rank)
            return Outcome(state, (a.SaveState(), a.Say(kept)))
        case Finish():
            return finish(state, command)
        case LogTo(place):
            return Outcome(state, (a.OpenLog(place),))
        case Pause() | Checkpoint() | Holders():
            return Outcome(state)  # heard
        case Abort() | Keep():
            return Outcome(state)  # of a generation that this worker has left


def is_over(state: State) -> bool:
    """The final state of its generation is written, or the generation was given up since."""
    return isinstance(state.phase, Ended) or state.is_given_up


def with_copy(state: State, step: int, origin: int) -> State:
    """It holds the state that another one has made."""
    state = replace(state, step=step, origin=origin, holding=Holding.STATE, prepared_by=0)
    return replace(state, is_copied=True)


def without_part(state: State) -> State:
    return replace(state, holding=Holding.PROMISED, prepared_by=0)


def say_suspended(state: State) -> Outcome:
    state = replace(state, phase=Suspended())
    report = r.Suspended(
        generation=state.seat.generation,
        rank=state.seat.rank,
        step=state.step if state.holding is Holding.STATE else -1,
        origin=state.origin,
        prepared_by=state.prepared_by,
        is_between_steps=state.is_between_steps,
        vote=None,
        evaluation=None,
        is_copied=state.is_copied,
    )
    return Outcome(state, (a.Say(report),))


def finish(state: State, command: Finish) -> Outcome:
    """Say what is not on record (nobody will later), and write the final state."""
    state = replace(state, phase=Ended(), seat=seat_in(command), source=Source.NONE)
    repeat = (a.SayUnrecorded(command.recorded_step),) if command.rank == 0 else ()
    write = a.WriteFinal(command.generation, command.log_folder)
    return Outcome(state, (a.StopCopy(), *repeat, write))


# --- forming --------------------------------------------------------------------------
def form(state: State, command: Form) -> Outcome:
    state = replace(state, seat=seat_in(command))
    leave = a.LeaveGroup(command)
    if state.is_given_up:  # its Abort, or a Recall, comes next
        return Outcome(replace(state, phase=Broken()), (leave,))
    state = replace(state, phase=Forming(command))
    if not state.is_whole:
        state = replace(state, prepared_by=0)
        return Outcome(state, (leave, a.BeginGroup(command), a.DropGradients(), a.Meet()))
    catch_up = (a.DropGradients(), a.CatchUp(command.step, command.origin))
    if command.vote is not None and state.prepared_by == command.origin:
        return Outcome(state, (leave, a.BeginGroup(command), a.RollForward(command), *catch_up))
    state = replace(state, prepared_by=0)
    return Outcome(state, (leave, a.BeginGroup(command), *catch_up))


def fail_to_catch_up(state: State, why: str) -> Outcome:
    is_given_up = state.is_given_up
    state = replace(state, phase=Broken(), source=Source.NONE)
    failed = () if is_given_up else (a.Say(r.SyncFailed(why, state.seat.generation)),)
    return Outcome(state, (a.StopCopy(), *failed))


def meet(state: State, command: Form) -> Outcome:
    if state.is_given_up:
        return Outcome(replace(state, phase=Broken()), (a.Abandon(command.generation),))
    if not state.is_whole:
        return Outcome(state, (a.AssembleState(command),))
    if (state.step, state.origin) == (command.step, command.origin):
        return join(state, command, state.step)
    late = a.CatchUpLate(command.step, command.origin)
    return Outcome(state, (connected(state), late))


def connected(state: State) -> a.Say:
    return a.Say(r.Connected(state.seat.generation, state.seat.rank))


def join(state: State, command: Form, step: int) -> Outcome:
    generation, rank = state.seat.generation, state.seat.rank
    state = replace(
        state,
        phase=Entering(command.then_pause),
        formed=generation,
        holding=Holding.STATE,
        source=Source.NONE,
        step=step,
        prepared_by=0,
    )
    joined = a.Say(r.Joined(generation, rank, 0.0, step))
    said = (a.StopCopy(), joined, a.TakeEvaluation(command.evaluation))
    if rank == 0:
        said = (*said, a.SayUnrecorded(command.recorded_step))
    if state.is_whole:
        return Outcome(state, (*said, a.MeetAll(command)))
    state, actions = begin_work(state, command.then_pause)
    return Outcome(state, (*said, *actions))


def begin_work(state: State, should_pause: bool) -> Outcome:
    """A pause waits for the boundary: what the loop is in the middle of is finished before."""
    state = replace(state, phase=Working(should_pause))
    return reach_boundary(state) if state.loop is Loop.OUTSIDE else Outcome(state)


# --- working --------------------------------------------------------------------------
def reach_boundary(state: State) -> Outcome:
    if state.is_at_work:
        state = replace(state, is_copied=False)
    if not state.is_at_work or state.phase != Working(should_pause=True):
        return Outcome(state)
    paused = r.Paused(state.seat.generation, state.seat.rank, state.step, state.origin)
    actions = (a.ProtectState(is_pausing=True), a.Say(paused))
    return Outcome(replace(state, phase=Paused()), actions)


def return_from_loop(state: State) -> Outcome:
    if not state.is_at_work:
        return Outcome(state)  # it returns again in the next generation
    done = r.Done(state.seat.generation, state.seat.rank, state.step, state.origin)
    actions = (a.ProtectState(is_pausing=False), a.Say(done))
    return Outcome(replace(state, phase=Done()), actions)


def commit(state: State, event: e.StepCommitted) -> State:
    """With its vote; or, when a generation forms, with that of others."""
    state = replace(state, step=event.step, origin=state.prepared_by, prepared_by=0)
    state = replace(state, is_copied=False)
    match state.phase:
        case Working(should_pause):
            return replace(state, phase=Working(should_pause or event.should_pause))
        case Forming():
            return state
        case _:
            raise UnexpectedEvent(state, event)


def lose_peers(state: State, event: e.PeersLost) -> Outcome:
    """Say so once, unless the controller has given the generation up already."""
    seat, phase = state.seat, state.phase
    if isinstance(phase, Broken):
        return Outcome(state)
    if not isinstance(phase, (*BUSY, Working, Ended)):
        raise UnexpectedEvent(state, event)
    is_known = state.is_given_up
    if not isinstance(phase, Ended):
        state = replace(state, phase=Broken())
    if is_known:
        return Outcome(state)
    failed = event.report(seat.generation, seat.rank)
    return Outcome(state, (a.Abandon(seat.generation), a.Say(failed)))


# --- following ------------------------------------------------------------------------
def expect_part(state: State, command: Sync) -> Outcome:
    """It gets one when a generation forms, and may copy ahead from those who train."""
    state = replace(without_part(state), phase=InPool())
    forget = (a.StopCopy(), a.ForgetState())
    if command.members:
        state = replace(state, source=Source.COPYING)
        return Outcome(state, (*forget, a.CopyAhead(command)))
    state = replace(state, source=Source.LEVEL)
    return Outcome(state, (*forget, a.Say(r.Synced(state.step))))


def follow(
    state: State, event: e.StateReplaced | e.StepFollowed | e.CopyLevel | e.SourceLost
) -> Outcome:
    if state.source is Source.NONE:
        raise UnexpectedEvent(state, event)
    match event:
        case e.StateReplaced(step, origin) | e.StepFollowed(step, origin):
            return Outcome(with_copy(state, step, origin))
        case e.CopyLevel() | e.SourceLost() if not state.is_whole:
            return end_ahead(state, event)
        case e.CopyLevel() if state.source is Source.LEVEL:
            return Outcome(state)
        case e.CopyLevel():
            said = a.Say(r.Synced(state.step))
            return Outcome(replace(state, source=Source.LEVEL), (said,))
        case e.SourceLost(why):
            state = replace(state, source=Source.NONE)
            return Outcome(state, (a.StopCopy(), a.Say(r.SyncFailed(why))))


def end_ahead(state: State, event: e.CopyLevel | e.SourceLost) -> Outcome:
    """It has its part, or it will get it when a generation forms: either way it may come in."""
    if state.source is Source.LEVEL:
        return Outcome(state)
    given_up = () if isinstance(event, e.CopyLevel) else (a.StopCopy(),)
    state = replace(state, source=Source.LEVEL)
    return Outcome(state, (*given_up, a.Say(r.Synced(state.step))))
