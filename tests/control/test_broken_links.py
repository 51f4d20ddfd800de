"""A worker's connection ends: who is lost by it, and when."""

import asyncio
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from elastic.control.detection.hang import Watch
from elastic.on_ray.detection import broken_links
from elastic.on_ray.detection.broken_links import PATIENCE, wait_for_return
from elastic.protocol.messages.pulse import Heartbeat
from elastic.protocol.timeouts import timeouts_of
from tests.control import virtual_time

DETECT_S = 0.5
REFUSED = "its connection was closed, and nobody listens at its address"
LATE = "its connection ended, and it was not back in 1 s"
LATER = "its connection ended, and it was not back in 5 s"
BEAT = Heartbeat(3, 1, 1, "compute", 0.1, None, False, "S")


class Cluster:
    """The controller's process, as far as a broken link sees it; worker 3 is on another node."""

    detect_s = DETECT_S

    def __init__(
        self,
        address,
        *,
        back_after_s: float | None = None,
        here: int | None = None,
        beats_for_s: float | None = None,
    ):
        """beats_for_s: None: it has no pulse."""
        self.slot = SimpleNamespace(peer_address=address, pid=here or 1, watch=None)
        self._beats_for_s = beats_for_s
        self.workers, self.links, self.happened = {3: self.slot}, self, []
        self._back_after_s, self._here = back_after_s, here

    def is_here(self, slot) -> bool:
        return self._here is not None

    def now(self) -> float:
        return virtual_time.CLOCK.monotonic()

    async def _beat(self) -> None:
        while self._beats_for_s and self.now() < self._began + self._beats_for_s:
            self.slot.watch = Watch(BEAT, self.now())
            await asyncio.sleep(timeouts_of(DETECT_S).heartbeat_s)

    def is_connected(self, worker: int) -> bool:
        return self._back_after_s is not None and self.now() > self._began + self._back_after_s

    def lost(self, *what) -> None:
        self.happened.append(what)

    def waited(self, *, was_reset: bool) -> float:
        """Seconds until it was back or lost."""

        async def work() -> float:
            self._began = self.now()
            beating = asyncio.create_task(self._beat())
            await wait_for_return(self, 3, self.slot, was_reset=was_reset)  # pyright: ignore
            beating.cancel()
            return round(self.now() - self._began, 6)

        return virtual_time.run(work())


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(broken_links, "time", virtual_time.CLOCK)


@pytest.fixture
def living():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


@pytest.fixture
def refusing():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()


@pytest.mark.parametrize("was_reset", [True, False])
def test_who_comes_back_is_not_lost(living, was_reset):
    cluster = Cluster(living, back_after_s=DETECT_S)
    cluster.waited(was_reset=was_reset)
    assert cluster.happened == []


def test_who_closed_it_and_listens_no_more_is_lost_at_once(refusing):
    cluster = Cluster(refusing)
    assert cluster.waited(was_reset=False) < DETECT_S
    assert cluster.happened == [(3, "process_died", REFUSED)]


def test_a_reset_and_a_refusal_may_be_a_firewalls_and_are_no_loss(refusing):
    cluster = Cluster(refusing, back_after_s=DETECT_S)
    cluster.waited(was_reset=True)
    assert cluster.happened == []


@pytest.mark.parametrize("was_reset", [True, False])
def test_who_listens_and_does_not_come_back_is_lost_in_time(living, was_reset):
    cluster = Cluster(living)
    assert cluster.waited(was_reset=was_reset) >= PATIENCE * DETECT_S
    assert cluster.happened == [(3, "connection_lost", LATE)]


@pytest.mark.parametrize("was_reset", [True, False])
def test_whose_process_is_gone_from_this_node_is_lost_at_once(living, was_reset):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    cluster = Cluster(living, here=child.pid)
    assert cluster.waited(was_reset=was_reset) < DETECT_S
    assert cluster.happened == [(3, "process_died", "")]


def test_whose_process_lives_on_this_node_is_given_time_whatever_answers(refusing):
    cluster = Cluster(refusing, back_after_s=DETECT_S, here=os.getpid())
    cluster.waited(was_reset=False)
    assert cluster.happened == []


@pytest.mark.parametrize("was_reset", [True, False])
def test_whose_pulse_beats_is_waited_for(living, was_reset):
    """Something in it holds the GIL, so nobody dials."""
    cluster = Cluster(living, back_after_s=4 * PATIENCE * DETECT_S, here=os.getpid(), beats_for_s=9)
    cluster.waited(was_reset=was_reset)
    assert cluster.happened == []


def test_whose_pulse_beats_is_lost_all_the_same_when_its_lease_is_over(living):
    cluster = Cluster(living, beats_for_s=9)
    assert cluster.waited(was_reset=True) >= timeouts_of(DETECT_S).lease_s
    assert cluster.happened == [(3, "connection_lost", LATER)]


def test_whose_pulse_falls_silent_is_lost_in_time(living):
    cluster = Cluster(living, beats_for_s=2 * DETECT_S)
    assert (
        (PATIENCE + 2) * DETECT_S <= cluster.waited(was_reset=True) < timeouts_of(DETECT_S).lease_s
    )
    assert cluster.happened == [(3, "connection_lost", LATE)]
