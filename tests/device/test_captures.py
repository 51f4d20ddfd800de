"""Threads that copy a state may do so while the user's captures a CUDA graph: each has told CUDA
that it takes no part, before it asks the device for anything."""

import threading

import pytest
import torch

from tests.device.training import build
from tests.workers import sharded_rig as rig
from workers.distributed import captures
from workers.distributed.device_wait import mark, wait_for
from workers.train_state.snapshot import Arena

THREAD_LOCAL, GLOBAL = 1, 0
"""CUDA's numbers."""


class Driver:
    """CUDA's, which gives the former mode for the new one."""

    def __init__(self):
        self.told = []

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.told.append((threading.current_thread().name, mode._obj.value))
        mode._obj.value = GLOBAL
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(captures, "driver", lambda: found)
    return found


@pytest.fixture
def snapshot():
    return build(0, "ddp", "bitwise", rig.Dense()).train_state.snapshot()


def in_thread(name, body):
    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join(60)


def test_who_takes_a_snapshot_takes_no_part_in_captures_and_says_so_once(driver, snapshot):
    in_thread("saver", snapshot.taken)
    assert driver.told == [("saver", THREAD_LOCAL)]


def test_who_waits_for_what_another_thread_has_sent_off_takes_no_part(driver, snapshot):
    in_thread("main", snapshot.settle)
    in_thread("backup", snapshot.taken)
    assert driver.told == [("main", THREAD_LOCAL), ("backup", THREAD_LOCAL)]


def test_who_makes_room_that_a_device_writes_to_takes_no_part(driver, snapshot):
    in_thread("touch", lambda: Arena(is_pinned=True).reserve(snapshot.shapes.values()))
    in_thread("host", lambda: Arena().reserve(snapshot.shapes.values()))
    assert driver.told == [("touch", THREAD_LOCAL)]


def test_who_looks_at_an_event_takes_no_part(driver):
    torch.ones(3, device="sim:0").add_(1)
    in_thread("main", lambda: wait_for(mark(torch.device("sim", 0))))
    assert driver.told == [("main", THREAD_LOCAL)]


def test_where_there_is_no_cuda_nothing_is_told(monkeypatch, snapshot):
    monkeypatch.setattr(captures, "LIBRARY", "libcuda-that-is-not-there.so.1")
    captures.driver.cache_clear()
    taken = []
    in_thread("saver", lambda: taken.append(snapshot.taken()))
    captures.driver.cache_clear()
    assert len(taken) == 1
