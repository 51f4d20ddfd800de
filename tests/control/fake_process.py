"""A worker's process in a simulation: the shipped machine, and effects that cost nothing.

The state is a number, the gradients are the number that it becomes with the step. The main thread
is a generator: wherever it yields, others go on, or the process is killed.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from elastic.protocol.in_force import ReportsInForce
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages.to_worker import Command, Finish, Form
from tests.control.fake_copying import JOIN_S, Copied, Copying, Turns, Work
from tests.control.fake_group import Group
from tests.control.fake_votes import VOTE, prepared_by, vector_of, weights_in
from workers.membership import actions as a
from workers.membership import events as e
from workers.membership.link import Recorded
from workers.membership.machine import transition
from workers.membership.state import (
    Broken,
    Done,
    Ended,
    Entering,
    Forming,
    InPool,
    Paused,
    Source,
    State,
    Suspended,
    Working,
    validate,
)
from workers.membership.step_log import Records
from workers.step.evaluation_log import EvaluationLog
from workers.step.vote import CompletedVote

if TYPE_CHECKING:
    from tests.control.fake_cluster import FakeCluster

MODES = {
    InPool: "idle",
    Entering: "rendezvous",
    Paused: "paused",
    Done: "done",
    Broken: "failed",
    Suspended: "suspended",
    Ended: "ended",
}


class Cancelled(Exception):
    """Of a step, or of an evaluation."""


class RolledBack(Exception):
    pass


class RunEnded(Exception):
    pass


class PeerLost(Exception):
    pass


class Process:
    def __init__(
        self,
        number: int,
        cluster: "FakeCluster",
        *,
        is_whole: bool = True,
        is_delayed: bool = False,
    ) -> None:
        """is_delayed: a step is on record once all say that their copy of it is held."""
        self.number, self.cluster, self.rng = number, cluster, cluster.rng
        self.machine = State(is_whole=is_whole)
        self.is_alive, self.is_up, self.is_stuck, self.has_failed = True, False, False, False
        self.doomed_at: float | None = None
        """It has a drain notice: gone then, if it has not left before."""
        self.wire: deque[Command] = deque()
        """On its way here."""
        self.heard: deque[Command] = deque()
        """Not yet obeyed."""
        self.unsent: deque[r.Report] = deque()
        """On its way to the controller."""
        self.cut_until = 0.0
        """The link passes nothing before."""
        self.is_broken = False
        """It is another one then."""
        self.in_force = ReportsInForce()
        self.at = "boundary"
        self.weights, self.gradient, self.gradient_of = 0, None, 0
        self.fitted_over = 0
        self.records = Records(cast(Any, self), 1, is_delayed=is_delayed)
        self.recorded = Recorded()
        self.group: Group | None = None
        self.group_of = 0
        self.is_abandoned = False
        self.copying = Copying(self)
        self.has_complained = False
        """It has said SyncFailed, and has no new source yet."""
        self.save_begun = (0, 0)
        self.last_part: r.PartSaved | r.PartFailed | None = None
        self.evaluated = EvaluationLog(self.send)
        self.main = self.run()

    def __repr__(self) -> str:
        return f"w{self.number} {self.mode} step {self.step} weights {self.weights} {self.machine}"

    # --- what the cluster asks -----------------------------------------------------------
    @property
    def step(self) -> int:
        return self.machine.step

    @property
    def origin(self) -> int:
        return self.machine.origin

    @property
    def rank(self) -> int:
        return self.machine.seat.rank

    @property
    def world_size(self) -> int:
        return self.machine.seat.world_size

    @property
    def generation(self) -> int:
        return self.machine.seat.generation

    @property
    def holds(self) -> bool:
        """A state of its own, or of whom it follows."""
        return self.machine.holding.name == "STATE"

    @property
    def follows(self) -> bool:
        return self.machine.source is not Source.NONE

    @property
    def mode(self) -> str:
        phase = self.machine.phase
        is_at = isinstance(phase, Working | Forming)
        return self.at if is_at else MODES[type(phase)]

    def introduction(self) -> r.Introduction:
        """Over another connection, as workers/worker.py and the link do it."""
        if self.last_part is not None:
            self.send(self.last_part)
        self.evaluated.say(self.rank)
        self.unsent = self.in_force.again_after(self.unsent)
        told = self.machine.word.told
        seat = told.generation, told.rank, told.world_size
        return r.Introduction(self.machine.kind, ("", 0), *seat, self.step, None, self.origin)

    def started(self) -> r.Started:
        return r.Started(r.Process("n", "ip", 1, "cpu", ("w", self.number)))

    # --- threads -------------------------------------------------------------------------
    def hear(self) -> None:
        """The link's thread takes the next command."""
        command = self.wire.popleft()
        self.advance(e.Heard(command))
        self.heard.append(command)

    @property
    def recorded_step(self) -> int:
        return self.recorded.step

    def hear_word(self, recorded: int, formed: int) -> None:
        """As workers/membership/link.py: not what was said before it heard of a step back."""
        if self.recorded.hear_word(recorded, formed):
            self.in_force.forget(recorded)

    def turn(self) -> None:
        """The main thread's."""
        next(self.main, None)

    def send(self, report: r.Report) -> None:
        self.in_force.say(report)
        self.unsent.append(report)

    def advance(self, event: e.Event) -> tuple[a.Action, ...]:
        """The machine's; what cannot wait is done at once."""
        self.machine, actions = transition(self.machine, event)
        validate(self.machine)
        if isinstance(event, e.SourceLost | e.CatchUpFailed):
            self.has_complained = True
        for action in actions:
            if isinstance(action, a.Abandon):
                self.abandon(action.generation)
        return actions

    def tell(self, event: e.Event) -> Turns:
        for action in self.advance(event):
            if self.rng.random() < 0.1:
                yield  # a kill between two of them leaves it here
            done = yield from self.do(action)
            if done is not None:
                yield from self.tell(done)

    def abandon(self, generation: int) -> None:
        if self.group is not None and self.group_of <= generation:
            self.is_abandoned = True
            self.group.left.add(self.number)

    def run(self) -> Turns:
        """As workers/worker.py: the loop, again after a roll back, then done until the end."""
        returned_at, steps = self.cluster.steps, self.cluster.steps
        while True:
            try:
                yield from self.wait()
                while True:
                    if self.step < returned_at:
                        yield from self.tell(e.LoopMoved(e.Loop.OUTSIDE))
                        try:
                            yield from self.train(steps)
                        except RolledBack:
                            continue
                        returned_at = self.step
                    yield from self.tell(e.LoopReturned())
                    yield from self.wait()
            except RunEnded:
                pass

    def wait(self) -> Turns:
        """For a generation that may step."""
        while not self.machine.is_at_work:
            yield
            yield from self.copying.look_around()
            if self.heard:
                command = self.heard.popleft()
                if isinstance(command, Form) and command.generation > self.generation:
                    self.cluster.freeze_one(self)
                yield from self.tell(e.Obeyed(command))
                if isinstance(command, Finish) and isinstance(self.machine.phase, Ended):
                    raise RunEnded

    # --- the user's loop -----------------------------------------------------------------
    def train(self, steps: int) -> Turns:
        every = self.cluster.faults.eval_every
        while self.step < steps:
            self.at = "boundary"
            yield
            yield from self.tell(e.BoundaryReached())
            yield from self.wait()
            before = self.step
            yield from self.one_step()
            if every and self.step > before and self.step % every == 0:
                yield from self.evaluate()

    def one_step(self) -> Turns:
        yield from self.tell(e.LoopMoved(e.Loop.STEP))
        try:
            try:
                yield from self.compute()
            except PeerLost as error:
                yield from self.tell(e.PeersLost(str(error)))
                raise Cancelled from error
        except Cancelled:
            yield from self.wait()
        finally:
            self.advance(e.LoopMoved(e.Loop.OUTSIDE))

    def compute(self) -> Turns:
        self.at = "compute"
        yield
        if self.machine.is_cancelled:
            raise Cancelled
        if self.world_size < min(self.fitted_over, self.cluster.faults.fits_over):
            yield from self.tell(e.PeersLost("no memory", False, True, self.world_size))
            raise Cancelled
        if self.rng.random() < self.cluster.faults.user_failure:
            self.send(r.UserFailed("ValueError: no"))
            while True:
                yield
        yield from self.collective("reduce")
        self.gradient = hash((self.weights, self.generation, self.step + 1))
        self.gradient_of = self.weights
        self.before_vote()
        yield from self.tell(e.StepPrepared())
        wishes = self.machine.wants_pause, self.wants_save
        voted = yield from self.collective("vote", wishes)
        should_pause, should_save = (any(each) for each in zip(*voted, strict=True))
        assert self.gradient is not None
        self.cluster.check_commit(self)
        yield from self.commit(self.gradient, should_pause=should_pause)
        if self.rank == 0:
            self.records.tell(self.machine.seat)
        if self.step % 3 == 0 or (should_save and self.step < self.cluster.steps):
            self.save()

    @property
    def wants_save(self) -> bool:
        generation, step = self.machine.word.save_asked
        begun = self.save_begun
        return generation == self.generation and not (begun[0] == generation and begun[1] >= step)

    def commit(self, weights: int, *, should_pause: bool) -> Turns:
        step, origin = self.step + 1, self.machine.prepared_by
        self.records.add(step, prepared_by(origin), vector_of(weights), VOTE)
        newest = self.records.known(is_newest_enough=True)
        self.cluster.feed(self, Copied(False, step, origin, weights, newest))
        self.is_applying = True
        if self.rng.random() < 0.1:
            yield
        self.weights, self.gradient, self.fitted_over = weights, None, self.world_size
        yield from self.tell(e.StepCommitted(step, should_pause))
        self.is_applying = False

    def evaluate(self) -> Turns:
        step, ordinal = self.step, self.evaluated.next_ordinal(self.step)
        yield from self.tell(e.LoopMoved(e.Loop.EVALUATION))
        generation = self.generation
        try:
            while (known := self.evaluated.known(step, ordinal)) is None:
                self.at = "evaluate"
                try:
                    while self.rng.random() < 0.7:
                        yield
                    yield from self.collective(("evaluate", ordinal))
                    generation = self.generation
                    break
                except PeerLost as error:
                    yield from self.tell(e.PeersLost(str(error)))
                    yield from self.wait()
                    if self.step < step:
                        raise RolledBack from error
            generation = known.generation if known is not None else generation
        finally:
            self.advance(e.LoopMoved(e.Loop.OUTSIDE))
        self.evaluated.add(r.Evaluation(step, ordinal, {"value": 0.0}, generation), self.rank)

    def collective(
        self, what: Any, brought: Any = (False,), step: int | None = None
    ) -> Generator[None, None, list[Any]]:
        """What all have brought. step: at which they are, if not at the same one yet."""
        group, key = self.group, (self.step if step is None else step, what)
        if group is None or self.is_abandoned:
            raise PeerLost("the generation was given up")
        self.at = what if isinstance(what, str) else self.at
        group.arrive(key, self.number, brought)
        while True:
            yield
            if self.is_abandoned:
                raise PeerLost("the generation was given up")
            is_torn = group.has_gap() and self.rng.random() < 0.7
            if is_torn or self.rng.random() < self.cluster.faults.false_alarms:
                raise PeerLost("connection reset")
            if group.is_complete(key):
                return list(group.arrived[key].values())

    is_applying = False
    """In the middle of a commit: followers have been sent the step, the state is the one before."""

    def state_of(self) -> Copied:
        """For whoever follows this worker."""
        return Copied(True, self.step, self.origin, self.weights, self.records.known())

    # --- what the machine asks for -------------------------------------------------------
    def do(self, action: a.Action) -> Work:  # noqa: C901
        match action:
            case a.Say(report):
                self.say(report)
            case a.StopCopy():
                self.copying.stop()
            case a.Follow() | a.CopyAhead():
                return self.copying.start(action)
            case a.LoadState(recorded_step=recorded):
                yield
                step, origin = self.load(recorded)
                return e.StateLoaded(step, origin=origin)
            case a.SaveState():
                self.cluster.kept[self.step] = self.origin, self.weights
                self.save()
            case a.LeaveGroup(form):
                self.abandon(form.generation)
                self.group, self.group_of, self.is_abandoned = None, form.generation, False
                self.recorded.hear_form(form.recorded_step)
            case a.BeginGroup(form):
                self.group = self.cluster.groups[form.generation]
                self.group.arrive("form", self.number)
                if self.machine.is_given_up:
                    self.abandon(form.generation)
            case a.RollForward(form):
                assert form.vote is not None
                vote = CompletedVote(form.vote, form.payload)
                assert form.vote.step == self.step + 1, (form.vote.step, self)
                assert self.gradient == weights_in(vote), "it is the vote of other gradients"
                yield
                yield from self.commit(self.gradient, should_pause=False)
            case a.DropGradients():
                self.gradient = None
            case a.CatchUp(step, origin):
                return (yield from self.copying.catch_up(step, origin))
            case a.RenewFollowers():
                self.cluster.renew(self)
            case a.Meet():
                return (yield from self.meet())
            case a.CatchUpLate(step, origin):
                return (yield from self.copying.catch_up_late(step, origin))
            case a.AssembleState(form):
                return (yield from self.assemble(form))
            case a.SayUnrecorded(recorded):
                self.records.repeat(self.machine.seat, min(recorded, self.recorded_step))
            case a.TakeEvaluation(evaluation):
                self.evaluated.hear(evaluation, self.step)
                self.evaluated.say(self.rank)
            case a.MeetAll():
                return (yield from self.meet_all())
            case a.WriteFinal():
                return (yield from self.write_final())
            case a.ProtectState():
                self.protect()
            case a.ForgetState():
                self.forget()
            case a.Abandon() | a.TakeHolders() | a.OpenLog():
                pass
        return None

    def say(self, report: r.Report) -> None:
        if isinstance(report, r.Suspended):
            has_gradients = self.gradient is not None and self.gradient_of == self.weights
            assert has_gradients or not report.prepared_by, f"{self} has no gradients"
            vote, content = self.records.vote_of(report.step)
            last = self.evaluated.last
            report = replace(report, vote=vote, evaluation=last, payload=content)
        self.send(report)

    def load(self, recorded: int) -> tuple[int, int]:
        """What it has from peers, unless steps before it cannot be reported, or what was saved for
        those who left; there are no other checkpoints."""
        step, origin = self.step, self.origin
        if not self.holds or step > self.records.known_from(recorded):
            step, origin, self.weights = 0, 0, 1
        published = self.cluster.published
        newest = max((s for s in self.cluster.kept if s in published), default=0)
        if newest > step:
            step = newest
            origin, self.weights = self.cluster.kept[newest]
        self.gradient = None
        self.records.go_back(step)
        self.records.repeat(self.machine.seat, recorded)
        return step, origin

    def save(self) -> None:
        """This worker's part of the checkpoint of its step."""
        faults = self.cluster.faults
        self.save_begun = (self.generation, self.step)
        if faults.failing_saves and self.rng.random() < 0.1:
            faults.failing_saves -= 1
            self.last_part = r.PartFailed(self.generation, self.rank, self.step, "disk full")
        else:
            self.cluster.groups[self.generation].saved[self.step].add(self.rank)
            self.last_part = r.PartSaved(self.generation, self.rank, self.step)
        self.send(self.last_part)

    def meet(self) -> Work:
        group, deadline = self.group, self.cluster.now + JOIN_S
        assert group is not None
        self.at = "rendezvous"
        while True:
            yield
            if self.is_abandoned:
                return e.PeersLost("the generation was given up while it formed")
            if group.is_complete("form") and self.rng.random() < 0.7:
                return e.Met()
            is_torn = group.has_gap() and self.rng.random() < 0.2
            if is_torn or self.cluster.now > deadline:
                return e.PeersLost("forming failed")

    def meet_all(self) -> Work:
        try:
            states = yield from self.collective("enter", self.weights)
        except PeerLost as error:
            return e.PeersLost(str(error))
        assert set(states) == {self.weights}, f"members of one mesh differ: {self}"
        return e.EverybodyEntered()

    def write_final(self) -> Work:
        yield
        self.save()
        return e.FinalWritten(f"{self.weights:x}")

    def before_vote(self) -> None:
        pass

    def protect(self) -> None:
        pass

    def forget(self) -> None:
        raise NotImplementedError

    def assemble(self, form: Form) -> Work:
        raise NotImplementedError
