"""`ScriptLoop`: calls a user's training script, and calls it again after a loss (restart in place).

One call of the script runs inside an open step of the engine; each published report commits the
step and opens the next. So a lost peer cancels what is open, the members regroup as they always do,
and the script begins again in the same process, from its newest report. What ray.train's functions
make of it is elastic/on_ray/train_api.py's.
"""

import logging
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from elastic.protocol.errors import GivenUp, PeerLost, StepCancelled, in_words
from elastic.protocol.messages.to_controller import LastWords, ScriptLevel, ScriptSteps
from elastic.protocol.step_record import AppliedRecord
from workers.distributed.exchange import gather_json
from workers.distributed.process_group import Group
from workers.health import gpu
from workers.membership.link import leave
from workers.membership.unwinding import lost_peer_in
from workers.scripts import randomness
from workers.scripts.afresh import forget_accelerate, give_back_memory, no_start_method
from workers.scripts.default_group import DefaultGroup, as_default
from workers.scripts.epochs import Epochs, current
from workers.scripts.in_place import trial
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.loader import Loaders
from workers.scripts.in_place.rule import AFTER_A_LOSS
from workers.scripts.in_place.seams import standing_in
from workers.scripts.ranks import Place, environment_set, introduced
from workers.scripts.reporting import Reporting
from workers.scripts.reports import MANIFESTS, Reports, Retention, Trained
from workers.scripts.roll_call import RollCall
from workers.scripts.unwinding import Unwinding, raised
from workers.scripts.values import returned
from workers.session import Session, Step
from workers.tracebacks import begun_outside

log = logging.getLogger(__name__)

NOT_HIGHER = "level 0 was asked for (--script-level, ELASTIC_SCRIPT_LEVEL)"
"""Why a script runs at level 0."""
RETURNED = "returned.json"
"""What the script has returned on the lowest rank; in the folder of `MANIFESTS`."""


@dataclass(frozen=True, kw_only=True)
class ScriptLoop:
    """How the script is run; the same on every worker. It is the run's training loop."""

    function: Callable[[], Any]
    place: str
    """The run directory."""
    name: str
    max_failures: int = 0
    """Calls that may end with an exception of the script's own; -1: any number."""
    retention: Retention = field(default_factory=Retention)
    ray_version: str = ""
    installed: Callable[["Call"], AbstractContextManager[Any]] = lambda call: nullcontext()
    """Within, the functions that the script calls answer from this call."""
    keeps_all_metrics: bool = False
    """reports.jsonl has those of every rank, and not of the lowest one alone."""
    goes_in_place: bool = False
    """After a loss a call goes on where it can (workers/scripts/in_place), instead of being called
    again."""

    def __call__(self, session: Session) -> None:
        num_calls = 0
        reports = Reports(self.place, self.retention, self.ray_version)
        not_in_place = "" if self.goes_in_place else NOT_HIGHER
        while session.step >= 0 and not session.model.has_ended:
            not_in_place = self._call(Call(self, session, reports, num_calls, not_in_place))
            num_calls += 1
            forget_accelerate()
            give_back_memory()  # this call's models and loaders are gone before the next

    def _call(self, call: "Call") -> str:
        """Once, to its end or until it is unwound; gives why the next one is not to go on in place.
        Raises what the script raises too often."""
        try:
            call.run()
        except StepCancelled as error:
            error.__traceback__ = None  # it holds the script's frames, and so all that they hold
            call.leave()
        except Exception as error:
            if not call.is_over_with(error):
                raise call.own_error(error)  # noqa: B904  (it has its cause)
            error.__traceback__ = None
            call.leave()
        return call.not_in_place


