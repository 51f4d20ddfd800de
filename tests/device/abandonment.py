"""A generation that is given up at one chosen instant of one rank, and what becomes of its ranks.

Hosts are far ahead: what was launched since a rank's last read has not been sent, so the abort
makes garbage of all of it.
"""

import hashlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.protocol.errors import PeerLost, StepCancelled
from tests.device import device
from tests.device.ranks import Meeting, all_good, run_ranks
from tests.device.training import build, enter, train
from tests.workers import sharded_rig as rig
from workers.distributed.process_group import leave
from workers.parallel.strategy import Strategy
from workers.tensors.local import local

WORLD_SIZE, BEFORE, STEPS = 2, 1, 3
"""Of the steps, so many are done before the one that is disturbed."""
ROOM = str(Path(rig.__file__).parents[2])


@dataclass(frozen=True, slots=True)
class Case:
    parallel: str
    reduction: str
    at: str
    """"read": whenever rank 0's host waits for its device, or reads of the group; "launch": when it
    launches a collective of data or control; "enter": the same while the next generation's group is
    entered."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the case's k-th instant."""

    k: int
    place: str
    """The line of the project's that stood there, as file:function."""
    wrong: str
    """Empty, or what rank 0 did against the promise. Its peer stands for one that is lost: what
    becomes of that one depends on how far it was."""


class Instant:
    """The k-th time that rank 0 comes by; `strike` happens then, once."""

    def __init__(self, k: int, strike: Callable[[], None]) -> None:
        self._left, self._strike, self.place, self.is_armed = k, strike, "", False
        self._lock = threading.Lock()

    def pass_by(self, rank: int) -> None:
        with self._lock:
            if rank != 0 or not self.is_armed:
                return
            self._left -= 1
            is_here = self._left < 0 and not self.place
            if is_here:
                self.place = _place()
        if is_here:
            self._strike()


def _place() -> str:
    """The innermost function of `workers/` in this thread, else of the rig."""
    frame: Any = sys._getframe(1)
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(ROOM) and "/tests/device/" not in code.co_filename
        if is_ours and not code.co_name.startswith("<"):
            names.append(f"{Path(code.co_filename).name}:{code.co_name}")
        frame = frame.f_back
    product = [
        n for n in names if not n.startswith(("process_group.py", "c10d.py", "sharded_rig.py"))
    ]
    return next(iter(product or names), "?")


def rows_of(strategy: Strategy) -> str:
    """A digest of what this rank holds of the weights and the optimizer's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(strategy.train_state.tensors().items()):
        content = local(tensor.detach()).cpu().contiguous()
        digest.update(name.encode())
        digest.update(content.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Reference:
    """An undisturbed run: what each rank held after each step, and the hash in the end."""

    rows: list[list[str]]
    weights: str


def undisturbed(parallel: str, reduction: str) -> Reference:
    def body(rank: int, meeting: Meeting) -> tuple[list[str], str]:
        strategy = build(rank, parallel, reduction, rig.Dense())
        group = meeting.group(rank, WORLD_SIZE)
        enter(strategy, group, 0)
        rows = [rows_of(strategy)]
        how = {"reduction": reduction, "work": rig.Dense()}
        for _ in range(STEPS):
            train(strategy, group, parallel, 1, **how)
            rows.append(rows_of(strategy))
        return rows, rig.sha256(strategy)

    found = all_good(run_ranks(WORLD_SIZE, body))
    return Reference([rows for rows, _ in found], found[0][1])


def sweep(case: Case, every: int = 1, limit: int = 80) -> list[Outcome]:
    """One run for each of the case's instants, or for one in `every`, until there are no more."""
    reference, outcomes = undisturbed(case.parallel, case.reduction), []
    for k in range(0, limit, every):
        outcome = _disturbed(case, k, reference)
        if outcome is None:
            return outcomes
        outcomes.append(outcome)
    raise AssertionError(f"more than {limit} instants")


class Told:
    """A backend whose launches are told of before they are made."""

    def __init__(self, backend: Any, told: Callable[[str], None]) -> None:
        self._backend, self._told = backend, told

    def __getattr__(self, name: str) -> Any:
        launch = getattr(self._backend, name)

        def told_launch(*arguments: Any) -> Any:
            self._told(name)
            return launch(*arguments)

        return told_launch


