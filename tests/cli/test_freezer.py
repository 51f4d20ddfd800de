"""What is stopped and woken when, on a clock of the test's own."""

import signal
from math import inf

import pytest

from elastic.chaos.freezer import Freezer


class Process:
    """Its row, and how long it ran."""

    def __init__(self):
        self.row, self.is_running, self.ran_s, self.is_gone = (
            {"pid": 7, "id": "w0"},
            True,
            0.0,
            False,
        )
        self.told = []
        self.freezer = Freezer(self._hear, self.told.append)
        self.now = 0.0

    def _hear(self, row, number):
        assert row is self.row
        if self.is_gone:
            raise ProcessLookupError("process 7 is gone")
        self.is_running = number == signal.SIGCONT

    def live(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.freezer.look(self.now)
            self.now += 0.005
            self.ran_s += 0.005 * self.is_running


@pytest.fixture
def process():
    return Process()


@pytest.mark.parametrize("slower", [1.5, 2.0, 5.0])
def test_who_is_slow_runs_for_its_share_of_the_time_and_then_throughout(process, slower):
    process.freezer.slow(process.row, slower, until=20.0)
    process.live(20.0)
    assert process.ran_s == pytest.approx(20.0 / slower, rel=0.15)
    process.live(5.0)
    assert process.is_running
    assert process.ran_s == pytest.approx(20.0 / slower + 5.0, rel=0.15)


def test_who_is_stopped_meanwhile_stays_so(process):
    process.freezer.slow(process.row, 2.0, until=inf)
    process.live(1.0)
    process.freezer.leave(process.row)
    process.is_running = False
    process.freezer.hold(process.row, until=3.0)
    process.live(1.9)
    assert not process.is_running
    process.live(0.2)
    assert process.is_running


def test_who_is_stopped_for_good_is_never_woken(process):
    process.freezer.slow(process.row, 2.0, until=inf)
    process.freezer.leave(process.row)
    process.is_running = False
    process.freezer.look(inf)
    assert not process.is_running


def test_who_was_killed_is_left_alone(process):
    process.freezer.slow(process.row, 2.0, until=inf)
    process.is_gone = True
    process.live(1.0)
    process.freezer.look(inf)
    assert process.told == []
    process.freezer.hold(process.row, until=2.0)
    process.live(2.0)
    assert process.told == ["w0 was not woken: process 7 is gone"]
