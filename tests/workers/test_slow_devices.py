"""A device that hangs and one that is slow: the rank whose it is is named, and its own seconds are
the device's."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from mmap import PROT_READ, mmap

import pytest

from elastic.control.detection.hang import PATIENCE, suspects, watch
from elastic.control.detection.straggler import LONG_STEPS, Since, stragglers
from elastic.controller.stragglers import TOLD_FROM
from elastic.protocol.messages.pulse import Heartbeat
from tests.device import device
from tests.workers.session_rig import Rig
from tests.workers.threads_of_sessions import run_sessions
from workers.health.pulse import read_vitals

pytestmark = pytest.mark.usefixtures("on_device")
RANKS, WORSE = 3, 1
KERNEL, IN_FORWARD = "addmm", 2
"""So many of them in a micro-batch."""


class Beats:
    """What the pulses of all ranks say."""

    def __init__(self) -> None:
        self._shown: dict[int, mmap] = {}

    def add(self, rig: Rig) -> None:
        shown = mmap(rig.member.vitals.fd, 4096, prot=PROT_READ)
        self._shown[rig.device.index] = shown

    def look(self) -> list[Heartbeat]:
        return [read_vitals(shown, rank) for rank, shown in sorted(self._shown.items())]


STEPS_BEFORE, HANG_DETECT_S = 12, 1.0
"""After so many steps each phase has a usual time."""


def in_time(said: Sequence[Heartbeat]) -> float:
    """Twice the time of detection; or the patience with phases that take long on a machine which
    is as busy as that."""
    return max(2 * HANG_DETECT_S, *(1.1 * PATIENCE * (beat.p95_s or 0.0) for beat in said))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_kernel_that_never_ends_is_named_within_twice_the_time_of_detection(parallel: str):
    beats, named = Beats(), list[tuple[int, str]]()

    def get_stuck() -> None:
        device.stick(KERNEL, device=WORSE)
        threading.Thread(target=look, daemon=True).start()

    def look() -> None:
        """Once nobody has had anything else to do for that long, however busy the machine is."""
        said = beats.look()
        while (stuck_s := min(beat.phase_s for beat in said)) < (limit_s := in_time(said)):
            time.sleep(0.01)
            said = beats.look()
        then = [replace(beat, phase_s=beat.phase_s + limit_s - stuck_s) for beat in said]
        named.extend(suspects([watch(None, b, 0.0) for b in then], 0.0, HANG_DETECT_S))
        device.release()  # only now: the ranks go on to the test's end

    all_there = threading.Barrier(RANKS, get_stuck)

    def body(rig: Rig) -> bool:
        beats.add(rig)
        for _ in range(STEPS_BEFORE):
            rig.step()
        all_there.wait(60)
        return rig.step().committed

    how = {"reduction": "fast", "parallel": parallel, "steps": STEPS_BEFORE + 1}
    assert run_sessions(RANKS, body, **how) == [True] * RANKS
    ((worker, why),) = named
    assert worker == WORSE
    assert f"in compute of step {STEPS_BEFORE + 1}" in why


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "fsdp-grad-op"])
def test_own_seconds_are_the_devices_own_whoever_it_waits_for(parallel: str):
    beats, slow_s = Beats(), [0.05, 0.15, 0.05]
    all_there = threading.Barrier(RANKS)

    def body(rig: Rig) -> float:
        beats.add(rig)
        rig.step()
        device.slow(KERNEL, slow_s[rig.device.index], rig.device.index, count=1_000_000)
        all_there.wait(60)
        for _ in range(3):
            rig.step()
        return beats_of(beats.look(), rig.device.index).own.seconds

    found = run_sessions(RANKS, body, reduction="fast", parallel=parallel, steps=4)
    assert all(IN_FORWARD * s <= own_s for s, own_s in zip(slow_s, found, strict=True)), found
    assert max(found[0], found[2]) < IN_FORWARD * 0.1, found


DETECT_S = 3.0
"""The default."""
SLOW_S, TIMES_SLOWER = 0.04, 3
"""Of a kernel."""
STEPS_SLOW = LONG_STEPS + 2


@pytest.mark.slow  # its times are of a machine that does little else
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_slower_device_is_named_and_own_seconds_are_those_of_the_devices(parallel: str):
    beats, named_after = Beats(), list[tuple[int, tuple[int, ...]]]()
    is_over, all_there = threading.Event(), threading.Barrier(RANKS)

    def look() -> None:
        since: Since = {}
        while not is_over.wait(0.05):
            said = beats.look()
            since, found = stragglers(since, said, TOLD_FROM)
            if found and not named_after:
                workers = tuple(pace.worker for pace, _ in found)
                named_after.append((beats_of(said, WORSE).own.steps - 1, workers))

    def body(rig: Rig) -> tuple[float, float]:
        """Own seconds of a micro-batch, and the device's."""
        beats.add(rig)
        rank = rig.device.index
        slow_s = SLOW_S * (TIMES_SLOWER if rank == WORSE else 1)
        rig.step()
        device.slow(KERNEL, slow_s, rank, count=1_000_000)
        if all_there.wait(60) == 0:
            threading.Thread(target=look, daemon=True).start()
        device.reset_counters(rank)
        for _ in range(STEPS_SLOW):
            rig.step()
        num_microbatches = STEPS_SLOW * len(rig.member.ids)
        busy_s = device.counters(rank).busy_s / num_microbatches
        return beats_of(beats.look(), rank).own.seconds, IN_FORWARD * slow_s + busy_s

    how = {"reduction": "fast", "parallel": parallel, "steps": STEPS_SLOW + 1}
    found = run_sessions(RANKS, body, **how)
    is_over.set()
    for rank, (own_s, devices_s) in enumerate(found):
        assert 0.9 * devices_s < own_s < 1.1 * devices_s, (rank, found)
    ((num_steps, workers),) = named_after
    assert workers == (WORSE,)
    of_device_s = found[WORSE][1]  # whatever else this machine does
    assert num_steps * of_device_s < 2 * DETECT_S


def beats_of(beats: Sequence[Heartbeat], rank: int) -> Heartbeat:
    return next(beat for beat in beats if beat.worker == rank)