class Disturbed:
    """One run of a case's, given up at its k-th instant."""

    def __init__(self, case: Case, k: int, reference: Reference) -> None:
        self._case, self._reference = case, reference
        self._groups: dict[int, Any] = {}
        self._left: list[Any] = []
        self.strategies: dict[int, Strategy] = {}
        self._both_there = threading.Barrier(WORLD_SIZE)
        self.instant = Instant(k, self._give_up)
        self._how: dict[str, Any] = {"reduction": case.reduction, "work": rig.Dense()}

    def _give_up(self) -> None:
        for group in self._groups.values():
            group.abandon()

    def leave(self) -> None:
        """The groups, as a member does it: they stay until their operations have come back."""
        for group in self._left + list(self._groups.values()):
            leave(group)

    def body(self, rank: int, meeting: Meeting) -> str:
        """What is wrong with this rank after it."""
        case = self._case
        strategy = build(rank, case.parallel, case.reduction, rig.Dense())
        self.strategies[rank] = strategy
        self._groups[rank] = group = meeting.group(rank, WORLD_SIZE)
        enter(strategy, group, 0)
        train(strategy, group, case.parallel, BEFORE, **self._how)
        torch.sim.synchronize()
        self._both_there.wait(30)
        try:
            self._go_on(rank, meeting)
        except (PeerLost, StepCancelled):
            strategy.reset()
        except Exception as error:
            return f"rank {rank} raised {type(error).__name__}: {str(error)[:80]}"
        finally:
            self.instant.is_armed &= rank != 0
        return _of_rows(rank, strategy, self._reference)

    def _go_on(self, rank: int, meeting: Meeting) -> None:
        case, strategy, group = self._case, self.strategies[rank], self._groups[rank]
        if case.at == "enter":
            self._left.append(group)
            self._groups[rank] = group = meeting.group(rank, WORLD_SIZE, generation=2)
            self._both_there.wait(30)
        if case.at == "read":
            read = group.read
            group.read = lambda result: (self.instant.pass_by(rank), read(result))[1]
        else:
            told = lambda name: self.instant.pass_by(rank)  # noqa: E731
            group.backend.before_launch = told
            group.control.backend = Told(group.control.backend, told)
        if case.at == "enter":
            self.instant.is_armed |= rank == 0
            enter(strategy, group, BEFORE, generation=2)
            return
        self.instant.is_armed |= rank == 0
        train(strategy, group, case.parallel, 1, **self._how)

    def told(self, index: int, reason: str) -> None:
        """Of a host that is about to wait."""
        if self._case.at == "read":
            self.instant.pass_by(index)


def _disturbed(case: Case, k: int, reference: Reference) -> Outcome | None:
    run = Disturbed(case, k, reference)
    with device.before_host_waits(run.told), device.far_ahead():
        results = run_ranks(WORLD_SIZE, run.body)
    run.leave()
    if not run.instant.place:
        all_good(results)
        return None
    wrong = str(results[0] or "")
    steps = {run.strategies[rank].train_state.step for rank in range(WORLD_SIZE)}
    if not any(results) and len(steps) == 1:
        wrong = _goes_on(case, run.strategies, reference)
    return Outcome(k, run.instant.place, wrong)


def _goes_on(case: Case, strategies: dict[int, Strategy], reference: Reference) -> str:
    """What is wrong with the end of a run whose members go on together."""

    def body(rank: int, meeting: Meeting) -> str:
        strategy = strategies[rank]
        group, step = meeting.group(rank, WORLD_SIZE, generation=3), strategy.train_state.step
        enter(strategy, group, step, generation=3)
        how: dict[str, Any] = {"reduction": case.reduction, "work": rig.Dense()}
        train(strategy, group, case.parallel, STEPS - step, **how)
        sha256 = rig.sha256(strategy)
        leave(group)
        return sha256

    found = run_ranks(WORLD_SIZE, body)
    return "" if found == [reference.weights] * WORLD_SIZE else f"the run ends with {found}"


def _of_rows(rank: int, strategy: Strategy, reference: Reference) -> str:
    """What is wrong with the state of a rank that has left its generation."""
    step = strategy.train_state.step
    if rows_of(strategy) == reference.rows[rank][step]:
        return ""
    return f"rank {rank}'s rows are not those after step {step}"
