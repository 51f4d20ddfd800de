"""All that happened to one worker, from a run's journal: what it said, what was decided about it.

Reading the journal's file is not done here (elastic/store); `elastic story` prints it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from elastic.control import commands as c
from elastic.control import events as e
from elastic.control.commands import Command
from elastic.control.events import Event
from elastic.control.replay import Entry, Started
from elastic.control.standing import Standing
from elastic.control.state import Active, Decision
from elastic.control.transition import start, transition
from elastic.protocol.membership import Membership, worker_name


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened to the worker."""

    at: float
    """Unix time."""
    generation: int
    """The run's newest one by then."""
    step: int
    """Committed steps of the run by then."""
    what: str
    reason: str = ""
    """Of the decision that it led to, or came from."""
    first_step: int = 0
    """Of the steps up to `step` that it told of; 0: it told of something else."""


def story(journal: Iterable[Started | Entry], worker: int) -> Iterator[Happening]:
    """In the order of time. Steps that it told of one after another are one line. A journal has one
    part per start of its run, and each begins to count workers anew."""
    decision, limits = None, None
    told: list[Happening] = []
    for value in journal:
        if isinstance(value, Started):
            limits = value.limits
            decision = start(limits, value.at, value.earlier_generations)
            at, event, membership = value.at, None, None
        elif decision is None or limits is None:
            raise ValueError(f"the journal does not begin with its limits, but with {value!r}")
        else:
            phase, event, at = decision.phase, value.event, value.event.at
            membership = phase.membership if isinstance(phase, Active) else None
            decision = transition(decision.ledger, phase, event, limits)
        for what in happened(event, membership, decision.commands, worker):
            told = joined(told, happening(at, decision, what))
        if isinstance(event, e.Committed) and membership and membership.workers[0] == worker:
            new = happening(at, decision, "")
            told = joined(told, replace(new, first_step=event.step, step=event.step))
    yield from told


def happening(at: float, decision: Decision, what: str) -> Happening:
    ledger = decision.ledger
    reason = (decision.reason.splitlines() or [""])[0]  # of a traceback, too
    return Happening(at, ledger.generation, ledger.step, what, reason)


def joined(told: list[Happening], new: Happening) -> list[Happening]:
    """With `new`; steps that it tells of one after another are one line."""
    if not new.first_step:
        return [*told, new]
    last = told[-1] if told else None
    if last is not None and last.first_step and last.generation == new.generation:
        told, new = told[:-1], replace(new, first_step=last.first_step)
    first = new.first_step
    steps = f"step {first}" if first == new.step else f"steps {first} to {new.step}"
    return [*told, replace(new, what=f"says that all have committed {steps}")]


def happened(
    event: Event | None, membership: Membership | None, commands: tuple[Command, ...], worker: int
) -> Iterator[str]:
    """membership: of the generation that is at work before the event."""
    if event is not None and (said := what_was_said(event, membership, worker)):
        yield said
    if isinstance(event, e.WorkerLost) and event.worker == worker:
        return  # it is still in the membership that is given up
    for command in commands:
        if told := what_is_told(command, worker):
            yield told


def what_was_said(event: Event, membership: Membership | None, worker: int) -> str:  # noqa: C901
    """By the worker, or of it; empty if the event is not about it."""
    match event:
        case e.Adopted(standings=standings):
            return standing_of(standings, membership, worker)
        case e.StopRequested() | e.Cancelled() | e.Stepped() | e.Tick():
            return ""
        case e.WorkerStarted(worker=w) if w == worker:
            return "has started: its model is built"
        case e.WorkerLost(worker=w, cause=cause, why=why) if w == worker:
            return f"is lost: {cause}{why and f', {why}'}"
        case e.Loaded(worker=w, step=step) if w == worker:
            return f"has loaded the state of step {step}"
        case e.Synced(worker=w) if w == worker:
            return "has copied the state and follows its source"
        case e.SyncFailed(worker=w, reason=reason) if w == worker:
            return f"could not copy the state: {reason}"
        case e.DrainNotice(worker=w, cause=cause, deadline=deadline, at=at) if w == worker:
            return f"is to be gone in {deadline - at:.0f} s: {cause}"
        case e.UserFailed(worker=w, message=message) if w == worker:
            return f"has failed in the user's code: {(message.splitlines() or [''])[0]}"
        case (
            e.WorkerStarted()
            | e.WorkerLost()
            | e.Loaded()
            | e.Synced()
            | e.SyncFailed()
            | e.DrainNotice()
            | e.UserFailed()
            | e.Resized()
        ):
            return ""
        case _:
            return what_a_member_said(event, membership, worker)


