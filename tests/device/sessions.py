"""Sessions of two ranks on simulated devices whose generation is given up, or whose device fails,
at one chosen instant: in a step, in its vote, in a comparison of replicas, in an evaluation, while
a value is logged under a new name, while a generation forms.

The controller is a short one: what it tells its two members is as elastic/control has it.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages.to_worker import Abort, Finish, Form, Load
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.device import device
from tests.device.abandonment import Instant, Told, rows_of
from tests.device.ranks import Meeting, control
from tests.workers import session_rig, where
from workers.checkpoint.saver import Saver
from workers.data.loader import LoadedBatch
from workers.distributed import process_group
from workers.distributed.backends import with_control
from workers.distributed.process_group import Connect, Formation, Group, GroupSpec
from workers.distributed.rendezvous import Rendezvous
from workers.health import gpu
from workers.health.vitals import Vitals
from workers.membership.member import Member, RunEnded
from workers.parallel.build import build_strategy
from workers.parallel.over_shards import OverShards
from workers.parallel.strategy import Strategy
from workers.session import Session
from workers.worker import Built, Worker

WORLD_SIZE, STEPS, EVALUATED = 2, 3, 2
"""Members; steps in all; after so many the model is evaluated."""
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    parallel: str
    reduction: str
    at: str
    """"read": whenever rank 0's host waits for its device, or reads of the group; "launch": when it
    launches a collective of data or control."""
    generation: int = 1
    """Whose instants they are; the second one begins after step 1, with the ranks in the other
    order."""
    strike: str = "abort"
    """What happens then: "abort", the generation is given up; "fault", rank 0's device fails, and
    the other rank goes on alone."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the case's k-th instant."""

    k: int
    place: str
    wrong: str
    """Empty, or what somebody did against the promise."""


class Work(session_rig.Tiny):
    """Its weights draw nothing: ranks are threads, which share the host's generator."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.sin(torch.arange(float(p.numel())).view(p.shape)) / 3)
        return model


class InProcess:
    """See `workers.data.loader.AnyLoader`."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def assign(self, step: int, ids: range) -> None:
        pass

    def next(self, step: int, microbatch_id: int, is_cancelled: Callable[[], bool]) -> LoadedBatch:
        return self.fetch(step, microbatch_id)

    def fetch(self, step: int, microbatch_id: int) -> LoadedBatch:
        rows = (np.arange(3) + 12 * step + 3 * microbatch_id) % len(self._data)
        return LoadedBatch(
            step, microbatch_id, rows, default_collate([self._data[i] for i in rows])
        )


class Link(session_rig.FakeLink):
    """told: of each report, in the thread that makes it."""

    def __init__(self, told: Callable[[Any], None]) -> None:
        super().__init__()
        self._told = told

    def send(self, report: Any) -> None:
        super().send(report)
        self._told(report)


class NoPeers:
    """Where newcomers would come."""

    address = ("127.0.0.1", 1)

    def arrived(self) -> list[Any]:
        return []


class Wrong(Exception):
    """Against the promise."""


@dataclass(slots=True)
class Lived:
    """What came of a run's ranks."""

    rows: list[list[str]] = field(default_factory=lambda: [[] for _ in range(WORLD_SIZE)])
    """Of each rank after each step, if it is undisturbed."""
    evaluated: set[float] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)


def has_rows(strategy: Strategy) -> bool:
    """And does not stand for the initial state by reference."""
    return not isinstance(strategy, OverShards) or strategy.shards.holding.kind == "shards"


