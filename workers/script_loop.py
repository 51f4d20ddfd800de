"""`ScriptLoop`: calls a user's training script, and calls it again after a loss (restart in place).

One call of the script runs inside an open step of the engine; each published report commits the
step and opens the next. So a lost peer cancels what is open, the members regroup as they always do,
and the script begins again in the same process, from its newest report. What ray.train's functions
make of it is elastic/on_ray/train_api.py's.
"""

import json
import logging
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from elastic.protocol.errors import PeerLost, StepCancelled, in_words
from elastic.protocol.messages.to_controller import LastWords, ScriptLevel
from workers.distributed.exchange import gather_json
from workers.membership.link import leave
from workers.membership.unwinding import lost_peer_in
from workers.scripts import randomness
from workers.scripts.afresh import give_back_memory, no_start_method
from workers.scripts.default_group import DefaultGroup, as_default
from workers.scripts.ranks import Place, environment_set
from workers.scripts.reports import MANIFESTS, PREFIX, File, Reports, Retention, paths_in
from workers.scripts.roll_call import RollCall
from workers.scripts.unwinding import Unwinding, raised
from workers.session import Session, Step

log = logging.getLogger(__name__)

NOT_HIGHER = "commit in place (level 1) is not built yet"
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

    def __call__(self, session: Session) -> None:
        num_calls = 0
        reports = Reports(self.place, self.retention, self.ray_version)
        while session.step >= 0 and not session.model.has_ended:
            self._call(session, reports, num_calls)
            num_calls += 1
            give_back_memory()  # this call's models and loaders are gone before the next

    def _call(self, session: Session, reports: Reports, num_calls: int) -> None:
        """Once, to its end or until it is unwound. Raises what the script raises too often."""
        call = Call(self, session, reports, num_calls)
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