def what_a_member_said(  # noqa: C901
    event: e.Report, membership: Membership | None, worker: int
) -> str:
    if membership is None or event.generation != membership.generation:
        return ""  # stale: whoever said it is a member no more
    if isinstance(event, e.Committed):
        return ""  # `story` joins them
    if membership.workers[event.rank] != worker:
        return ""
    match event:
        case e.Connected():
            return "has met the others"
        case e.Joined(rank=rank, state_s=state_s):
            return (
                f"is in, as rank {rank} of {membership.world_size} (its state took {state_s:.3f} s)"
            )
        case e.Paused(step=step):
            return f"rests at the boundary after step {step}"
        case e.Kept():
            return "has saved the state of this boundary"
        case e.CollectiveFailed(message=message):
            return f"says that a collective failed: {message}"
        case e.Suspended(step=step, is_prepared=is_prepared):
            ahead = f", step {step + 1} prepared" if is_prepared else ""
            return f"has left its collectives, at step {step}{ahead}"
        case e.Done(step=step):
            return f"has returned from its loop after step {step}"
        case e.Ended():
            return "has written and hashed the final state"
        case e.PartSaved(step=step):
            return f"has saved its part of the checkpoint of step {step}"
        case e.PartFailed(step=step, message=message):
            return f"could not save its part of the checkpoint of step {step}: {message}"
        case e.StillSaving():
            return "still writes the final state"


def standing_of(standings: tuple[Standing, ...], membership: Membership | None, worker: int) -> str:
    """What a new controller finds of it."""
    for standing in standings:
        if standing.worker == worker:
            return f"is found by a new controller: {standing.kind}, at step {standing.step}"
    if membership is not None and worker in membership.workers:
        return "is not found by a new controller"
    return ""


def what_is_told(command: Command, worker: int) -> str:  # noqa: C901
    """To the worker, or about it; empty if the command is not for it."""
    match command:
        case c.Spawn(workers=workers):
            return "is asked for" if worker in workers else ""
        case c.Retire(workers=workers):
            return "is ended: the run has no more use for it" if worker in workers else ""
        case c.Load(worker=w):
            return "is to load the state" if w == worker else ""
        case c.Sync(worker=w, source=source) if w == worker:
            return f"is to copy the state of {worker_name(source)}"
        case c.Sync(worker=w, source=source):
            return f"is to give its state to {worker_name(w)}" if source == worker else ""
        case c.Publish() | c.Discard():
            return ""
        case _ if worker not in command.membership.workers:
            return ""
        case c.Form(membership=membership, step=step, roll_forward=rolling):
            rank, size = membership.workers.index(worker), membership.world_size
            rolls = ", after the step that it has prepared" if worker in rolling else ""
            return f"is to be rank {rank} of {size} in generation {membership.generation}, " + (
                f"at step {step}{rolls}"
            )
        case c.Pause():
            return "is to rest at the next boundary"
        case c.Checkpoint():
            return "is to save the next step"
        case c.Keep():
            return "is to save the state of this boundary"
        case c.Abort():
            return "is to leave its collectives"
        case c.Recall():
            return "is called together with all who hold state"
        case c.Finish(outcome=outcome):
            return f"is to write the final state: {outcome}"
