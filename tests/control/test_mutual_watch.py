"""Controller and rendezvous each notice that the other one is frozen."""

import asyncio
import os
import queue
import subprocess
from typing import Any, cast

import pytest

from elastic.on_ray import stores
from elastic.on_ray.detection import sentinel
from elastic.on_ray.detection.sentinel import Sentinel
from elastic.on_ray.stores import Stores
from tests.control import virtual_time


@pytest.fixture
def sleeper(monkeypatch):
    monkeypatch.setattr(sentinel, "LOOK_S", 0.02)
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


class Clock:
    """Its time passes while the sentinel sleeps; the process speaks for two seconds of it."""

    def __init__(self) -> None:
        self.now, self.made = 100.0, queue.SimpleQueue[Sentinel]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now < 102.0:
            watch = self.made.get(timeout=60)
            watch.hear()
            self.made.put(watch)


def test_who_is_silent_is_killed_and_who_speaks_is_not(sleeper, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sentinel, "time", clock)
    clock.made.put(Sentinel(sleeper.pid, patience_s=1.0))
    assert sleeper.wait(60) == -9
    assert 102.9 < clock.now < 103.1


def test_another_process_of_the_same_number_is_spared(sleeper, monkeypatch):
    births = iter([1])
    monkeypatch.setattr(sentinel, "started_at", lambda pid: next(births, 2))
    Sentinel(sleeper.pid, patience_s=0.0)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.3)


class Rendezvous:
    """Answers until it is frozen; a new one is there once it is killed."""

    def __init__(self) -> None:
        self.is_frozen, self.pings = False, []
        self.ping = self.open = self

    async def remote(self, pid: int, patience_s: float = 0.0) -> int:
        self.pings.append((pid, patience_s))
        while self.is_frozen:
            await asyncio.sleep(0.01)
        return 77


def stores_of(rendezvous: Rendezvous, start_s: float = 60.0) -> Stores:
    async def begin() -> Any:
        raise AssertionError("it is not dead for good")

    return Stores(cast(Any, rendezvous), start_s, begin)


def test_a_rendezvous_that_stops_answering_is_killed_once(monkeypatch):
    rendezvous, killed = Rendezvous(), []

    def end_process(pid: int) -> None:
        killed.append(pid)
        rendezvous.is_frozen = False

    async def watch() -> None:
        task = asyncio.create_task(stores_of(rendezvous).watch(0.3, 5.0))
        while len(rendezvous.pings) < 3:
            await asyncio.sleep(0.01)
        rendezvous.is_frozen, seen = True, len(rendezvous.pings)
        while len(rendezvous.pings) < seen + 4:
            await asyncio.sleep(0.01)
        task.cancel()

    monkeypatch.setattr(stores, "PING_S", 0.01)
    monkeypatch.setattr(stores, "end_process", end_process)
    monkeypatch.setattr(stores, "time", virtual_time.CLOCK)
    virtual_time.run(watch())
    assert killed == [77]
    assert set(rendezvous.pings) == {(os.getpid(), 5.0)}


def test_a_rendezvous_that_still_starts_is_waited_for(monkeypatch):
    rendezvous = Rendezvous()
    rendezvous.is_frozen = True
    monkeypatch.setattr(stores, "end_process", lambda pid: pytest.fail("it has never answered"))

    async def watch() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stores_of(rendezvous).watch(0.05, 5.0), 0.5)

    virtual_time.run(watch())


def test_a_rendezvous_gets_as_long_to_start_as_the_run_s_waits_say():
    rendezvous = Rendezvous()
    rendezvous.is_frozen = True
    with pytest.raises(TimeoutError, match=r"no store within 0\.05 s; its node may be out of CPU"):
        asyncio.run(asyncio.wait_for(stores_of(rendezvous, 0.05).address(1), 30))
