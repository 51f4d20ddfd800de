"""A run whose controller is away: `watch`, `status` and `stop` between its death and a successor.

Sleeping is all that these commands do meanwhile: here it is what happens next.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.cli.absence import Absence, said_of
from elastic.cli.app import main
from elastic.cli.stop import await_result
from elastic.driver.resume import PastRun
from elastic.protocol.errors import ControllerLost
from elastic.store.claim import this_machine
from elastic.store.files import open_folder, write_json
from tests.cli.test_cli import RESULT, STATUS

GONE = 2**22 + 1
"""No process has this number."""
PAST = PastRun(
    {"detect_s": 3.0}, {"controller": {"pid": GONE}}, None, 2.0, is_controller_gone=True,
    begun_s=500.0,
)  # fmt: skip
AWAITED = rf"the run's controller \(pid {GONE}\) is gone; a successor is awaited for \d+ s more"
LOST = rf"no word of the run's controller \(pid {GONE}\) for \d+ s, and no successor has come"


class Run:
    """A run directory in which the time passes as a test says."""

    def __init__(self, place: Path) -> None:
        self.place, self._began = place, time.time()
        self.folder = open_folder(str(place))
        write_json(self.folder, "config.json", {"steps": 10, "detect_s": 3.0, "address": "ray:1"})

    def say(self, pid: int) -> None:
        """A controller's last status, which is new for long enough on a machine that is busy."""
        controller = {"pid": pid, "node_ip": "127.0.0.1", "machine": this_machine()}
        write_json(self.folder, "status.json", {**STATUS, "controller": controller})
        self.pass_by(-60)

    def pass_by(self, seconds: float) -> None:
        """Since the last status; the run has begun long before."""
        os.utime(self.place / "config.json", (1.0, 1.0))
        os.utime(self.place / "status.json", (self._began - seconds, self._began - seconds))

    def end(self) -> None:
        write_json(self.folder, "result.json", RESULT)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path)
    found.say(GONE)
    found.pass_by(0)
    return found


@pytest.fixture
def happens(monkeypatch) -> Callable[..., Iterator[Callable[[], object]]]:
    """happens(one, other): the first time that somebody sleeps, the next time."""

    def make(*what: Callable[[], object]) -> Iterator[Callable[[], object]]:
        left = iter(what)
        monkeypatch.setattr(time, "sleep", lambda _: next(left)())
        return left

    return make


def test_a_watcher_awaits_the_successor_of_a_controller_that_was_killed(run, capsys, happens):
    left = happens(lambda: run.pass_by(12), lambda: run.say(os.getpid()), run.end)
    assert main(["watch", str(run.place)]) == 0
    assert list(left) == []
    shown = capsys.readouterr()
    assert shown.err == ""
    assert len(re.findall(AWAITED, shown.out)) == 1
    assert shown.out.index("is awaited") < shown.out.index("succeeded: 10 of 10 steps")


def test_each_absence_is_told_and_a_watcher_leaves_when_nobody_can_come_any_more(
    run, capsys, happens
):
    def die() -> None:
        run.say(GONE)
        run.pass_by(0)

    times = [lambda s=s: run.pass_by(s) for s in (6, 12, 50)]
    left = happens(lambda: run.say(os.getpid()), die, *times)
    assert main(["watch", str(run.place)]) == 1
    assert list(left) == []
    shown = capsys.readouterr()
    assert len(re.findall(AWAITED, shown.out)) == 2
    assert re.fullmatch(f"elastic: {re.escape(str(run.place))}: {LOST}; start .*\n", shown.err)


def test_stop_awaits_a_successor_too(run, capsys, happens):
    left = happens(lambda: run.pass_by(12), run.end)
    assert await_result(run.folder, "r", Absence(print)) == RESULT
    assert list(left) == []
    assert len(re.findall(AWAITED, capsys.readouterr().out)) == 1
    (run.place / "result.json").unlink()
    run.pass_by(50)
    with pytest.raises(ControllerLost, match=f"r: {LOST}"):
        await_result(run.folder, "r", Absence(print))


@pytest.mark.parametrize(
    ("pid", "silent_s", "says"),
    [
        (os.getpid(), -60, ""),
        (GONE, 0, AWAITED),
        (GONE, 50, LOST + "; start the same run again to resume it"),
        (os.getpid(), 12, r"no word of .* \(pid \d+\) for \d+ s; it or a successor is awaited for"),
    ],
    ids=["at work", "killed", "over", "silent"],
)
def test_status_tells_of_an_absence(run, capsys, pid, silent_s, says):
    run.say(pid)
    run.pass_by(silent_s)
    assert main(["status", str(run.place)]) == 0
    line = capsys.readouterr().out.splitlines()[3]
    assert re.match(rf"status is -?\d+ s old{says and '; ' + says}", line)
    assert ("; " in line) == bool(says)


@pytest.mark.parametrize("detect_s", ["x", 1e9, [3.0], pytest.param(10**400, id="huge"), -1])
def test_a_run_whose_detect_s_is_damaged_is_one_clean_line(run, capsys, detect_s):
    run.say(GONE)
    write_json(run.folder, "config.json", {"detect_s": detect_s})
    assert main(["status", str(run.place)]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"elastic: config.json is damaged: detect_s is .{1,80}\n", said), said


def test_the_wait_is_the_lease_of_the_workers_after_the_age_that_a_live_status_may_have():
    assert not replace(PAST, silent_s=39.9).is_over
    assert replace(PAST, silent_s=40.1).is_over
    assert not replace(PAST, silent_s=60.0, silent_after_s=45.0).is_over
    assert replace(PAST, silent_s=16.0, config={"detect_s": 0.5}).is_over
    assert not replace(PAST, silent_s=500.0, config={"detect_s": None}).is_over
    assert replace(PAST, silent_s=0.0, result=RESULT).is_over


def test_a_status_from_before_the_newest_start_says_nothing_of_its_controller():
    anew = replace(PAST, silent_s=9000.0, begun_s=1.0)
    assert (anew.is_away, anew.is_over) == (False, False)
    assert said_of(anew) == "the run was started again 1 s ago"
    assert replace(anew, begun_s=41.0).is_over
    told: list[Any] = []
    Absence(told.append).look(anew)
    assert told == []
