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

    def __str__(self) -> str:
        match self.trigger:
            case After(seconds=seconds):
                when = f"after {seconds:.2f} s"
            case AtStep(step=step):
                when = f"after {step} steps" if self.spec.after_fault else f"at step {step}"
            case InPhase(phase=phase):
                when = f"when {phase}"
        since = f" of fault {self.spec.after_fault}" if self.spec.after_fault else ""
        long = f" {self.spec.slower:g} times" if self.spec.what == "slow" else ""
        long += f" for {self.spec.for_s:g} s" if self.spec.for_s else ""
        whom = str(self.spec.whom) if self.num_victims == 1 else f"{self.num_victims} random ranks"
        return f"{self.fault}.{self.number} {self.spec.what} {whom}{long}, {when}{since}"


def make_plan(scenario: Scenario, num_workers: int) -> tuple[Strike, ...]:
    """Every strike, fault by fault. A trace's losses are parts of `num_workers`, at least one.
    WrongInput if there are too many."""
    strikes = (
        Strike(fault, number, spec, trigger, num_victims)
        for fault, spec in enumerate(scenario.faults, start=1)
        for number, (trigger, num_victims) in enumerate(
            triggers(spec, random.Random(f"{scenario.seed}:{fault}"), num_workers), start=1
        )
    )
    plan = tuple(islice(strikes, MAX_STRIKES + 1))
    if len(plan) > MAX_STRIKES:
        raise WrongInput(
            f"the scenario has more than {MAX_STRIKES} strikes, the last in fault "
            f"{plan[-1].fault}: lower times, or per_minute or for_s"
        )
    return plan


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
    hit = dice.sample(rows, min(num_victims, len(rows)))
    if whom.kind == "node_of":
        nodes = {row["node_id"] for row in hit}
        hit = [row for row in workers if row["node_id"] in nodes and row["pid"]]
    return sorted(hit, key=lambda row: row["rank"])
