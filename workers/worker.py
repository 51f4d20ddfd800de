"""`Worker`: one process of the run from its start to its end. The Ray actor is a shell around it.

It builds the workload, connects to the controller and runs the training loop; what the controller
wants of it is workers/membership/member.py's, a step is workers/session.py's.
"""

import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from elastic.protocol.errors import (
    PeerLost,
    StepCancelled,
    UnfitNode,
    UserError,
    WrongInput,
    in_words,
)
from elastic.protocol.membership import worker_name
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages.to_worker import Command
from elastic.protocol.spot import parse_spot
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Catalogue, Damage
from elastic.store.files import reach_folder
from elastic.store.remote import patiently
from workers.backup.client import BackupClient
from workers.checkpoint.saver import Saver
from workers.data.loader import LoadedBatch, Loader, LoaderLost
from workers.data.placement import to_device
from workers.data.supply import OpenFeed, Supply
from workers.health import fingerprint, gpu, numa, preflight, stacks, storage
from workers.health.notice import Notice
from workers.health.pulse_process import PulseProcess
from workers.health.spot import SpotWatch
from workers.health.vitals import Vitals
from workers.log_upload import LogUploader
from workers.loop import fit
from workers.membership.events import Loop
from workers.membership.link import Address, ControllerLink, leave
from workers.membership.member import Member
from workers.membership.state import BrokenInvariant
from workers.membership.state_stream import PeerServer
from workers.membership.unwinding import RolledBack, RunEnded
from workers.parallel.build import build_strategy
from workers.parallel.strategy import Strategy
from workers.resharding.host_memory import keep_freed
from workers.session import Session
from workers.step.randomness import seed_microbatch
from workers.step.vote import check_loss, weight_of
from workers.torch_private.version import untested
from workers.tracebacks import begun_outside
from workers.train_state.build import check_threads
from workers.train_state.out_of_memory import OutOfMemory
from workers.train_state.train_state import TrainState
from workers.train_state.trial import check_kept, try_optimizer
from workers.worker_log import WorkerLog

log = logging.getLogger(__name__)
EXIT_WITHOUT_LOADER = 72
EXIT_WITHOUT_MEMORY = 73
EXIT_WITHOUT_GPU = 74
EXIT_WITH_STUCK_GROUP = 75
EXIT_WITH_BROKEN_STATE = 76


@dataclass(frozen=True, slots=True)
class Around:
    """What Ray gives a worker's process, as plain values and callables."""

    node_id: str
    find_controller: Callable[[], Address | None]
    open_feed: OpenFeed
    enter_child: Callable[[], None]
    """What processes forked from this one must do first."""
    drain_node: Callable[[float], None]
    """Nothing new is to be placed on this node, which goes in so many seconds."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a worker is made of from the moment that its model is there."""

    workload: Any
    strategy: Strategy
    peers: PeerServer
    saver: Saver
    member: Member
    session: Session
    loop: Callable[[Session], None]

    @property
    def train_state(self) -> TrainState:
        return self.strategy.train_state

    def process(self, around: Around, gpu_name: str) -> r.Process:
        host, address = self.member.spec.host, self.peers.address
        return r.Process(around.node_id, host, os.getpid(), gpu_name, address)


