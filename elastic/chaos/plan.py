"""From a scenario to single faults with their times, and whom they hit: pure, fixed by the seed.

Waiting for the times and sending signals is inject.py's.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from elastic.chaos.scenario import After, AtStep, Every, Fault, InPhase, Rate, Scenario, Trace, Whom
from elastic.protocol.errors import WrongInput

MAX_STRIKES = 10_000
"""Of a scenario."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault that happens once."""

    fault: int
    """Position in the scenario, from 1."""
    number: int
    """Position among the strikes of this fault, from 1."""
    spec: Fault
    trigger: After | AtStep | InPhase
    num_victims: int = 1
    room: int = 0
    """Of capacity: for how many workers there is room from then on."""

    def __str__(self) -> str:
        match self.trigger:
            case After(seconds=seconds):
                when = f"after {seconds:.2f} s"
            case AtStep(step=step):
                when = f"after {step} steps" if self.spec.after_fault else f"at step {step}"
            case InPhase(phase=phase):
                when = f"when {phase}"
        since = f" of fault {self.spec.after_fault}" if self.spec.after_fault else ""
        long = f" for {self.spec.for_s:g} s" if self.spec.for_s else ""
        whom = str(self.spec.whom) if self.num_victims == 1 else f"{self.num_victims} random ranks"
        return (
            f"{self.fault}.{self.number} {self.spec.what} {whom}{self.degree}{long}, {when}{since}"
        )

    @property
    def degree(self) -> str:
        """How strong it is; empty where there is nothing to choose."""
        match self.spec.what:
            case "slow":
                return f" {self.spec.slower:g} times"
            case "lossy":
                return f" by {100 * self.spec.loss:g} %"
            case "capacity":
                return f": {room_text(self.room)}"
            case _:
                return ""


def room_text(room: int) -> str:
    return f"room for {room} worker{'' if room == 1 else 's'}"


def make_plan(scenario: Scenario, num_workers: int) -> tuple[Strike, ...]:
    """Every strike, fault by fault. A trace's losses are parts of `num_workers`, at least one.
    WrongInput if there are too many."""
    plan = tuple(islice(strikes_of(scenario, num_workers), MAX_STRIKES + 1))
    if len(plan) > MAX_STRIKES:
        raise WrongInput(
            f"the scenario has more than {MAX_STRIKES} strikes, the last in fault "
            f"{plan[-1].fault}: lower times, or per_minute or for_s"
        )
    return plan


def strikes_of(scenario: Scenario, num_workers: int) -> Iterator[Strike]:
    for fault, spec in enumerate(scenario.faults, start=1):
        if spec.what == "capacity" and isinstance(spec.when, Trace):
            for number, (trigger, room) in enumerate(rooms(spec.when, num_workers), start=1):
                yield Strike(fault, number, spec, trigger, room=room)
            continue
        dice = random.Random(f"{scenario.seed}:{fault}")
        for number, (trigger, hit) in enumerate(triggers(spec, dice, num_workers), start=1):
            yield Strike(fault, number, spec, trigger, hit)


def rooms(trace: Trace, num_workers: int) -> Iterator[tuple[After, int]]:
    """When there is room for how many of the run's workers: parts of the most it may have."""
    before = -1
    for level in trace.levels:
        room = round(level.part * num_workers)
        if room != before:
            yield After(level.at_s / trace.faster), room
        before = room


def triggers(
    spec: Fault, dice: random.Random, num_workers: int
) -> Iterator[tuple[After | AtStep | InPhase, int]]:
    match spec.when:
        case Every(seconds=seconds, times=times):
            yield from ((After(seconds * i), 1) for i in range(1, times + 1))
        case Rate(per_minute=per_minute, for_s=for_s):
            at_s = dice.expovariate(per_minute / 60)
            while at_s < for_s:
                yield After(at_s), 1
                at_s += dice.expovariate(per_minute / 60)
        case Trace(faster=faster, drops=drops):
            for drop in drops:
                yield After(drop.at_s / faster), max(1, round(drop.part * num_workers))
        case trigger:
            yield trigger, 1


def choose(
    whom: Whom, num_victims: int, workers: Sequence[dict[str, Any]], dice: random.Random
) -> list[dict[str, Any]]:
    """The rows of status.json's `workers` that are hit; empty if there is none such."""
    rows = sorted((row for row in workers if row["pid"]), key=lambda row: row["rank"])
    if whom.rank >= 0:
        rows = [row for row in rows if row["rank"] == whom.rank]
    hit = choose_some(rows, num_victims, dice)
    if whom.kind == "node_of":
        nodes = {row["node_id"] for row in hit}
        hit = [row for row in workers if row["node_id"] in nodes and row["pid"]]
    return sorted(hit, key=lambda row: row["rank"])


def choose_some(
    rows: Sequence[dict[str, Any]], count: int, dice: random.Random
) -> list[dict[str, Any]]:
    """So many of them at random, all if there are not so many."""
    return dice.sample(list(rows), min(count, len(rows)))