class Call:
    """One call of the script in one generation, and what it reports."""

    def __init__(
        self,
        loop: ScriptLoop,
        session: Session,
        reports: Reports,
        num_calls: int,
        not_in_place: str,
    ) -> None:
        """not_in_place: why it cannot go on after a loss, which then holds for all ranks; empty:
        nothing is known against it."""
        self.not_in_place = not_in_place
        self.loop, self._session, self._num_calls = loop, session, num_calls
        self._member = session._member
        self._step: Step | None = self._next_step()
        self.generation = self._member.generation
        self.reports = reports
        self._reporting = Reporting(self, reports, keeps_all_metrics=loop.keeps_all_metrics)
        self.group: DefaultGroup | None = None
        member = self._member
        self._roll_call = RollCall(member.link.send, lambda: (member.generation, member.rank))
        self._unwinding = Unwinding(self._end_process)
        self.course: Course | None = None
        """None: a loss unwinds the script."""
        self.loaders: Loaders | None = None

    def run(self) -> None:
        began = time.monotonic()
        inner = self._member.group
        assert inner is not None
        spec = self._session._spec
        is_lowest = inner.rank() == 0
        if is_lowest:
            self.reports.sweep()
        newest = self.reports.newest() if is_lowest else None
        trained = asdict(self.reports.trained_at(newest)) if is_lowest else None
        refusal = self.not_in_place or trial.refusal()
        try:
            said = introduced(inner, [spec.node or spec.host, spec.host, newest, trained, refusal])
        except PeerLost as error:
            raise self._lost(error) from error
        _, master, self._reporting.told.newest, trained, _ = said[0]
        self._reporting.told.trained = Trained(**trained)
        self.place = Place.of(inner.rank(), [node for node, *_ in said], master)
        self.not_in_place = next((why for *_, why in said if why), "")
        self.group = DefaultGroup(
            inner, waiting=self._roll_call.waiting, on_refusal=self._unwinding.tell
        )
        randomness.renew()
        environment = self.place.environment(self._num_calls, spec.run_id)
        with ExitStack() as stack:
            stack.enter_context(self._roll_call)
            stack.enter_context(no_start_method())
            stack.enter_context(environment_set(environment))
            stack.enter_context(as_default(self.group))
            before = self.reports.unrecorded_until(self.trained.steps)
            self.tell_steps(ScriptSteps(self.generation, self.trained.steps, before))
            if self._num_calls:
                self._tell_again()
            if self.not_in_place:
                self.say_level(0, self.not_in_place)
            else:
                stack.enter_context(self._in_place(self.group))
            stack.enter_context(self.loop.installed(self))
            epochs = stack.enter_context(Epochs(self).at_hand())
            self._tell("called", began)
            value = self.loop.function()
        if self.loaders is not None:
            self.loaders.end()
        self._end(value, epochs)

    def _tell_again(self) -> None:
        """What the script's output has of it, once."""
        if self.rank:
            return
        if self.not_in_place and self.not_in_place != NOT_HIGHER:
            print(f"elastic: called again at level 0: {self.not_in_place}", flush=True)
        if self.size < self.most_ranks:
            of = f"{self.size} of {self.most_ranks} workers"
            print(f"elastic: called again on {of}; {self.how_it_grows}", flush=True)

    # --- going on in place --------------------------------------------------------------------
    def _in_place(self, group: DefaultGroup) -> AbstractContextManager[None]:
        name = f"{self.run_id}/{self.generation}/{self._num_calls}"
        self.course = group.course = Course(name, group, self)
        trained = asdict(self._reporting.told.trained)
        self.course.applied.begin_at(**trained, lines=self.reports.unrecorded)
        self.loaders = Loaders(self.course)
        self.say_level(0, "nothing is trained in DistributedDataParallel yet")
        return standing_in(self.course, self.loaders)

    def holding_back(self) -> AbstractContextManager[None]:
        """Within, a loader of Ray's is opened, which draws a batch ahead of the script."""
        return nullcontext() if self.loaders is None else self.loaders.holding_back()

    @property
    def has_changed(self) -> bool:
        return self._member.is_cancelled or self._member.generation != self.generation

    def regroup(self, error: PeerLost | None) -> Group | None:
        """The open step ends, and the next one begins among the members that are left."""
        assert self.course is not None
        if error is not None:
            self._member.collective_failed(error)
        step, before = self._step, self._member.step
        with randomness.untouched():
            self._close(StepCancelled())
        if step is not None and step.committed:
            self.course.count_commit()
        if cast(Any, self._session.model).has_ended:
            return None
        self._step = self._next_step()
        self.generation = self._member.generation
        if self._member.step < before:
            raise StepCancelled
        return self._member.group

    def deny(self, why: str) -> None:
        log.warning('generation=%d called again at level 0 reason="%s"', self.generation, why)
        self.not_in_place = why
        raise self._lost(GivenUp(why))

    def unwind(self) -> NoReturn:
        self._unwinding.tell()
        raise StepCancelled

    def end_unit(self) -> None:
        self._member.vitals.tell_own(*self._roll_call.take_own_s())

    def waited_for_data(self, seconds: float) -> None:
        self._roll_call.data_s += seconds

    @property
    def how_it_grows(self) -> str:
        counted = current()
        if self.reports.has_epochs or (counted is not None and counted.has_begun):
            return "new ones enter at the end of an epoch"
        if self._reporting.told.newest is not None:
            return "new ones enter at the next report with a checkpoint"
        return (
            "it has reported no checkpoint, and until it does no new one enters: `for epoch in "
            "elastic.torch.epochs(n)` lets them"
        )

    # --- what the script's calls come to ------------------------------------------------------
    @property
    def run_id(self) -> str:
        return self._session._spec.run_id

    @property
    def device(self) -> torch.device:
        return self._session.device

    def check(self) -> None:
        """StepCancelled if the generation is over and the script does not go on in place: it
        unwinds the script. Each call into us."""
        if self.course is not None:
            self.course.check()
        elif self.has_changed:
            self._unwinding.tell()
            raise StepCancelled
        self._member.vitals.enter("user")

    @property
    def most_ranks(self) -> int:
        """That a call of the script may have."""
        return self._session._spec.global_batch

    @property
    def trained(self) -> Trained:
        """At level 0 nobody counts."""
        if self.course is None:
            return self._reporting.told.trained
        return Trained(self.course.applied.steps, self.course.applied.samples)

    def tell_steps(self, said: ScriptSteps) -> AppliedRecord:
        if self.rank == 0:
            self._member.link.send(said)
        return self._member.link.applied

    def say_level(self, level: int, reason: str) -> None:
        """At which level this call runs, and why at no higher one; all ranks may say it."""
        said = self._reporting.told.level = ScriptLevel(self.generation, level, reason)
        if self.rank == 0:
            self._member.link.send(said)

    def report(self, metrics: dict[str, Any], source: Path | None, name: str | None) -> str | None:
        """All ranks call it alike. Returns once the checkpoint is published, by its name; None: no
        rank has brought one.

        source: the folder of this rank's files. name: the checkpoint's, if the script chooses it.
        """
        self.check()
        try:
            with self._roll_call.waiting("report()"):
                return self._reporting.report(metrics, source, name)
        except PeerLost as error:
            raise self._lost(error) from error

    def commit(self, publish: Callable[[], None]) -> None:
        """All ranks call it alike: what the lowest rank publishes counts, and newcomers enter.
        StepCancelled if they do, or a peer is lost and the script is to be called again."""
        self.check()
        try:
            with self._roll_call.waiting("elastic.torch.epochs()"):
                self.end_step(publish)
        except PeerLost as error:
            raise self._lost(error) from error

    def barrier(self) -> None:
        self.check()
        with self._roll_call.waiting("barrier()"):
            self.gather(None)

    def broadcast(self, value: Any) -> Any:
        """The lowest rank's, on all of them."""
        self.check()
        with self._roll_call.waiting("broadcast_from_rank_zero()"):
            while True:  # the lowest rank may be lost on the way
                pickled = pickle.dumps(value).hex() if self.rank == 0 else ""
                if found := next(iter(self.gather(pickled).values())):
                    return pickle.loads(bytes.fromhex(found))

    def newest_checkpoint(self) -> str | None:
        """The name of the newest one that is what was reported; the same on all ranks."""
        self.check()
        return self._reporting.told.newest

    @property
    def member(self) -> int:
        """The rank that it had when the call began."""
        return self.place.rank

    @property
    def rank(self) -> int:
        """Among the members that are there now."""
        return self.place.rank if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """Of the members that are there now."""
        return self.place.world_size if self.group is None else self.group.size()

    def gather(self, value: Any) -> dict[int, Any]:
        """The JSON values of all, by the ranks that they had when the call began, in the order of
        today's. A collective."""
        if self.course is not None:
            return self.course.exchange(value)
        assert self.group is not None
        try:
            return dict(enumerate(gather_json(self.group.inner, value)))
        except PeerLost as error:
            raise self._lost(error) from error

    def call_again(self, why: str) -> NoReturn:
        """The script, after a loss that it cannot go on from in place. StepCancelled."""
        log.warning('generation=%d called again reason="%s"', self.generation, why)
        raise self._lost(GivenUp(why))

    # --- steps ----------------------------------------------------------------------------
    def _next_step(self) -> Step:
        with randomness.untouched():
            step = self._session.next_step()
        step.__enter__()
        self._member.vitals.enter("user")
        return step

    def end_step(self, publish: Callable[[], None], *, ends_now: bool = False) -> None:
        """All ranks are here: the step counts, and the next one begins. StepCancelled if not, and
        where newcomers are in the next one. publish: what the lowest rank does before."""
        cast(Any, self._session.model).ends_now = ends_now

        def attempt() -> None:
            step = self._step
            assert step is not None
            publish()
            with randomness.untouched():
                for _ in step.microbatches():
                    step.backward(cast(Any, self._session.model)())
                step.commit()
                self._close(None)

        if self.course is None:
            attempt()
        else:
            self.course.commit(attempt)
        if ends_now:
            return
        if self._step is None:
            self._step = self._next_step()
        self.check()

    def _close(self, error: BaseException | None) -> bool:
        """The open step ends; after a loss this waits for the next generation. True: the error was
        only that."""
        step, self._step = self._step, None
        return step is None or step.__exit__(type(error) if error else None, error, None)

    def _end(self, value: Any, epochs: Epochs) -> None:
        """The script has returned here; all ranks have when this does."""
        self.check()

        def publish() -> None:
            if self.rank == 0:
                told = self._reporting.told.level
                level = replace(told, weights_sha256=epochs.weights_sha256())
                self._member.link.send(level)
                self.reports.folder.at(MANIFESTS).create()
                self.reports.folder.at(MANIFESTS).write(RETURNED, returned(value))
                self.reports.flush_log()

        self.end_step(publish, ends_now=True)

    # --- how it ends before that ----------------------------------------------------------
    def leave(self) -> None:
        """Unwound: wait for the next generation."""
        began = time.monotonic()
        self.reports.has_moved |= self.has_moved
        self._close(StepCancelled())
        self._tell("unwound", began)

    @property
    def has_moved(self) -> bool:
        """The script has come to a collective or a report."""
        has_reduced = self.course is not None and self.course.operations.num_done > 0
        has_reported = self._reporting.told.num_reports > 0
        return has_reduced or has_reported or bool(self.group and self.group.launched)

    def own_error(self, error: Exception) -> Exception:
        """What the run ends with."""
        error = begun_outside(error)
        return raised(error, has_moved=self.has_moved, has_moved_before=self.reports.has_moved)

    def is_over_with(self, error: Exception) -> bool:
        """Whether the script is to be called again after it has raised this."""
        if gpu.fault_of(error, self.device):
            return False  # the worker is lost, and nothing in this process goes on
        lost = lost_peer_in(error) or (self.group.failure if self.group else None)
        if lost is not None:
            self._member.collective_failed(lost)
            return True
        if self._member.is_cancelled:
            return True
        if self.course is not None and self.course.operations.num_losses:
            # the smaller group may have led to it; it is the script's own if it comes again
            with suppress(StepCancelled):
                self.deny(AFTER_A_LOSS.of(in_words(error)))
            return True
        return self._is_forgiven(error)

    def _is_forgiven(self, error: Exception) -> bool:
        """An exception of the script's own, as Ray Train counts them."""
        rank, most = self.place.rank, self.loop.max_failures
        num = self.reports.add_failure(self.run_id, self.generation, rank, in_words(error))
        if 0 <= most < num:
            return False
        of = "" if most < 0 else f" of {most}"
        why = f"rank {rank} of the script raised {in_words(error)}; failure {num}{of}"
        log.error("%s", why, exc_info=begun_outside(error))
        self._member.collective_failed(GivenUp(why))
        return True

    def _end_process(self, status: int, why: str) -> NoReturn:
        """The run goes on without it, and a new one takes its place."""
        self._member.link.send(LastWords(why))
        leave(status, why)

    def _lost(self, error: PeerLost) -> StepCancelled:
        """What unwinds the script instead."""
        self._member.collective_failed(error)
        return StepCancelled()

    def _tell(self, what: str, began: float) -> None:
        member, seconds = self._member, time.monotonic() - began
        line = "generation=%d step=%d call=%d %s seconds=%.3f"
        log.info(line, member.generation, member.step, self._num_calls, what, seconds)
