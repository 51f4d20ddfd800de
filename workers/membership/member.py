"""A worker between and inside generations: the shell of its machine (machine.py).

`Member` tells the machine what comes and what is done, and carries out what it asks for. What
happens inside a step is workers/session.py's; what it means for the state is
workers/train_state/train_state.py's.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from elastic.protocol.errors import DamagedCheckpoint, PeerLost, in_words
from elastic.protocol.layout import Position, TensorLayout
from elastic.protocol.mesh import Mesh
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages.to_worker import Command, Finish, Form
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Damage
from workers.checkpoint.saver import Saver
from workers.distributed.backends import connect_for
from workers.distributed.device_errors import is_gone
from workers.distributed.exchange import gather_json
from workers.distributed.pieces import ROUND_OF_JOINING, Pieces
from workers.distributed.process_group import AnyGroup, OwnGroup
from workers.health.compilation import Compilation
from workers.health.fingerprint import alike
from workers.health.vitals import FORMING, Vitals
from workers.membership import actions as a
from workers.membership import events as e
from workers.membership.ahead import CopyingAhead
from workers.membership.joining import Copying
from workers.membership.link import ControllerLink
from workers.membership.machine import transition
from workers.membership.state import Ended, State, validate
from workers.membership.state_stream import Followers, PeerServer, Start
from workers.membership.step_log import Records
from workers.membership.unwinding import RunEnded, lost_peer_in
from workers.parallel.strategy import Formed, Strategy
from workers.resharding.assemble import ShardLost
from workers.step.evaluation_log import EvaluationLog
from workers.step.vote import CompletedVote
from workers.train_state.out_of_memory import does_not_fit, told_as_loss

log = logging.getLogger(__name__)
RollForward: TypeAlias = Callable[[CompletedVote], None]


class Member:
    """Commands in, reports out, and the state that a generation needs.

    The link's thread calls `hear` and reads `machine`, all else is the main thread's. The
    machine's state is a value that is replaced under a lock.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        strategy: Strategy,
        link: ControllerLink,
        peers: PeerServer,
        *,
        saver: Saver,
        vitals: Vitals,
        device: torch.device,
        on_load: Callable[[str, int], list[Damage]],
        on_log_to: Callable[[str], None],
        on_finish: Callable[["Member", str | None], str],
        on_stuck: Callable[[str], None] = lambda why: None,
    ) -> None:
        """on_stuck: told that the device does not let go of a group."""
        self.spec, self.strategy, self.link, self.peers = spec, strategy, link, peers
        self.train_state, self.backup = strategy.train_state, strategy.backup
        self.saver, self.vitals, self.device = saver, vitals, device
        self._on_load, self._on_log_to, self._on_finish = on_load, on_log_to, on_finish
        self._lock = threading.Lock()
        self.machine = State(is_whole=strategy.is_whole)
        self.prepared: RollForward | None = None
        """Takes the next step, whose reduced gradients are here, if the machine counts on them."""
        self._told_at = 0.0
        """When it was last said that the hash of the final state gets further."""
        self._state_s = 0.0
        """So long the state of this generation took."""
        self.evaluated = EvaluationLog(link.send)
        self.compilation = Compilation(vitals)
        connect = alike(connect_for(device, spec.host), spec, device)
        self.own = OwnGroup(spec, connect, lambda: self.machine.is_given_up, vitals, on_stuck)
        self._pieces: Pieces | None = None
        self.followers = Followers(peers, self._state_and_records, strategy.ahead)
        delays = self.backup.delays_commits
        self.records = Records(link, spec.global_batch, is_delayed=delays)
        records, tell, state = self.records, self._tell, self.train_state
        ahead = CopyingAhead(spec, strategy.ahead, vitals, device, tell)
        self._copying = Copying(spec, state, vitals, device, records, tell, ahead=ahead)

    # --- the machine -----------------------------------------------------------------
    def hear(self, command: Command) -> None:
        """In the link's thread: at once, what cannot wait for the main thread."""
        self._tell(e.Heard(command))

    def _tell(self, event: e.Event) -> None:
        """Any thread: what follows is done here."""
        with self._lock:
            self.machine, actions = transition(self.machine, event)
            if self.spec.validate:
                validate(self.machine)
        for action in actions:
            if (done := self._do(action)) is not None:
                self._tell(done)

    def _do(self, action: a.Action) -> e.Event | None:  # noqa: C901
        """Gives what it ended with, if the machine waits for that."""
        match action:
            case a.Say(report):
                self.link.send(self._completed(report))
            case a.Abandon(generation):
                self.own.abandon(generation)
            case a.TakeHolders(holders):
                self.backup.hear(holders)
            case a.ProtectState(is_pausing):
                self._protect(is_pausing=is_pausing)
            case a.StopCopy():
                self._copying.stop()
            case a.Follow() | a.CopyAhead():
                return self._copying.start(action, self.wake)
            case a.ForgetState():
                self.strategy.forget()
                self.records.forget()
            case a.LoadState(place, recorded_step):
                return self._load(place, recorded_step)
            case a.SaveState():
                self.saver.save_now(self.train_state, self)
            case a.OpenLog(place):
                self._on_log_to(place)
            case a.LeaveGroup(form):
                self._leave_group(form)
            case a.BeginGroup(form):
                self._begin_group(form)
            case a.RollForward(form):
                self._roll_forward(form)
            case a.DropGradients():
                self.prepared = None
                self.train_state.forget_unagreed()
            case a.CatchUp():
                return self._catch_up(action)
            case a.RenewFollowers():
                self.followers.renew()
            case a.Meet():
                return self._meet()
            case a.CatchUpLate() | a.AssembleState():
                with told_as_loss("it got its part of the state"):
                    return self._enter(action)
            case a.SayUnrecorded(recorded_step):
                self.records.repeat(self.machine.seat, min(recorded_step, self.link.recorded_step))
            case a.TakeEvaluation(evaluation):
                self.evaluated.hear(evaluation, self.train_state.step)
                self.evaluated.say(self.rank)
            case a.MeetAll(form):
                return self._meet_all(form)
            case a.WriteFinal(generation, log_folder):
                return self._write_final(generation, log_folder)
        return None

    def _completed(self, report: r.Report) -> r.Report:
        """With what the machine does not know."""
        match report:
            case r.Suspended(step=step):
                vote, payload = self.records.vote_of(step)
                last = self.evaluated.last
                return replace(report, vote=vote, evaluation=last, payload=payload)
            case r.Joined(generation, rank, step=step):
                what, size = "generation=%d step=%d rank=%d world_size=%d joined", self.world_size
                log.info(what, generation, step, rank, size)
                return replace(report, state_s=round(self._state_s, 6))
            case _:
                return report

    # --- what a step asks --------------------------------------------------------------
    @property
    def group(self) -> AnyGroup | None:
        return self.own.group

    @property
    def generation(self) -> int:
        return self.machine.seat.generation

    @property
    def rank(self) -> int:
        return self.machine.seat.rank

    @property
    def world_size(self) -> int:
        return self.machine.seat.world_size

    @property
    def has_joined(self) -> bool:
        """A generation, ever."""
        return self.machine.formed > 0

    @property
    def step(self) -> int:
        """Committed steps."""
        return self.train_state.step

    @property
    def is_cancelled(self) -> bool:
        return self.machine.is_cancelled

    @property
    def wants_pause(self) -> bool:
        return self.machine.wants_pause

    @property
    def wants_save(self) -> bool:
        generation, step = self.machine.word.save_asked
        return generation == self.generation and not self.saver.has_begun(generation, step)

    @property
    def mesh(self) -> Mesh:
        return self.strategy.mesh_of(self.world_size)

    @property
    def position(self) -> Position:
        """Whose boxes of the state this worker holds."""
        return self.strategy.position(self.rank, self.world_size)

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        """How the ranks share a tensor of the state."""
        return self.strategy.layout(name, tensor)

    @property
    def ids(self) -> range:
        return self.mesh.ids(self.spec.num_microbatches, self.rank)

    @property
    def num_passes(self) -> int:
        """Of a step, on this rank."""
        return self.mesh.num_passes(self.spec.num_microbatches, self.rank)

    @property
    def load(self) -> float:
        """Of a step, on this rank, in whole micro-batches."""
        return self.mesh.load(self.spec.num_microbatches, self.rank)

    def move_loop(self, to: e.Loop) -> None:
        """The user's loop has come there."""
        self._tell(e.LoopMoved(to))

    def prepare(self, roll_forward: RollForward) -> None:
        """A vote on it begins."""
        self.prepared = roll_forward
        self._tell(e.StepPrepared())

    def drop_gradients(self) -> None:
        """What all members have agreed on."""
        self.prepared = None
        self._tell(e.GradientsDropped())

    def collective_failed(self, error: PeerLost) -> None:
        """Say so once, unless the controller has given up the generation already."""
        self._tell(self._lost(error))

    def _lost(self, error: PeerLost) -> e.PeersLost:
        return e.PeersLost.of(does_not_fit(error, self.world_size, self.strategy.fitted_over))

    def is_over_with(self, error: BaseException) -> bool:
        """Whether what the user's code raised is only the end of its generation: a lost peer in a
        collective of its own, or what it made of an abandoned one's garbage."""
        if lost := lost_peer_in(error):
            self.collective_failed(lost)
        is_over = isinstance(error, Exception) and self.is_cancelled
        is_over &= not is_gone(error)
        if is_over and lost is None:
            what = 'generation=%d step=%d cancelled reason="given up before user code raised %s"'
            log.warning(what, self.generation, self.step, in_words(error))
        return is_over

    def wait_for_copies(self) -> None:
        """Before a vote, or before it says that it has stopped: what was kept last is safe."""
        self.backup.wait(lambda: self.is_cancelled)

    def take_step(self, *, should_pause: bool) -> None:
        """The state is that of one committed step more."""
        self.prepared = None
        self._tell(e.StepCommitted(self.step, should_pause))
        self.vitals.step = self.step
        self.compilation.tell(self.generation, self.step)

    # --- the boundary between steps ------------------------------------------------------
    def boundary(self) -> None:
        """Before a step: take on newcomers, pause if so agreed, join the next generation."""
        self._take_on_newcomers()
        self._tell(e.BoundaryReached())
        if not self.machine.is_at_work:
            self.wait_for_generation()

    def returned(self) -> None:
        """The user's loop has, or has nothing to do: wait until there is, or the run ends."""
        self._tell(e.LoopReturned())
        if rows := self.vitals.anatomy.take(is_last=True):
            self.link.send(r.Measured(rows))
        self.wait_for_generation()

    def wait_for_generation(self) -> None:
        """Obey commands until a generation has formed that may step. Raises RunEnded."""
        self.vitals.enter("done" if self.machine.loop is e.Loop.RETURNED else "pool")
        while not self.machine.is_at_work:
            self._obey(self._next_command())
            if self.vitals.phase in FORMING:  # in vain, or to pause: it waits for nobody now
                self.vitals.enter("pool")
        self.vitals.enter("user")

    def _next_command(self) -> Command:
        """The deadline of this wait is the lease: without a controller the process ends."""
        while True:
            self._look_around()
            if (command := self.link.commands.get()) is not None:
                return command

    def _look_around(self) -> None:
        self._take_on_newcomers()
        self._copying.apply_received()
        if why := self._copying.failure:
            self._tell(e.SourceLost(why))
        self._copying.ahead.look_around()

    def wake(self) -> None:
        """Any thread: there is something to do at the boundary."""
        self.link.wake()

    def _obey(self, command: Command) -> None:
        self._tell(e.Obeyed(command))
        if isinstance(command, Finish) and isinstance(self.machine.phase, Ended):
            raise RunEnded

    def _protect(self, *, is_pausing: bool) -> None:
        if is_pausing:
            self.backup.before_pause(self.train_state, self)
        self.wait_for_copies()

    def _load(self, place: str, recorded_step: int) -> e.Event:
        with told_as_loss("it loaded the state"):
            damaged = self._on_load(place, recorded_step)
        self.prepared, step = None, self.train_state.step
        if self.machine.is_whole:
            self.records.go_back(step)
            self.records.repeat(self.machine.seat, recorded_step)
        self.vitals.step = step
        said = tuple((d.step, d.what) for d in damaged)
        return e.StateLoaded(step, said, self.train_state.origin)

    def _write_final(self, generation: int, log_folder: str | None) -> e.Event:
        """The state, and its hash; once more if a member was lost meanwhile."""
        self.saver.give_up(generation - 1)
        self.vitals.enter("save")
        self._told_at = time.monotonic()
        try:  # the hash first: it is a collective, and the ranks' saves may take different times
            sha256 = self._on_finish(self, log_folder)
            self.saver.save_now(self.train_state, self, self._say_still_saving)
        except PeerLost as error:  # of a sharded state nobody can say the hash now
            return e.PeersLost.of(error)
        finally:
            self.vitals.enter("pool")
        return e.FinalWritten(sha256)

    def say_still_hashing(self) -> None:
        """Called after each tensor, and said now and then."""
        now = time.monotonic()
        if now - self._told_at > self.spec.timeouts.lease_s:
            self._told_at = now
            self._say_still_saving()

    def _say_still_saving(self) -> None:
        self.link.send(r.StillSaving(self.generation, self.rank))

    # --- forming ---------------------------------------------------------------------------
    def _leave_group(self, form: Form) -> None:
        self.link.hear_recorded(form.recorded_step)
        self.vitals.generation = form.generation
        self.vitals.waits_in(0, "", 0)
        self.vitals.enter("form")
        self.followers.end_parts()
        self.own.leave(form.generation)
        self.saver.give_up(form.generation - 1)
        self._state_s = 0.0

    def _begin_group(self, form: Form) -> None:
        self.own.begin(form)
        self._copying.ahead.finish(form.step, lambda: self.machine.is_given_up)

    def _roll_forward(self, form: Form) -> None:
        assert form.vote is not None
        assert self.prepared is not None
        began = time.monotonic()
        vote = CompletedVote(form.vote, form.payload)
        assert form.vote.step == self.train_state.step + 1, (form.vote.step, self.train_state.step)
        self.prepared(vote)
        self._state_s += time.monotonic() - began

    def _catch_up(self, to: a.CatchUp) -> e.Event:
        began = time.monotonic()
        try:
            self._copying.catch_up(to.step, to.origin, lambda: self.machine.is_given_up)
        except PeerLost as error:
            return e.CatchUpFailed(str(error))
        self._state_s += time.monotonic() - began
        return e.CaughtUp()

    def _meet(self) -> e.Event:
        try:
            self.own.meet()
        except PeerLost as error:
            return self._lost(error)
        assert self.group is not None
        say_alive = partial(self.vitals.enter, "restore")
        round_s = self.spec.timeouts.join_s * ROUND_OF_JOINING
        self._pieces = Pieces(self.group, say_alive, round_s)
        return e.Met()

    def _enter(self, action: a.CatchUpLate | a.AssembleState) -> e.Event:
        began = time.monotonic()
        match action:
            case a.CatchUpLate():
                failed = self._catch_up_late(action)
            case a.AssembleState(form):
                failed = self._assemble(form)
        self._state_s += time.monotonic() - began
        return failed or e.StateEntered(self.train_state.step)

    def _catch_up_late(self, to: a.CatchUpLate) -> e.Event | None:
        assert self._pieces is not None
        try:
            self._copying.catch_up_late(to.step, to.origin, self._pieces)
        except PeerLost as error:
            return e.CatchUpFailed(str(error))
        return None

    def _assemble(self, form: Form) -> e.Event | None:
        self.backup.hear(form.holders)
        assert self.group is not None
        try:  # of what is on record, a newcomer may have heard nothing yet
            self.link.hear_of_peers(max(gather_json(self.group, self.link.recorded_step)))
            entered = self.strategy.enter(self._formed(form))
            self.records.share(self.group)
        except (ShardLost, DamagedCheckpoint) as error:  # the run goes back to a checkpoint
            self.strategy.forget()
            return e.PartsMissing(str(error))
        except PeerLost as error:
            if self.strategy.held_step < 0:
                self._tell(e.PartGone())
            return e.PeersLost.of(error)
        step = self.train_state.step
        self.records.go_back(step)
        self.link.go_back(form.generation, step, form.recorded_step)
        self.prepared, self.vitals.step = None, step
        held, doubled = entered.is_held, entered.doubled
        self.backup.begin(self.train_state, entered.origin, self, is_held=held, doubled=doubled)
        return None

    def _formed(self, form: Form) -> Formed:
        assert self.group is not None
        assert self._pieces is not None
        return Formed(
            generation=form.generation,
            step=form.step,
            known_step=self.records.known_step,
            group=self.group,
            pieces=self._pieces,
            catalogue=self.saver.catalogue,
            say_lost=self.collective_failed,
            say=self.link.send,
            gathering=self.vitals.gathering,
            order=form.order,
            on_connected=lambda: self._tell(e.PartBegun()),
        )

    def _meet_all(self, form: Form) -> e.Event:
        """Whoever is level waits for those that get their state late: a step's first collective
        would wait no longer than the backend lets it."""
        assert self._pieces is not None
        try:
            self._pieces.wait_for_all()
            self.strategy.enter(self._formed(form))
        except PeerLost as error:
            return e.PeersLost.of(error)
        return e.EverybodyEntered()

    # --- being followed ------------------------------------------------------------------
    def _state_and_records(self) -> Start:
        return Start(self.train_state.snapshot(), self.records.known())

    def _take_on_newcomers(self) -> None:
        """A newcomer starts from the state of the last committed step."""
        self.followers.take_on()
