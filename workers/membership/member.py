"""A worker between and inside generations: it obeys the controller's commands at step boundaries.

`Member` owns the process group, the followers it feeds and the source it follows. What happens
inside a step is workers/session.py's; what it means for the state is
workers/train_state/train_state.py's.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from elastic.protocol.errors import CollectiveRefused, DamagedCheckpoint, PeerLost
from elastic.protocol.mesh import Mesh
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
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Damage
from workers.checkpoint.saver import Saver
from workers.distributed import process_group
from workers.distributed.backends import connect_for
from workers.distributed.pieces import ROUND_OF_JOINING, Pieces
from workers.distributed.process_group import Alone, AnyGroup
from workers.health.compilation import Compilation
from workers.health.vitals import FORMING, Vitals
from workers.membership.joining import Copying
from workers.membership.link import ControllerLink
from workers.membership.standing import Standing
from workers.membership.state_stream import Followers, PeerServer
from workers.membership.step_log import Records
from workers.membership.unwinding import RunEnded
from workers.parallel.shards import RowsLost
from workers.parallel.strategy import Formed, Strategy
from workers.step.evaluation_log import EvaluationLog
from workers.step.vote import Prepared, Vote, decode
from workers.train_state.out_of_memory import told_as_loss
from workers.train_state.snapshot import Snapshot
from workers.train_state.train_state import Update

log = logging.getLogger(__name__)


class Member:
    """Commands in, reports out, and the state that a generation needs."""

    def __init__(
        self,
        spec: WorkerSpec,
        strategy: Strategy,
        link: ControllerLink,
        peers: PeerServer,
        saver: Saver,
        vitals: Vitals,
        device: torch.device,
        *,
        on_load: Callable[[str, int], list[Damage]],
        on_log_to: Callable[[str], None],
        on_finish: Callable[["Member", str | None], str],
    ) -> None:
        self.spec, self.strategy, self.link, self.peers = spec, strategy, link, peers
        self.train_state, self.backup = strategy.train_state, strategy.backup
        self.saver, self.vitals, self.device = saver, vitals, device
        self._on_load, self._on_log_to, self._on_finish = on_load, on_log_to, on_finish
        self.group: AnyGroup | None = None
        self.generation, self.rank, self.world_size = 0, 0, 0
        self.has_joined = False
        self.prepared: Prepared | None = None
        self.should_pause = False
        """Agreed by vote: the next boundary is a pause."""
        self.is_evaluating = self.is_done = False
        self._told_at = 0.0
        """When it was last said that the hash of the final state gets further."""
        self.evaluated = EvaluationLog(link)
        self.standing = Standing()
        self._pause_asked = self._aborted = 0  # generations; written by the link's thread
        self._save_asked = (0, 0)  # generation, step; likewise
        self.compilation = Compilation(vitals)
        self._formation: process_group.Formation | None = None
        self._followers = Followers(peers)
        delays = strategy.backup.delays_commits
        self.records = records = Records(link, spec.global_batch, is_delayed=delays)
        seams = self.standing, self._on_replaced, records.take
        self._copying = Copying(spec, self.train_state, link, vitals, device, *seams)

    # --- called by the link's thread -------------------------------------------------
    def interrupt(self, command: Command) -> None:
        """At once, what cannot wait for the main thread."""
        match command:
            case Holders(holders):
                self.backup.hear(holders)
            case Form() | Finish():
                self.standing.hear(command)
            case Pause(generation):
                self._pause_asked = generation
            case Checkpoint(generation, step=step):
                self._save_asked = (generation, step)
            case Abort(generation) | Recall(generation):
                self.standing.hear(command)
                self._give_up(generation)
            case Load() | Sync() | LogTo() | Keep():
                pass

    def _give_up(self, generation: int) -> None:
        self._aborted = max(self._aborted, generation)
        if self._formation is not None:
            self._formation.abandon()
        if self.group is not None and self.generation <= generation:
            self.group.abandon()

    # --- what a step asks --------------------------------------------------------------
    @property
    def step(self) -> int:
        """Committed steps."""
        return self.train_state.step

    @property
    def is_cancelled(self) -> bool:
        return self.group is None or self.group.is_abandoned

    @property
    def wants_pause(self) -> bool:
        return self._pause_asked == self.generation

    @property
    def wants_save(self) -> bool:
        generation, step = self._save_asked
        return generation == self.generation and not self.saver.has_begun(generation, step)

    @property
    def mesh(self) -> Mesh:
        return self.strategy.mesh_of(self.world_size)

    @property
    def mesh_of_rows(self) -> Mesh:
        """Says which rows of the state this worker holds."""
        return self.strategy.mesh_of_rows(self.rank, self.world_size)

    @property
    def ids(self) -> range:
        return self.mesh.ids(self.spec.num_microbatches, self.rank)

    @property
    def num_passes(self) -> int:
        """Of a step, on this rank."""
        return self.mesh.num_passes(self.spec.num_microbatches, self.rank)

    def collective_failed(self, error: PeerLost) -> None:
        """Say so once, unless the controller has given up the generation already."""
        assert self.group is not None
        if not self.group.is_abandoned:
            self.group.abandon()
            self._say_failed(error)

    def _say_failed(self, error: PeerLost) -> None:
        is_refused = isinstance(error, CollectiveRefused)
        why = str(error)[:500]
        self.link.send(r.CollectiveFailed(self.generation, self.rank, why, is_refused))

    def wait_for_copies(self) -> None:
        """Before a vote, or before it says that it has stopped: what was kept last is safe."""
        self.backup.wait(lambda: self.is_cancelled)

    def commit(self, prepared: Prepared, vote: Vote, vector: np.ndarray) -> None:
        """Apply a prepared step with its completed vote, feed followers, report."""
        train_state, layout = self.train_state, prepared.layout
        self.vitals.enter("apply")
        update = Update(
            step=train_state.step + 1,
            is_finite=vote.is_finite,
            divisor=vote.divisor,
            num_microbatches=layout.num_microbatches,
            used=vote.used,
            gradients=prepared.reduced.gradients,
            buffers=prepared.reduced.buffers,
            integers=tuple(train_state.buffers.integers),
            tracked=train_state.buffers.tracked,
            log_names=layout.log_names,
        )
        self.records.add(update.step, prepared, vector, vote)
        self._followers.offer(
            lambda: update.to_message(self.records.to_frame(is_newest_enough=True))
        )
        self.strategy.apply(update)
        self.prepared = None
        self.should_pause = self.should_pause or vote.should_pause
        self.vitals.step = train_state.step
        self.compilation.tell(self.generation, train_state.step)
        self.backup.after_step(train_state, self)
        if not vote.is_saving:
            self.saver.after_step(train_state, self, is_asked=vote.should_save)

    # --- the boundary between steps ------------------------------------------------------
    def boundary(self) -> None:
        """Before a step: take on newcomers, pause if so agreed, join the next generation."""
        self._take_on_newcomers()
        if self.should_pause and not self.is_cancelled:
            self._say_paused()
            self.wait_for_generation()
        while self.is_cancelled:
            self.wait_for_generation()

    def _say_paused(self) -> None:
        self.backup.before_pause(self.train_state, self)
        self.wait_for_copies()
        self.link.send(r.Paused(self.generation, self.rank, self.train_state.step))

    def wait_for_generation(self, *, is_in_step: bool = False) -> None:
        """Obey commands until a generation has formed that may step. Raises RunEnded."""
        self.standing.is_waiting = True
        while True:
            self.vitals.enter("done" if self.is_done else "lobby")
            while not self._obey(self._next_command()):
                if self.vitals.phase in FORMING:  # in vain: it waits for nobody now
                    self.vitals.enter("lobby")
            if is_in_step or not self.should_pause or self.is_evaluating or self.is_done:
                break
            self._say_paused()
        self.standing.is_waiting = False
        self.vitals.enter("user")

    def _next_command(self) -> Command:
        """The deadline of this wait is the lease: without a controller the process ends."""
        while True:
            self._take_on_newcomers()
            self._copying.apply_received()
            if (command := self.link.commands.get()) is not None:
                return command

    def wake(self) -> None:
        """Any thread: there is something to do at the boundary."""
        self.link.wake()

    def _obey(self, command: Command) -> bool:  # noqa: C901
        """True once a new generation has formed."""
        match command:
            case Load():
                self._load(command)
            case Sync(address=address):
                self._follow(address)
            case LogTo(place):
                self._on_log_to(place)
            case Abort(generation):
                if generation == self.generation:  # else it is a dead one's, and no news
                    self._say_suspended()
            case Recall():
                self._copying.stop()
                self.generation, self.rank, self.world_size = self.standing.told
                self._say_suspended()
            case Form():
                return self._form(command)
            case Keep():
                self.saver.save_now(self.train_state, self)
                self.link.send(r.Kept(self.generation, self.rank))
            case Finish():
                self.end(command)
                raise RunEnded
            case Pause() | Checkpoint() | Holders():
                pass  # `interrupt` has heard of it
        return False

    def _load(self, command: Load) -> None:
        self._copying.stop()
        with told_as_loss("it loaded the state"):
            damaged = self._on_load(command.place, command.recorded_step)
        step = self.train_state.step
        if self.strategy.is_whole:
            self.records.go_back(step)
            self.records.repeat(self, command.recorded_step)
        self.standing.has_state = True
        self.vitals.step = step
        self.link.send(r.Loaded(step, tuple((d.step, d.what) for d in damaged)))

    def _say_suspended(self) -> None:
        vote = self.records.last_vote
        report = r.Suspended(
            generation=self.generation,
            rank=self.rank,
            step=self.strategy.held_step,
            is_prepared=self.prepared is not None,
            is_between_steps=self.is_evaluating or self.is_done,
            vote=vote[0] if vote else None,
            evaluation=self.evaluated.last,
            payload=vote[1] if vote else b"",
        )
        self.link.send(report)

    def end(self, command: Finish) -> None:
        """Say what is not on record (nobody will later), write the final state and say its hash;
        once more if a member was lost meanwhile."""
        self.generation, self.rank = command.generation, command.rank
        self.world_size = command.world_size
        if self.rank == 0:
            self.records.repeat(self, command.recorded_step)
        self.saver.give_up(self.generation - 1)
        self.vitals.enter("save")
        self._told_at = time.monotonic()
        try:  # the hash first: it is a collective, and the ranks' saves may take different times
            sha256 = self._on_finish(self, command.log_folder)
            self.saver.save_now(self.train_state, self, self._say_still_saving)
        except PeerLost as error:  # of a sharded state nobody can say the hash now
            self.collective_failed(error)
            return
        finally:
            self.vitals.enter("lobby")
        self.link.send(r.Ended(self.generation, self.rank, sha256))

    def say_still_hashing(self) -> None:
        """Called after each tensor, and said now and then."""
        now = time.monotonic()
        if now - self._told_at > self.spec.lease_s:
            self._told_at = now
            self._say_still_saving()

    def _say_still_saving(self) -> None:
        self.link.send(r.StillSaving(self.generation, self.rank))

    # --- forming ---------------------------------------------------------------------------
    def _form(self, command: Form) -> bool:
        self.generation, self.rank = command.generation, command.rank
        self.world_size = command.world_size
        self.link.recorded_step = command.recorded_step  # lower than before after a roll back
        self.vitals.generation = self.generation
        self.vitals.waits_in(0, "", 0)
        self.vitals.enter("form")
        if self.group is not None:
            process_group.leave(self.group)
        self.group = None
        self.saver.give_up(self.generation - 1)
        if self._aborted >= self.generation:
            return False
        began = time.monotonic()
        is_alone = self.world_size == 1
        connect = connect_for(self.device, self.spec.host)
        self._formation = None if is_alone else process_group.form_for(self.spec, command, connect)
        if self._formation is not None and self._aborted >= self.generation:
            self._formation.abandon()  # `interrupt` may have looked before it was there
        try:
            self._reach(command)
        except PeerLost as error:
            self._copying.stop()
            self.link.send(r.SyncFailed(str(error)))
            return False
        state_s = time.monotonic() - began
        self._followers.renew(self._state_and_records)
        if not self._join_group():
            return False
        assert self.group is not None
        began, say_alive = time.monotonic(), partial(self.vitals.enter, "restore")
        round_s = self.spec.join_timeout_s * ROUND_OF_JOINING
        pieces = Pieces(self.group, self.device, say_alive, round_s)
        get_state = self._catch_up_late if self.strategy.is_whole else self._enter
        with told_as_loss("it got its part of the state"):
            if not get_state(command, pieces):
                return False
        self._copying.stop()
        self._say_joined(command, state_s + time.monotonic() - began)
        return not self.strategy.is_whole or self._has_met(pieces)

    def _join_group(self) -> bool:
        """False if forming failed, which the controller knows then."""
        try:
            formation = self._formation
            alone = Alone(process_group.name_of(self.spec, self.generation))
            group = alone if formation is None else formation.wait(self.spec.join_timeout_s)
        except PeerLost as error:
            if self._aborted < self.generation:
                self._say_failed(error)
            return False
        self._formation = None
        group.on_wait = self.vitals.waits_in
        group.register(range(self.world_size))
        self.group = group
        if self._aborted >= self.generation:
            group.abandon()
            return False
        return True

    def _say_joined(self, command: Form, state_s: float) -> None:
        self.should_pause = command.then_pause
        self.has_joined = self.standing.has_state = True
        self.standing.formed = self.generation
        where = (self.generation, self.train_state.step, self.rank, self.world_size)
        log.info("generation=%d step=%d rank=%d world_size=%d joined", *where)
        step = self.train_state.step
        self.link.send(r.Joined(self.generation, self.rank, round(state_s, 6), step))
        self.evaluated.hear(command.evaluation, step)
        self.evaluated.say(self.rank)
        if self.rank == 0:
            self.records.repeat(self, command.recorded_step)

    def _reach(self, command: Form) -> None:
        """Stand at the generation's step: roll a prepared step forward, or follow up to it."""
        if not self.strategy.is_whole:
            return
        if command.vote is not None and self.prepared is not None:
            names = tuple(command.vote["log_names"])
            layout = replace(self.prepared.layout, log_names=names)
            vector = np.frombuffer(command.payload, "<i8").astype(np.int64)
            prepared = replace(self.prepared, layout=layout)
            self.commit(prepared, decode(layout, vector), vector)
        self.prepared = None
        self.train_state.forget_unagreed()
        self._copying.catch_up(command.step, lambda: self._aborted >= self.generation)

    # --- following and being followed --------------------------------------------------------
    def _follow(self, address: tuple[str, int] | None) -> None:
        if self.strategy.is_whole:
            self._copying.start(address, self.wake)
        else:  # its rows come when the generation forms
            self.strategy.forget()
            self.records.forget()
            self.standing.is_following = self.standing.has_state = True
            self.link.send(r.Synced(self.train_state.step))

    def _state_and_records(self) -> tuple[Snapshot, dict[str, Any]]:
        return self.train_state.snapshot(), self.records.to_frame()

    def _enter(self, command: Form, pieces: Pieces) -> bool:
        """Get this rank's part of the newest state that is whole. False if that failed."""
        assert self.group is not None
        self.backup.hear(command.holders)
        formed = Formed(
            generation=self.generation,
            step=command.step,
            known_step=self.records.known_step,
            group=self.group,
            pieces=pieces,
            catalogue=self.saver.catalogue,
            say_lost=self.collective_failed,
            gathering=self.vitals.gathering,
            on_connected=lambda: self.link.send(r.Connected(self.generation, self.rank)),
        )
        try:
            entered = self.strategy.enter(formed)
            self.records.share(self.group, self.device)
        except (RowsLost, DamagedCheckpoint) as error:  # the run goes back to a checkpoint
            self.strategy.forget()
            self.link.send(r.SyncFailed(str(error)))
            return False
        except PeerLost as error:
            self.collective_failed(error)
            return False
        step = self.train_state.step
        self.records.go_back(step)
        self.link.go_back(self.generation, step)
        self.prepared, self.vitals.step = None, step
        self.backup.begin(self.train_state, entered.origin, self, is_held=entered.is_held)
        return True

    def _catch_up_late(self, command: Form, pieces: Pieces) -> bool:
        """False if the generation was given up, or the source is gone, which costs it as well."""
        if self.train_state.step == command.step:
            return True
        self.link.send(r.Connected(self.generation, self.rank))
        try:
            self._copying.catch_up_late(command.step, pieces)
        except PeerLost as error:
            if self._aborted < self.generation:
                self._copying.stop()
                self.link.send(r.SyncFailed(str(error)))
            return False
        return True

    def _has_met(self, pieces: Pieces) -> bool:
        """Whoever is level waits for those that get their state late: a step's first collective
        would wait no longer than the backend lets it. False if the generation was given up."""
        try:
            pieces.wait_for_all()
        except PeerLost as error:
            self.collective_failed(error)
            return False
        return True

    def _on_replaced(self, records: dict[str, Any]) -> None:
        """The state is a peer's now."""
        self.prepared = None
        self.records.forget()
        self.records.take(records)

    def _take_on_newcomers(self) -> None:
        """A newcomer starts from the state of the last committed step."""
        self._followers.take_on(self._state_and_records)