class Call:
    """One call of the script in one generation, and what it reports."""

    def __init__(
        self, loop: ScriptLoop, session: Session, reports: Reports, num_calls: int
    ) -> None:
        self.loop, self._session, self._num_calls = loop, session, num_calls
        self._member = session._member
        self._step: Step | None = self._next_step()
        self.generation = self._member.generation
        self.reports = reports
        self._newest: str | None = None
        """Checkpoint that counts, by its name; all ranks say the same."""
        self.num_reports = 0
        self.group: DefaultGroup | None = None
        member = self._member
        self._roll_call = RollCall(member.link.send, lambda: (member.generation, member.rank))
        self._unwinding = Unwinding(self._end_process)

    def run(self) -> None:
        began = time.monotonic()
        inner = self._member.group
        assert inner is not None
        spec = self._session._spec
        is_lowest = inner.rank() == 0
        if is_lowest:
            self.reports.sweep()
        newest = self.reports.newest() if is_lowest else None
        try:
            said = gather_json(inner, [spec.node or spec.host, spec.host, newest])
        except PeerLost as error:
            raise self._lost(error) from error
        _, master, self._newest = said[0]
        self.place = Place.of(inner.rank(), [node for node, _, _ in said], master)
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
            stack.enter_context(self.loop.installed(self))
            self._tell("called", began)
            self.say_level(0, NOT_HIGHER)
            value = self.loop.function()
        self._end(value)

    # --- what the script's calls come to ------------------------------------------------------
    @property
    def device(self) -> torch.device:
        return self._session.device

    def check(self) -> None:
        """StepCancelled if the generation is over: it unwinds the script. Each call into us."""
        if self._member.is_cancelled or self._member.generation != self.generation:
            self._unwinding.tell()
            raise StepCancelled
        self._member.vitals.enter("user")

    def say_level(self, level: int, reason: str) -> None:
        """At which level this call runs, and why at no higher one; all ranks may say it."""
        if self.place.rank == 0:
            self._member.link.send(ScriptLevel(self.generation, level, reason))

    def report(self, metrics: dict[str, Any], source: Path | None, name: str | None) -> str | None:
        """All ranks call it alike. Returns once the checkpoint is published, by its name; None: no
        rank has brought one.

        source: the folder of this rank's files. name: the checkpoint's, if the script chooses it.
        """
        self.check()
        self.num_reports += 1
        try:
            with self._roll_call.waiting("report()"):
                return self._report(metrics, source, name)
        except PeerLost as error:
            raise self._lost(error) from error

    def barrier(self) -> None:
        self.check()
        try:
            with self._roll_call.waiting("barrier()"):
                self._count(0)
        except PeerLost as error:
            raise self._lost(error) from error

    def broadcast(self, value: Any) -> Any:
        """The lowest rank's, on all of them."""
        self.check()
        pickled = pickle.dumps(value).hex() if self.place.rank == 0 else ""
        try:
            with self._roll_call.waiting("broadcast_from_rank_zero()"):
                return pickle.loads(bytes.fromhex(gather_json(self._control, pickled)[0]))
        except PeerLost as error:
            raise self._lost(error) from error

    def newest_checkpoint(self) -> str | None:
        """The name of the newest one that is what was reported; the same on all ranks."""
        self.check()
        return self._newest

    @property
    def _control(self) -> Any:
        assert self.group is not None
        return self.group.inner

    def _count(self, mine: int) -> int:
        """The sum over the ranks. A collective."""
        total = torch.tensor([mine], dtype=torch.int64)
        self._control.control.all_reduce(total).wait()
        return int(total.numpy()[0])

    def _report(self, metrics: dict[str, Any], source: Path | None, name: str | None) -> str | None:
        rank, reports = self.place.rank, self.reports
        metrics = plain(metrics)
        if self._count(source is not None) == 0:
            if rank == 0:
                self._log(metrics, None)
            return None
        if rank == 0:
            name = name or new_name()
            reports.clear(name)
        paths = paths_in(source) if source is not None else []
        named = gather_json(self._control, [name, paths])
        name = named[0][0]
        assert name is not None
        before = {path for _, of_rank in named[:rank] for path in of_rank}
        files = []
        if source is not None:  # what several ranks have, the lowest one brings
            files = reports.store(source, name, [p for p in paths if p not in before])
        gathered = gather_json(self._control, [asdict(file) for file in files])
        if rank == 0:
            reports.publish(name, [File(**f) for of_rank in gathered for f in of_rank], metrics)
            self._log(metrics, name)
            reports.flush_log()
        self._newest = name
        self._commit(ends_now=False)
        return name

    def _log(self, metrics: dict[str, Any], name: str | None) -> None:
        self.reports.log(
            {
                "report": self.num_reports,
                "generation": self.generation,
                "world_size": self.place.world_size,
                "metrics": metrics,
                "checkpoint": name,
            }
        )

    # --- steps ----------------------------------------------------------------------------
    def _next_step(self) -> Step:
        with randomness.untouched():
            step = self._session.next_step()
        step.__enter__()
        self._member.vitals.enter("user")
        return step

    def _commit(self, *, ends_now: bool) -> None:
        """All ranks are here: the step counts, and the next one begins. StepCancelled if not, and
        where the next one is another generation's."""
        step, model = self._step, cast(Any, self._session.model)
        assert step is not None
        model.ends_now = ends_now
        with randomness.untouched():
            for _ in step.microbatches():
                step.backward(model())
            step.commit()
            self._close(None)
        if ends_now:
            return
        step = self._next_step()
        self._step = step
        self.check()

    def _close(self, error: BaseException | None) -> bool:
        """The open step ends; after a loss this waits for the next generation. True: the error was
        only that."""
        step, self._step = self._step, None
        return step is None or step.__exit__(type(error) if error else None, error, None)

    def _end(self, value: Any) -> None:
        """The script has returned here; all ranks have when this does."""
        self.check()
        if self.place.rank == 0:
            self.reports.folder.at(MANIFESTS).create()
            self.reports.folder.at(MANIFESTS).write(RETURNED, returned(value))
            self.reports.flush_log()
        self._commit(ends_now=True)

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
        return self.num_reports > 0 or bool(self.group and self.group.launched)

    def own_error(self, error: Exception) -> Exception:
        """What the run ends with."""
        return raised(error, has_moved=self.has_moved, has_moved_before=self.reports.has_moved)

    def is_over_with(self, error: Exception) -> bool:
        """Whether the script is to be called again after it has raised this."""
        lost = lost_peer_in(error) or (self.group.failure if self.group else None)
        if lost is not None:
            self._member.collective_failed(lost)
            return True
        if self._member.is_cancelled:
            return True
        return self._is_forgiven(error)

    def _is_forgiven(self, error: Exception) -> bool:
        """An exception of the script's own, as Ray Train counts them."""
        rank, most = self.place.rank, self.loop.max_failures
        num = self.reports.add_failure(
            self._session._spec.run_id, self.generation, rank, in_words(error)
        )
        if 0 <= most < num:
            return False
        of = "" if most < 0 else f" of {most}"
        why = f"rank {rank} of the script raised {in_words(error)}; failure {num}{of}"
        log.exception("%s", why)
        self._member.collective_failed(PeerLost(why))
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
        log.info(
            "generation=%d step=%d call=%d %s seconds=%.3f",
            self._member.generation,
            self._member.step,
            self._num_calls,
            what,
            time.monotonic() - began,
        )


def new_name() -> str:
    """Of a checkpoint, as Ray Train makes it."""
    return f"{PREFIX}{time.strftime('%Y-%m-%d_%H-%M-%S')}.{time.time_ns() % 10**9:09}"


def returned(value: Any) -> bytes:
    """JSON, which is read without running code; what is none is told, and null."""
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        what = f"{type(value).__name__} ({in_words(error)})"
        print(f"elastic: the function returned no JSON but {what}: return_value is None")
        return b"null"


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: numbers of numpy and torch become Python's, what is none becomes text."""

    def number_in(value: Any) -> Any:
        try:
            return value.item() if hasattr(value, "item") else str(value)
        except (ValueError, RuntimeError):  # of several elements
            return str(value)

    return json.loads(json.dumps(metrics, default=number_in))
