# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What a run waits for that has fewer places for its workers than it needs, in a line.

Who waits is Ray: every wanted worker is a pending actor. What a run makes of the machines that
there are, before it begins, is machines.py's.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import ray

from elastic.on_ray.placement.autoscaling import Demand, infeasible, is_open, report, unfillable
from elastic.on_ray.placement.machines import machines
from elastic.on_ray.slots import Slot
from elastic.protocol.membership import counted
from elastic.protocol.placing import ACCELERATOR, Machine, Need
from elastic.store.files import first_line

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
ASKED_S = 1.0
"""A worker that waits no longer is no reason to ask Ray."""
PLACED_S = 5.0
"""How long Ray may take to find a place where a machine could have one..."""
STAGES = ("started", "loading TARGET and its model", "importing torch", "without a process yet")
STARTED_S = 60.0
"""...and, where there is one, to make a process there: its packages may have to come first."""


@dataclass(frozen=True)
class Offer:
    """What the cluster has now."""

    machines: tuple[Machine, ...]
    free: dict[str, float]
    report: bytes | None = None
    """See elastic/on_ray/placement/autoscaling.py."""
    infeasible: tuple[Demand, ...] = ()
    """Those for which its autoscaler adds no node."""

    def has_none(self, need: Need) -> bool:
        """Whether no worker can have a place, however little is in use."""
        return not any(need.fits(m) for m in self.machines)

    def lacks(self, need: Need) -> bool:
        """Whether not even one more worker can have a place."""
        has_room = all(self.free.get(kind, 0) >= amount for kind, amount in need.amounts.items())
        return self.has_none(need) or not has_room

    def adds_none(self, need: Need) -> bool:
        """Whether the autoscaler says that no node type of its own takes such a worker."""
        return any(demand.is_of(need) for demand in self.infeasible)


def offer_now() -> Offer:
    free = cast("dict[str, Any]", ray.available_resources())
    return Offer(tuple(machines()), free, report(), infeasible())


def waits_for(num_missing: int, need: Need, offer: Offer) -> str:
    """The line."""
    workers = "1 worker" if num_missing == 1 else f"{num_missing} workers"
    line = f"waiting for a place for {workers} of {need}; {inventory(offer, need)}"
    why = unfillable(need, offer.machines, offer.report)  # a node may have left since the start
    if why:
        return f"{line}; {why}: start a larger one"
    if offer.adds_none(need):
        return f"{line}; Ray's autoscaler has no kind of node for that and adds none: start one"
    if offer.has_none(need) and is_open(offer.machines, offer.report):
        return f"{line}; whether Ray's autoscaler (version 1) has a kind for it, it does not tell"
    return line


def inventory(offer: Offer, need: Need) -> str:
    """What the cluster has of that."""
    counts = [
        f"{sum(m.resources.get(kind, 0) for m in offer.machines):g} {kind}s "
        f"({offer.free.get(kind, 0):g} free)"
        for kind in need.amounts
        if not kind.startswith(ACCELERATOR)
    ]
    told = [f"the cluster has {counted(len(offer.machines), 'node')} with {' and '.join(counts)}"]
    if need.accelerator_type:
        kinds = {k for m in offer.machines for k in m.resources if k.startswith(ACCELERATOR)}
        names = [kind.removeprefix(ACCELERATOR) for kind in kinds]
        told.append(f"accelerator types: {', '.join(sorted(names)) or 'none'}")
    if need.labels:
        there = [m for m in offer.machines if need.is_on(m)]
        asked = sorted({key for choice in need.labels for key in choice})
        known = {f"{k}={m.labels[k]}" for m in offer.machines for k in asked if k in m.labels}
        labels = ", ".join(sorted(known)) or "none"
        told.append(f"{len(there)} of them with these labels (there are: {labels})")
    return ", ".join(told)


def start_line(
    workers: Mapping[int, Slot], min_workers: int, is_connected: Callable[[int], bool]
) -> str:
    """How far the workers are that a run needs to begin; empty once enough have started.

    is_connected: whether a worker's process has a link, which it makes once torch is there.
    """
    stages = Counter[str]()
    for worker, slot in workers.items():
        if slot.state != "pending":
            stages["started"] += 1
        elif not slot.is_placed:
            stages["without a process yet"] += 1
        else:
            what = "loading TARGET and its model" if is_connected(worker) else "importing torch"
            stages[what] += 1
    if stages["started"] >= min_workers:
        return ""
    counts = ", ".join(f"{stages[stage]} {stage}" for stage in STAGES if stages[stage])
    needed = "1 worker" if min_workers == 1 else f"{min_workers} workers"
    return f"waiting for {needed} to start: {counts or 'none is asked for yet'}"


def num_placed(slots: Iterable[Slot]) -> int:
    return sum(slot.is_placed or slot.state != "pending" for slot in slots)


def is_told(waited_s: float, need: Need, offer: Offer) -> bool:
    """Whether workers that have waited so long lack a place, or a process there."""
    if offer.has_none(need):
        return True
    return waited_s >= (PLACED_S if offer.lacks(need) else STARTED_S)


async def watch_waiting(
    workers: dict[int, Slot],
    wanted: Callable[[], tuple[int, int]],
    need: Need,
    tell: Callable[[str], None],
    ask: Callable[[], Offer] = offer_now,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """wanted: at least and at most so many workers. tell: told the line whenever it changes; empty
    while enough workers have a place."""
    loop = asyncio.get_running_loop()
    told, since = "", math.inf
    while True:
        num_missing = wanted()[0] - num_placed(workers.values())
        since = min(since, time.monotonic()) if num_missing > 0 else math.inf
        waited_s, line = time.monotonic() - since, ""
        if waited_s >= ASKED_S:
            try:
                offer = await loop.run_in_executor(None, ask)
            except Exception as error:  # the head is away, or tells half: no reason to end a run
                log.warning('wait reason="%s: %s"', type(error).__name__, first_line(error))
                line = told
            else:
                if is_told(waited_s, need, offer):
                    line = waits_for(num_missing, need, offer)
        if line != told:
            told = line
            tell(line)
        await pause(LOOK_EVERY_S)