def evaluate(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return model(batch[0]).sum(), batch[0].shape[0]


class Rank:
    """One worker's objects, and the thread that it lives in."""

    def __init__(self, index: int, run: "Run", place: str) -> None:
        case = run.case
        self.index, self._run, self.device = index, run, torch.device("sim", index)
        where.use(self.device)
        work, vitals, peers = Work(), Vitals(), NoPeers()
        spec = session_rig.spec(
            case.reduction, parallel=case.parallel, worker=index, steps=STEPS, verify_every=2,
            join_s=DEADLINE_S,
        )  # fmt: skip
        strategy = self.strategy = build_strategy(work, spec, self.device)
        self.link: Any = Link(partial(run.told, self))
        self.saver = Saver(self.link, spec)
        catalogue = Catalogue(open_folder(place).at("checkpoints"))
        self.member = Member(
            spec, strategy, self.link, peers, saver=self.saver, vitals=vitals, device=self.device,
            on_load=lambda place, step: strategy.load(catalogue, 0, 0, lambda: None),
            on_log_to=lambda place: None, on_finish=lambda *_: strategy.weights_sha256(),
        )  # fmt: skip
        self.member.own._connect = run.connect(self)
        self.link.commands.hear = self.member.hear
        session = Session(spec, work, self.member, InProcess(work.dataset()))
        self._worker = object.__new__(Worker)  # its loop alone, without the process around it
        self._worker._spec, self._worker._link, self._worker._vitals = spec, self.link, vitals
        self._worker._returned_at = STEPS
        self._built = Built(work, strategy, peers, self.saver, self.member, session, self._loop)
        self.thread = threading.Thread(target=self._live, name=f"rank{index}", daemon=True)

    def _live(self) -> None:
        where.use(self.device)
        try:
            self._worker._loop(self._built)
        except RunEnded:
            return
        except BaseException as error:
            self._run.reports.put((self, error))

    def _loop(self, session: Session) -> None:
        """Each step has a value that no step before it had."""
        work, run = session.workload, self._run
        assert session.step < STEPS  # waits for the first generation
        run.stands(self)
        while session.step < STEPS:
            with session.next_step() as step:
                for batch in step.microbatches():
                    step.backward(work.loss(session.model, batch))
                    session.log(**{f"of step {session.step}": batch[0].shape[0]})
                step.commit()
            run.stands(self)
            if step.committed and session.step == EVALUATED:
                run.lived.evaluated.add(session.evaluate(work.dataset(), evaluate))


class Run:
    """One run, disturbed at the k-th instant of its case."""

    def __init__(self, case: Case, k: int, place: str, calm: Lived | None = None) -> None:
        """place: a folder without checkpoints. calm: of the undisturbed run; None: this is it."""
        self.case, self._calm, self.lived = case, calm, Lived()
        self.instant = Instant(k, self._strike)
        self.reports: queue.SimpleQueue[tuple[Rank, Any]] = queue.SimpleQueue()
        self._meeting, self._rendezvous = Meeting(), Rendezvous("127.0.0.1")
        self._lock = threading.Lock()
        self._generation = self._given_up = 0
        self._suspended: dict[int, r.Suspended] = {}
        self._answered: set[int] = set()
        """Who has said what is waited for: that it has loaded, is done, has ended."""
        self.ranks = [Rank(index, self, place) for index in range(WORLD_SIZE)]
        self._members = list(self.ranks)
        self._is_whole = self.ranks[0].strategy.is_whole

    # --- in the ranks' threads ---------------------------------------------------------------
    def connect(self, rank: Rank) -> Connect:
        def data(spec: GroupSpec) -> Group:
            torch.sim.set_device(rank.device)
            return self._meeting.data(rank.device, spec.name, spec)

        both = with_control(data, partial(control, rank.device))

        def connect(spec: GroupSpec) -> Any:
            group: Any = both(spec)
            if rank.index == 0 and self.case.at == "read":
                read = group.read
                group.read = lambda result: (self.instant.pass_by(0), read(result))[1]
            elif rank.index == 0:
                told = lambda name: self.instant.pass_by(0)  # noqa: E731
                group.backend.before_launch = told
                group.control.backend = Told(group.control.backend, told)
            return group

        return connect

    def waits(self, index: int, reason: str) -> None:
        """A host is about to wait for that device."""
        if self.case.at == "read":
            self.instant.pass_by(index)

    def stands(self, rank: Rank) -> None:
        """Its loop is between steps."""
        if self._calm is None:
            self.lived.rows[rank.index].append(rows_of(rank.strategy))
        elif self.case.generation == 2 and rank.index == 0 and rank.member.step == 1:
            self.give_up(1)

    def told(self, rank: Rank, report: Any) -> None:
        if isinstance(report, r.Suspended) and report.step >= 0 and self._calm is not None:
            is_dead = self.case.strike == "fault" and rank.index == 0
            held = [of_rank[report.step] for of_rank in self._calm.rows]
            if not is_dead and has_rows(rank.strategy) and rows_of(rank.strategy) not in held:
                raise Wrong(f"its rows are not those after step {report.step}")
        self.reports.put((rank, report))

    def _strike(self) -> None:
        if self.case.strike == "fault":
            device.fail("uncorrectable ECC error encountered")
        else:
            self.give_up(self._generation)

    def give_up(self, generation: int) -> None:
        """Any thread."""
        with self._lock:
            if self._given_up >= generation:
                return
            self._given_up = generation
            members = list(self._members)
        for rank in members:
            command = Abort(generation, 0, len(members))
            rank.member.hear(command)
            rank.link.commands.put(command)

    # --- the controller ----------------------------------------------------------------------
    def go(self) -> None:
        """To the end. Raises Wrong."""
        for rank in self.ranks:
            rank.thread.start()
        self._load()
        while self._answer(*self.reports.get(timeout=DEADLINE_S)):
            pass
        for rank in self._members:
            rank.thread.join(DEADLINE_S)
        for rank in self.ranks:
            rank.member.own.abandon(self._generation)
        self._rendezvous.forget()

    def _answer(self, rank: Rank, report: Any) -> bool:
        """False: the run has ended."""
        is_current = getattr(report, "generation", self._generation) == self._generation
        match report:
            case BaseException():
                self._lose(rank, report)
            case r.Loaded() if self._all(rank):
                self._form(0, 0)
            case r.Suspended() if is_current:
                self._suspended[rank.index] = report
                self._go_on()
            case r.CollectiveFailed() | r.SyncFailed() if is_current:
                self.give_up(self._generation)
            case r.Done() if is_current and not self._is_given_up and self._all(rank):
                self.instant.is_armed = False
                self._finish()
            case r.Ended() if is_current:
                self.lived.weights.add(report.weights_sha256)
                return not self._all(rank)
        return True

    @property
    def _is_given_up(self) -> bool:
        return self._given_up >= self._generation

    def _finish(self) -> None:
        generation, members = self._generation, self._in_order()
        for index, rank in enumerate(members):
            command = Finish(generation, index, len(members), "succeeded", None, STEPS)
            rank.link.commands.put(command)

    def _in_order(self) -> list[Rank]:
        """The members by their rank in this generation."""
        return self._members if self._generation % 2 else self._members[::-1]

    def _all(self, rank: Rank) -> bool:
        """Whether all members have answered, with this one."""
        self._answered.add(rank.index)
        if self._answered < {it.index for it in self._members}:
            return False
        self._answered = set()
        return True

    def _lose(self, rank: Rank, error: BaseException) -> None:
        has_failed = self.case.strike == "fault" and rank.index == 0 and self.instant.place
        if not has_failed or not gpu.fault_of(error, rank.device):
            raise Wrong(f"rank {rank.index} raised {type(error).__name__}: {str(error)[:200]}")
        with self._lock:
            self._members.remove(rank)
        rank.member.own.abandon(self._generation)
        self._suspended.pop(rank.index, None)
        self.give_up(self._generation)
        self._go_on()

    def _go_on(self) -> None:
        """Once all members have said where they stand."""
        said = [self._suspended.get(rank.index) for rank in self._members]
        reports = [report for report in said if report is not None]
        if len(reports) < len(said):
            return
        self._suspended, self._answered = {}, set()
        newest = max(reports, key=lambda report: report.step)
        behind = [report for report in reports if report.step < newest.step]
        has_lost = newest.step < 0 or len(self._members) < WORLD_SIZE
        if not self._is_whole and (behind or has_lost):
            self._load()
            return
        for report in behind:
            if (report.step, report.prepared_by) != (newest.step - 1, newest.origin):
                raise Wrong(f"{report} can not go on to {newest}")
        self._form(newest.step, newest.origin, newest)

    def _load(self) -> None:
        for rank in self._members:
            rank.link.commands.put(Load("", 0))

    def _form(self, step: int, origin: int, newest: r.Suspended | None = None) -> None:
        generation = self._generation = self._generation + 1
        members = self._in_order()
        if generation == self.case.generation and self._calm is not None:
            self.instant.is_armed = True
        store = self._rendezvous.open(generation) if len(members) > 1 else None
        for index, rank in enumerate(members):
            is_behind = newest is not None and rank.member.step < step
            rank.link.commands.put(
                Form(
                    generation, index, len(members), step, False, 0, store,
                    newest.vote if is_behind and newest else None,
                    newest.evaluation if newest else None, (), (), origin,
                    newest.payload if is_behind and newest else b"",
                )
            )  # fmt: skip


_left: list[Group | Formation] = []
"""Of earlier runs. Whoever frees a group waits for what is under way in it, and that may wait for
the other rank's group to be freed."""


def see_groups_off(run: Run) -> None:
    """After it. Ranks are threads, and whoever leaves a group looks at all that were left before:
    at none of a device that fails now. Nothing is under way on the devices."""
    for index in range(WORLD_SIZE):
        torch.sim.synchronize(index)
    for rank in run.ranks:
        if (group := rank.member.own.group) is not None:
            process_group.leave(group)
    _left.extend(process_group._left_behind)
    process_group._left_behind.clear()
    settled = [group for group in _left if group.is_settled]
    _left[:] = [group for group in _left if group not in settled]
    for group in settled:
        group.free()


def sweep(case: Case, place: str, every: int = 1, limit: int = 200) -> list[Outcome]:
    """One run for each of the case's instants, or for one in `every`, until there are no more."""
    run = calm = Run(case, 0, place)
    calm.go()
    outcomes: list[Outcome] = []
    for k in range(0, limit, every):
        see_groups_off(run)
        run = Run(case, k, place, calm.lived)
        wrong = ""
        try:
            with device.before_host_waits(run.waits), device.far_ahead():
                run.go()
        except (Wrong, queue.Empty) as error:
            wrong = str(error) or f"nobody said anything for {DEADLINE_S:g} s"
            run.give_up(limit)
        if not wrong and run.lived.weights != calm.lived.weights:
            wrong = f"the run ends with {run.lived.weights}"
        if not wrong and run.lived.evaluated != calm.lived.evaluated:
            wrong = f"the evaluations are {run.lived.evaluated}"
        if not run.instant.place and not wrong:
            return outcomes
        if case.strike == "fault":
            device.reset()
            torch.sim.synchronize(0)
        outcomes.append(Outcome(k, run.instant.place, wrong or "; ".join(device.races()[:2])))
    raise AssertionError(f"more than {limit} instants")