class Worker:
    """A worker's process. Make it and call `run` in the main thread."""

    _built: Built | None = None
    _uploader: LogUploader | None = None
    """Where the run directory is a bucket."""
    _device, _gpu_name = torch.device("cpu"), "cpu"

    def __init__(self, spec: WorkerSpec, workload: bytes, around: Around) -> None:
        """workload: a pickle of (workload, loop or None), made by the driver."""
        self._spec, self._pickled, self._around = spec, workload, around
        self._log = WorkerLog(worker_name(spec.worker))
        self._is_warm = False
        self._returned_at = spec.steps
        """Committed steps when the user's loop has returned last; before that the run's."""

    def run(self) -> None:
        """Until the controller ends the process. Raises what the user's code raises."""
        spec = self._spec
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        torch.set_num_threads(spec.cpus.num_threads)
        self._vitals = Vitals()
        self._pulse = PulseProcess(spec, self._vitals.fd, stacks.arm())
        self._pulse.start(spec.controller)
        self._link = ControllerLink(
            spec.controller,
            token=spec.token,
            worker=spec.worker,
            silence_s=spec.timeouts.silence_s,
            lease_s=spec.timeouts.lease_s,
            find=self._around.find_controller,
            on_command=self._on_command,
            introduce=self._introduce,
        )
        self._notice = Notice(self._say_notice)
        if spec.spot is not None:
            SpotWatch(parse_spot(spec.spot), self._hear_spot)
        try:
            self._tell_of_errors(self._train)
        except RunEnded:
            self._rest()

    def _tell_of_errors(self, train: Callable[[], None]) -> None:
        """The controller learns whose they are, then they are raised."""
        try:
            train()
        except (RunEnded, StepCancelled, PeerLost):  # the latter two of a collective outside steps
            raise
        except WrongInput as error:
            is_unfit = isinstance(error, UnfitNode)
            if self._has_begun and not is_unfit:
                self._fail(error)
            self._link.send(r.WrongInput(str(error), is_unfit))
            raise
        except (LoaderLost, OutOfMemory) as error:  # the run goes on without this process
            is_memory = isinstance(error, OutOfMemory)
            self._leave(EXIT_WITHOUT_MEMORY if is_memory else EXIT_WITHOUT_LOADER, str(error))
        except BrokenInvariant as error:
            self._leave(EXIT_WITH_BROKEN_STATE, str(error))
        except SystemExit as error:
            self._fail(RuntimeError(f"the workload called sys.exit({error.code!r})"))
        except Exception as error:
            if fault := gpu.fault_of(error, self._device):
                traceback.print_exc()
                why = f"{self._gpu_name} has failed: {fault}"
                self._leave(EXIT_WITHOUT_GPU, why, "device_failed")
            self._fail(gpu.refused(error, self._spec))
        except BaseException as error:  # to Ray it would look like the end of the process
            self._fail(RuntimeError(f"the workload raised {in_words(error)}"))

    def _leave(self, status: int, why: str, cause: str = "") -> NoReturn:
        """Any thread: the run goes on without this process."""
        self._link.send(r.LastWords(why, cause))
        leave(status, why, self._keep_log)

    def _fail(self, error: Exception) -> NoReturn:
        """The user's code raised: the run ends with it."""
        self._link.send(r.UserFailed(self._describe(error)))
        traceback.print_exception(begun_outside(sys.exception() or error))
        self._keep_log()
        raise error

    def _on_command(self, command: Command) -> None:
        if self._built is None:
            return
        try:
            self._built.member.hear(command)
        except BrokenInvariant as error:
            self._leave(EXIT_WITH_BROKEN_STATE, str(error))

    def _introduce(self, controller: Address) -> r.Introduction:
        """Over each connection of the link, in its thread."""
        before = self._pulse.follow(controller)
        built = self._built
        if built is None:
            return r.Introduction("starting", before)
        built.saver.repeat()  # waits in the link until we are introduced
        self._notice.repeat()
        member = built.member
        member.evaluated.say(member.rank)
        machine = member.machine
        told = machine.word.told
        return r.Introduction(
            kind=machine.kind,
            controller_before=before,
            generation=told.generation,
            rank=told.rank,
            world_size=told.world_size,
            step=machine.step,
            process=built.process(self._around, self._gpu_name),
            origin=machine.origin,
        )

    def _say_notice(self, cause: str, notice_s: float) -> None:
        self._link.send(r.DrainNotice(cause, notice_s))

    def _hear_spot(self, cloud: str, left_s: float) -> None:
        """In the watch's thread."""
        self._notice.hear(f"{cloud} takes its machine", left_s)
        self._around.drain_node(left_s)

    def _train(self) -> None:
        spec = self._spec
        if spec.folder is not None:
            sys.path.insert(0, spec.folder)
            os.chdir(spec.folder)
        workload, loop = pickle.loads(self._pickled)  # from our own driver, through Ray
        loader = Loader(
            workload,
            spec.seed,
            spec.global_batch,
            spec.micro_batch,
            workload.loader_processes,
            self._around.enter_child,
        )
        on_stall = partial(self._vitals.enter, "feed")
        self._loader = Supply(workload, spec, self._around.open_feed, on_stall, loader)
        device = self._device = gpu.prepare(spec)
        if device.type == "cpu":
            keep_freed()
        self._gpu_name = gpu.name_of(device)
        if device.type == "cuda" and spec.cpus.numa_binding == "node":
            numa.run_near(gpu.pci_address(device), spec.cpus.num_threads + numa.SPARE)
        preflight.check(device, self._gpu_name, spec.host)
        if spec.has_checkpoints:
            storage.check(spec.place, spec.host, is_newcomer=spec.is_newcomer)
        fingerprint.check_recorded(spec, device)
        if why := untested():
            log.warning('torch is untested reason="%s"', why)
        open_backup = partial(BackupClient, spec, self._link.send)
        strategy = build_strategy(workload, spec, device, open_backup)
        check_threads(spec, device)
        peers = PeerServer(spec.host, spec.token, self._wake, spec.detect_s)
        saver = Saver(self._link, spec)
        member = Member(
            spec,
            strategy,
            self._link,
            peers,
            saver=saver,
            vitals=self._vitals,
            device=device,
            on_load=self._load,
            on_log_to=self._log_to,
            on_finish=self._finish,
            on_stuck=partial(self._leave, EXIT_WITH_STUCK_GROUP),
        )
        built = self._built = Built(
            workload=workload,
            strategy=strategy,
            peers=peers,
            saver=saver,
            member=member,
            session=Session(spec, workload, member, self._loader),
            loop=loop or fit,
        )
        self._link.send(r.Started(built.process(self._around, self._gpu_name)))
        self._loop(built)

    def _loop(self, built: Built) -> None:
        """The user's loop, again after a roll back; then "done" until the run ends."""
        member, train_state = built.member, built.train_state
        while True:  # a loss may ask for one more generation, in which there is nothing to do,
            if train_state.step < self._returned_at:  # or, after a roll back, steps to do again
                member.move_loop(Loop.OUTSIDE)
                self._vitals.enter("user")
                try:
                    built.loop(built.session)
                except RolledBack:
                    continue
                self._returned_at = train_state.step
                if not member.has_joined:
                    raise RuntimeError(
                        "the training loop returned without a step; loop over next_step()"
                    )
            member.returned()

    def _wake(self) -> None:
        if self._built is not None:
            self._built.member.wake()

    def _load(self, place: str, recorded_step: int) -> list[Damage]:
        """Become the holder of the state that the run goes on from (`Strategy.load`).

        place: the run directory, which need not exist. recorded_step: steps on record there; of a
        later state this worker must know the steps in between. Gives the damaged checkpoints.
        WrongInput if the workload cannot be trained, or no checkpoint is good; OSError if the
        storage stays away.
        """
        assert self._built is not None
        strategy, member = self._built.strategy, self._built.member
        self._is_warm = True
        folder = patiently(partial(reach_folder, place))
        catalogue = Catalogue(folder.at("checkpoints"))
        newest = max([recorded_step, *patiently(catalogue.steps)])
        with self._vitals.aside("user"):
            if not self._has_begun:
                check_kept(strategy.train_state)
            self._try_microbatch(newest, with_optimizer=True)
        known_step = member.records.known_from(recorded_step)
        begin_piece = partial(self._vitals.enter, "restore")

        def rest(pause_s: float) -> None:
            begin_piece()  # whoever tries again is alive
            time.sleep(pause_s)

        load = partial(strategy.load, catalogue, recorded_step, known_step, begin_piece)
        damaged = patiently(load, rest)
        if (said := fingerprint.to_record(self._spec, self._device)) is not None:
            self._link.send(said)
        return damaged

    def _warm_up(self) -> None:
        """A newcomer pays for its first pass (memory, kernels, caches) while the others train, a
        standby before it is needed."""
        if not self._is_warm:
            self._is_warm = True
            with (
                suppress(WrongInput, UserError),
                self._vitals.aside("user"),
            ):  # the first worker's own try has the say, or the first step
                self._try_microbatch(self._link.recorded_step)

    def _try_microbatch(self, step: int, *, with_optimizer: bool = False) -> None:
        """Forward and backward of a micro-batch of about the step that the run goes on with (a
        feed has its data at hand), and a step of an unknown optimizer; nothing of it stays."""
        assert self._built is not None
        workload, strategy = self._built.workload, self._built.strategy
        train_state = strategy.train_state

        @cache
        def fetched() -> Any:
            return self._loader.fetch(step, 0).batch

        def batch() -> Any:  # a loss may take it apart, and is computed more than once
            return to_device(deepcopy(fetched()), self._device)

        def loss(batch: Any) -> Any:
            return workload.loss(train_state.model, batch)

        examine = partial(self._examine, loss, batch, has_the_say=with_optimizer)
        if not strategy.is_runnable:
            examine()
            return
        fetched()
        train_state.buffers.begin_step()
        seed_microbatch(self._spec.seed, 0, 0)
        try:
            with train_state.casting.applied():
                total, weight = check_loss(loss(batch()))
                weight_of(0, weight)
                total.backward()
            examine()
            if with_optimizer:
                try_optimizer(workload, self._spec, train_state)
        except WrongInput:
            raise
        except Exception as error:
            if (refused := gpu.refused(error, self._spec)) is not error:
                raise refused from error
            examine()  # what a strategy could not examine would get to no step
            return  # step 1 will raise it, with its positions and everything on record
        finally:
            train_state.drop_gradients()
            train_state.buffers.restore_all()
            strategy.reset()
            self._built.session.forget_logged()

    def _examine(
        self, loss: Callable[[Any], Any], batch: Callable[[], Any], *, has_the_say: bool
    ) -> None:
        """has_the_say: what is found wrong ends the run. Of a newcomer it does not: the others have
        found what it could not."""
        assert self._built is not None
        strategy = self._built.strategy
        wrong = nullcontext() if has_the_say else suppress(Exception)
        # A loop of the user's own may look at micro-batches as the loss does.
        with wrong, strategy.train_state.casting.applied():
            strategy.examine(loss, batch, is_seen=self._built.loop is not fit)

    def _log_to(self, place: str) -> None:
        assert self._built is not None
        self._built.saver.open(place)
        folder = patiently(partial(reach_folder, place)).local
        if folder is not None and not (folder / "config.json").exists():
            raise UnfitNode(
                f"run directory {place} is not visible from node {self._spec.host}; choose a "
                "storage that every node sees, or a URI"
            )
        spool = Path(tempfile.gettempdir()) / self._spec.run_id
        self._log.move_to(folder / "logs" if folder else spool)
        if folder is None and self._uploader is None and self._log.path is not None:
            try:
                self._uploader = LogUploader(self._log.path, place)
            except OSError as error:
                print(f'log stays in {self._log.path} reason="{error}"', file=sys.stderr)
        self._warm_up()

    def _keep_log(self) -> None:
        """Bring what a loader printed to the log, and the log to remote storage."""
        self._log.collect()
        if self._uploader is not None and (why := self._uploader.join()):
            print(f'log stays in {self._log.path} reason="{why}"', file=sys.stderr)

    def _finish(self, member: Member, place: str | None) -> str:
        """The hash of the final weights."""
        self._keep_log()
        return member.strategy.weights_sha256(member.say_still_hashing)

    def _rest(self) -> None:
        """Wait to be ended: the controller tells the link to leave, which ends the process.

        Until then a member may be lost, and the others write the final state once more; where it
        is sharded they form a generation for that.
        """
        built = self._built
        assert built is not None
        while True:
            with suppress(RunEnded):
                built.member.wait_for_generation()
                self._loop(built)

    @property
    def rank(self) -> int | None:
        """In the newest generation that it was told of; None before the first one."""
        return self._built.member.rank if self._built is not None and self._has_begun else None

    @property
    def _has_begun(self) -> bool:
        """A step may have been committed since this worker's first generation."""
        return self._built is not None and self._built.member.has_joined

    def _describe(self, error: Exception) -> str:
        """What went wrong, in which step and micro-batch, and the user's own traceback. The
        controller adds the worker's name."""
        where, built = "before its first step", self._built
        if self._has_begun and built is not None:
            member, session = built.member, built.session
            step = session.attempted_step
            where = f"in step {step}" if step is not None else f"after step {member.step}"
            where = f"rank {member.rank} {where}"
            where += place_in_stream(session.attempt, self._spec)
        is_users_own = isinstance(error, UserError)
        is_ours = isinstance(error, WrongInput)
        what = error.message if is_users_own else str(error) if is_ours else in_words(error)
        return (
            f"{where}: {what}\n{error.traceback_text if is_users_own else traceback.format_exc()}"
        )


def place_in_stream(attempt: LoadedBatch | None, spec: WorkerSpec) -> str:
    """Of the micro-batch at hand; empty if there is none."""
    if attempt is None:
        return ""
    first = attempt.step * spec.global_batch + attempt.microbatch_id * spec.micro_batch
    rows = f", rows {attempt.rows.tolist()}" if attempt.rows.size else ""  # else not loaded yet
    positions = f"{first}..{first + spec.micro_batch - 1}"
    return f", micro-batch {attempt.microbatch_id}, stream positions {positions}{rows}"
