"""Two staged ranks on one GPU: a kernel that does not end, and a rank that is three times slower on
the device only. Who is it, and how long does it take to say so?"""

import argparse
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

from tests.gpu.experiment import Table, main, median
from tests.gpu.groups import HAS_GPU, Member, on_gpus, spin, synchronize
from workers.health.device_time import device_time_of
from workers.health.vitals import Vitals
from workers.reduction.reducers import Reduced
from workers.session import Step

DETECT_S, STEPS, KERNEL_S = 3.0, 10, 0.05


class Passes:
    """A step of passes that exchange something, ended by a sum."""

    def __init__(self, member: Member, group: Any, seconds: float) -> None:
        self._group, self._device, self._seconds = group, member.device, seconds
        self._value = torch.ones(1 << 10, device=member.device)
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if HAS_GPU else []

    def run(self) -> None:
        for event in self.events[:1]:
            event.record()
        compute(self._device, self._seconds)
        for event in self.events[1:]:
            event.record()
        gathered = torch.empty(self._group.size() << 10, device=self._device)
        self._group.all_gather_flat(gathered, self._value).wait()

    def finish(self) -> Reduced:
        self._group.all_reduce(self._value).wait()
        return Reduced({"p": self._value}, {})


def compute(device: torch.device, seconds: float) -> None:
    if HAS_GPU:
        spin(device, seconds)
    else:
        time.sleep(seconds)


def one_step(member: Member, group: Any, vitals: Vitals, seconds: float) -> float:
    """Seconds that the device has computed, by its own events; on a CPU what was asked for."""
    inner = SimpleNamespace(device=member.device, group=group, load=1.0)
    step: Any = SimpleNamespace(_member=inner, _vitals=vitals)
    step._end_passes = lambda: Step._end_passes(step)
    vitals.enter("compute")
    vitals.begin_step(device_time_of(member.device))
    passes = Passes(member, group, seconds)
    passes.run()
    Step._finish(step, passes)
    synchronize(member.device)
    first, last = passes.events or (None, None)
    return first.elapsed_time(last) / 1000 if first is not None else seconds


def slow(member: Member) -> tuple[float, float]:
    """Own seconds by the vitals, and by the device."""
    group, vitals = joined(member)
    seconds = KERNEL_S * (3 if member.index == 1 else 1)
    return_s = [one_step(member, group, vitals, seconds) for _ in range(STEPS)]
    return vitals.own.seconds, median(return_s)


def joined(member: Member) -> tuple[Any, Vitals]:
    group, vitals = member.form(1, [0, 1]), Vitals()
    group.on_wait, group.waiting_for = vitals.waits_in, vitals.waiting_for
    return group, vitals


def stuck(member: Member) -> tuple[list[str], float]:
    """The phase every half second, and from when on it has been the last one."""
    group, vitals = joined(member)
    one_step(member, group, vitals, 0.0)
    seen, over = list[tuple[float, str]](), threading.Event()
    began = time.monotonic()

    def look() -> None:
        while not over.wait(0.1):
            seen.append((time.monotonic() - began, vitals.phase))

    looking = threading.Thread(target=look)
    looking.start()
    one_step(member, group, vitals, 2.5 * DETECT_S if member.index == 1 else 0.0)
    over.set()
    looking.join()
    during = [(at, phase) for at, phase in seen if at < 2 * DETECT_S]
    last = during[-1][1]
    since = next(at for i, (at, _) in enumerate(during) if {p for _, p in during[i:]} == {last})
    return last, since


def body(table: Table, arguments: argparse.Namespace) -> None:
    (innocent, since), (culprit, of_culprit) = on_gpus(2, stuck, is_shared=True)
    table.holds("a kernel that does not end: its rank computes", culprit == "compute", culprit)
    table.holds("the other one waits for it", innocent in ("gather", "reduce"), innocent)
    table.at_most("both are so after", max(since, of_culprit), DETECT_S, "s")
    found = on_gpus(2, slow, is_shared=True)
    for rank, (own_s, device_s) in enumerate(found):
        table.at_most(f"rank {rank}: own seconds differ from the device's by",
                      abs(own_s - device_s) / device_s, 0.1)  # fmt: skip
    table.tell("own seconds", median([own_s for own_s, _ in found]))


if __name__ == "__main__":
    sys.exit(main(body))
