"""A run that somebody looks at: whatever becomes of the look, the run goes on."""

import builtins
import io
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from elastic.cli.app import main
from elastic.cli.progress import Progress
from elastic.driver import starting, waiting
from elastic.driver.display import Display, progress_shown
from elastic.driver.starting import slow_step
from elastic.driver.waiting import Onlooker, wait
from elastic.on_ray.driver.submission import Lease
from elastic.store.files import open_folder, write_json
from elastic.store.run_directory import RunDirectory
from tests.cli.test_progress import METRICS, STATUS, decision
from tests.object_store import FaultProxy, S3Server, uri

ANSWER = {"is_open": True}
POLLS = 5
BLOCKED_S = 60.0
MILLION = 1_000_000
ENOUGH_BYTES = 8 << 20
"""Of the 100 MB that the files of a million short steps have."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_python_shows_a_run_where_somebody_looks(
    stream: type[io.StringIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    write_json(open_folder(str(tmp_path)), "status.json", STATUS)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(METRICS) + "\n")
    for is_wanted in (None, True, False):
        monkeypatch.setattr("sys.stderr", stderr := stream())
        with progress_shown(is_wanted) as show:
            if show is not None:
                show(str(tmp_path))
        is_shown = is_wanted is True or (is_wanted is None and stream is Terminal)
        assert ("0.25" in stderr.getvalue()) == is_shown


def test_a_notebook_has_plain_lines_below_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Without ipywidgets, which a live view would need there."""
    shown: list[Any] = []
    kernel = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: kernel, raising=False)
    display = SimpleNamespace(display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    write_json(open_folder(str(tmp_path)), "status.json", STATUS)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(METRICS) + "\n")
    with progress_shown(None) as show:
        assert show is not None
        show(str(tmp_path))
    (line,) = (output._repr_mimebundle_([], [])["text/plain"] for output in shown)
    assert "loss=0.25" in line
    assert capsys.readouterr() == ("", "")


class Driver:
    """A driver whose run is at its end once it was asked about it, and its lease renewed, often."""

    def __init__(self, place: str, at_the_end: Callable[[], object] = int) -> None:
        self.place, self.has_begun, self.waits_for, self.starts = place, True, "", ""
        self._at_the_end = at_the_end
        self.polls, self.renewals = 0, threading.Semaphore(0)
        self.lease = Lease(self.renewals.release)

    def poll(self, timeout_s: float) -> dict[str, Any] | None:
        self.polls += 1
        assert self.renewals.acquire(timeout=BLOCKED_S)
        if self.polls < POLLS:
            return None
        self._at_the_end()
        return ANSWER


@pytest.fixture
def attach() -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def attach(place: Any, show: Callable[[str], object], at_the_end: Any = int) -> Driver:
        drivers.append(Driver(str(place), at_the_end))
        assert wait(drivers[-1], Onlooker(show), detach=False) == ANSWER
        return drivers[-1]

    yield attach
    for driver in drivers:
        driver.lease.end()


def test_a_display_that_blocks_holds_up_neither_the_lease_nor_the_end_of_the_run(attach):
    is_free, was_freed = threading.Event(), list[bool]()
    driver = attach("r", lambda _: was_freed.append(is_free.wait(BLOCKED_S)), is_free.set)
    assert (driver.polls, was_freed[0]) == (POLLS, True)


def test_a_run_that_ends_before_it_was_seen_to_begin_is_shown():
    shown = list[str]()
    driver = Waiting()
    assert wait(driver, Onlooker(shown.append, place="r"), detach=False) == ANSWER
    assert shown == ["r"]


class Waiting:
    """A driver whose run waits for machines, then begins, then is at its end."""

    def __init__(self, *words: tuple[str, bool, str]) -> None:
        """words: the run directory, whether the run has begun, what it waits for."""
        self._words = list(words)
        self.place, self.has_begun, self.waits_for, self.starts = "", False, "", ""

    def poll(self, timeout_s: float) -> dict[str, Any] | None:
        if not self._words:
            return ANSWER
        self.place, self.has_begun, self.waits_for = self._words.pop(0)
        return None


LACK = "waiting for a place for 2 workers of 1 CPU; the cluster has 1 node with"


def test_what_a_run_waits_for_is_told_once_and_its_place_when_it_has_begun(capsys):
    timeouts = [("runs/r", False, f"{LACK} {n} CPUs") for n in (0, 1)]
    driver = Waiting(("", False, ""), *timeouts, ("runs/r", True, ""), ("runs/r", True, ""))
    assert wait(driver, Onlooker(tell_place=True), detach=False) == ANSWER
    lack, place = capsys.readouterr().err.splitlines()
    assert lack == f"elastic: {LACK} 0 CPUs"
    assert place.startswith("run directory: runs/r (temporary: without storage")


@pytest.mark.parametrize("is_silent", [False, True])
def test_how_far_a_slow_start_is_is_told_unless_nobody_reads_it(capsys, is_silent):
    driver = Waiting(*[("runs/r", False, "")] * 3, ("runs/r", True, ""))
    lines = iter(["", "1 without a process", "1 without a process", ""])
    driver.poll = lambda _: (setattr(driver, "starts", next(lines, "")), Waiting.poll(driver, 0))[1]
    assert wait(driver, Onlooker(is_silent=is_silent), detach=False) == ANSWER
    assert capsys.readouterr().err == ("" if is_silent else "elastic: 1 without a process\n")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_step_of_the_start_is_told_if_it_takes_long_where_somebody_waits(
    monkeypatch, is_terminal
):
    told, is_told = list[str](), threading.Event()
    monkeypatch.setattr(starting, "SLOW_S", 0.0)
    monkeypatch.setattr(starting.sys, "stderr", SimpleNamespace(isatty=lambda: is_terminal))
    with slow_step("looking", lambda line: (told.append(line), is_told.set())):
        assert is_told.wait(BLOCKED_S if is_terminal else 0.0) == is_terminal
    assert told == ["looking"] * is_terminal


class Interrupted:
    """A driver that gets a signal at each look, and whose run ends after the last one."""

    def __init__(self, signals: Sequence[signal.Signals], *, has_begun: bool = True) -> None:
        self.place, self.has_begun, self.waits_for, self.starts = "runs/r", has_begun, "", ""
        self._signals, self.wishes = list(signals), list[str]()

    def poll(self, timeout_s: float) -> dict[str, Any] | None:
        if not self._signals:
            return ANSWER
        signal.raise_signal(self._signals.pop(0))
        return None

    def stop(self, reason: str) -> None:
        self.wishes.append(f"stop: {reason}")

    def end_now(self, reason: str) -> None:
        self.wishes.append(f"end: {reason}")

    def abandon(self) -> None:
        self.wishes.append("abandon")


@pytest.mark.parametrize(
    ("is_script", "has_begun", "when"),
    [(False, True, "of this step"), (True, True, "next report"), (True, False, "it has begun")],
)
def test_the_first_interrupt_is_told_at_once_and_what_a_second_one_does(
    capsys, is_script, has_begun, when
):
    driver = Interrupted((signal.SIGTERM, signal.SIGINT), has_begun=has_begun)
    assert wait(driver, Onlooker(is_script=is_script, is_silent=True), detach=False) == ANSWER
    assert driver.wishes == ["stop: SIGTERM at the driver", "end: SIGTERM at the driver"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic: SIGTERM: the run stops")
    assert when in line
    assert line.endswith("; a second one ends it at once")


def test_further_interrupts_do_not_put_off_the_end_of_a_controller_that_does_not_answer(
    monkeypatch,
):
    clock = iter(range(0, 1000, 6))  # seconds, one look after the other
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    driver = Interrupted([signal.SIGINT] * 5)
    assert wait(driver, Onlooker(), detach=False) == ANSWER
    assert "abandon" in driver.wishes


def test_a_run_that_comes_to_nothing_names_no_place(capsys):
    assert wait(Waiting(("runs/r", False, "")), Onlooker(tell_place=True), detach=False) == ANSWER
    assert capsys.readouterr().err == ""


def test_a_run_is_left_alone_once_it_is_there_whether_machines_are_or_not(monkeypatch):
    begun = ("runs/r", True, "")
    assert wait(Waiting(("", False, ""), begun), Onlooker(), detach=True) is None
    driver = Waiting(("runs/r", False, LACK), begun)
    monkeypatch.setattr(waiting, "CHECKS_S", -1.0)  # the first worker has had its time
    assert wait(driver, Onlooker(), detach=True) is None
    assert not driver.has_begun


def test_a_run_whose_workers_have_places_is_left_alone_only_once_it_has_begun(monkeypatch):
    """Its first worker may take long to import torch, and then find that the input is wrong."""
    monkeypatch.setattr(waiting, "CHECKS_S", -1.0)
    driver = Waiting(*[("runs/r", False, "")] * 5)
    assert wait(driver, Onlooker(), detach=True) == ANSWER
    driver = Waiting(("runs/r", False, ""), ("runs/r", True, ""))
    assert wait(driver, Onlooker(), detach=True) is None
    assert driver.has_begun


def test_the_time_without_a_place_ends_with_the_place(monkeypatch):
    clock = iter(range(0, 1000, 6))  # seconds, one look after the other
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(waiting, "CHECKS_S", 15.0)
    lacking, placed = ("runs/r", False, LACK), ("runs/r", False, "")
    assert wait(Waiting(*[lacking, placed] * 4), Onlooker(), detach=True) == ANSWER
    assert wait(Waiting(*[lacking] * 8), Onlooker(), detach=True) is None


def test_a_display_that_fails_is_one_line_and_not_the_end_of_the_run(attach, capsys):
    def show(_: str) -> None:
        raise OSError("the terminal is gone")

    assert attach("r", show).polls == POLLS
    said = "elastic: progress cannot be shown: the terminal is gone\n"
    assert capsys.readouterr().err == said


def test_a_bucket_that_is_silent_holds_up_neither_the_lease_nor_the_end_of_the_run(
    attach, s3: FaultProxy, s3_server: S3Server
):
    place = uri(s3_server.new_bucket(), "runs/r", s3.port)
    write_json(open_folder(place), "status.json", STATUS)
    s3.faults.is_silent = True
    progress = Progress(Console(file=io.StringIO(), force_terminal=True))
    assert attach(place, progress).polls == POLLS
    progress.close()
    s3.faults.heal()


def test_a_run_that_ends_right_after_a_look_is_looked_at_once_more(tmp_path):
    text = io.StringIO()
    progress = Progress(Console(file=text, force_terminal=False, width=200))
    display = Display(progress)

    def write(step: int) -> None:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**METRICS, "step": step}) + "\n")
        write_json(open_folder(str(tmp_path)), "status.json", {**STATUS, "step": step})

    write(1)
    display.begin(str(tmp_path))
    deadline = time.monotonic() + 60
    while "step=1/" not in text.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polling, bounded by the deadline
    write(2)
    display.end()
    progress.close()
    assert "step=2/" in text.getvalue().splitlines()[-1]


def test_a_store_that_cannot_be_read_is_one_line_and_is_looked_at_again(tmp_path):
    (tmp_path / "status.json").symlink_to("status.json")  # reading it is ELOOP
    text = io.StringIO()
    progress = Progress(Console(file=text, force_terminal=False))
    for is_away in (True, True, False):
        if not is_away:
            (tmp_path / "status.json").unlink()
            write_json(open_folder(str(tmp_path)), "status.json", {**STATUS, "step": 3})
        progress._looked_at = -10.0
        progress(str(tmp_path))
    progress.close()
    trouble, *shown = text.getvalue().splitlines()
    assert trouble.startswith("the run cannot be looked at now: ")
    assert shown == ["step=3/9 loss=- step_s=0.000 world_size=2 generation=1"]


def test_a_look_at_a_bucket_reads_only_the_segments_that_are_new(
    s3: FaultProxy, s3_server: S3Server, tmp_path: Path
):
    place = uri(s3_server.new_bucket(), "runs", s3.port)
    run = RunDirectory(place, "r", spool=tmp_path)
    progress = Progress(Console(file=io.StringIO(), force_terminal=False))

    def look(step: int) -> list[str]:
        run.append_journal(json.loads(decision(step, "2 of 2 joined", 0, 1)))
        run.record_step({**METRICS, "step": step}, sample(step))
        run.write_status({**STATUS, "step": step})
        run.flush()
        s3.seen.clear()
        progress._looked_at = -10.0
        view = progress(run.place)
        assert view is not None
        assert view.metrics["step"] == step
        return sorted(file for line in s3.seen if (file := got(line)))

    look(1)
    for step in range(2, 6):
        offsets = [size(run.folder, name) for name in ("journal.jsonl", "metrics.jsonl")]
        read = [name for name in look(step) if "jsonl." in name]
        assert read == [f"journal.jsonl.{offsets[0]:015d}", f"metrics.jsonl.{offsets[1]:015d}"]
    run.close()


def got(request: str) -> str:
    """The file that is read; empty for a listing."""
    method, path, _ = request.split()
    return path.rpartition("/")[2] if method == "GET" and "?" not in path else ""


def sample(step: int) -> dict[str, Any]:
    return {"step": step, "first": 0, "count": 1, "sha256": ""}


def size(folder: Any, name: str) -> int:
    """Of the file and the segments that follow it, which here begins with nothing."""
    return sum(size for n, size in folder.sizes().items() if n.startswith(name))


@pytest.fixture
def million(tmp_path: Path) -> Path:
    """The run directory of a run that has gone on for long."""
    step = b'{"step":999999,"loss":1.0,"step_s":0.1,"x":"so many"}\n'
    old = b'{"at":1.0,"phase":"running","generation":1,"step":12}\n'
    (tmp_path / "metrics.jsonl").write_bytes(step * MILLION)
    told = decision(MILLION, "2 of 2 joined", 0, 1).encode()
    (tmp_path / "journal.jsonl").write_bytes(old * MILLION + told)
    folder = open_folder(str(tmp_path))
    write_json(folder, "config.json", {"steps": 2 * MILLION})
    write_json(folder, "status.json", {**STATUS, "step": MILLION, "steps": 2 * MILLION})
    return tmp_path


def read_bytes() -> int:
    """What this process has read from files so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def test_the_first_look_at_a_million_steps_reads_their_end(million, attach):
    text, before = io.StringIO(), read_bytes()
    progress = Progress(Console(file=text, force_terminal=False))
    attach(million, progress)
    progress.close()
    assert read_bytes() - before < ENOUGH_BYTES
    assert text.getvalue().splitlines() == [
        '00:00:01 generation=2 step=1000000 size=2 phase=forming reason="2 of 2 joined"',
        "step=1000000/2000000 loss=1.0000 step_s=0.100 world_size=2 generation=1",
    ]


@pytest.mark.parametrize(("command", "status"), [("status", 0), ("watch", 1)])
def test_commands_that_look_at_a_million_steps_read_their_end(million, capsys, command, status):
    before = read_bytes()
    if command == "watch":
        result = {"outcome": "stopped", "steps": MILLION, "loss": 1.0}
        write_json(open_folder(str(million)), "result.json", {**RESULT, **result})
    assert main([command, str(million)]) == status
    assert read_bytes() - before < ENOUGH_BYTES
    assert f"{MILLION}" in capsys.readouterr().out


RESULT: dict[str, Any] = {
    "outcome": "stopped", "steps": 3, "loss": 0.5, "weights_sha256": "ab", "generations": 1,
    "lost_steps": 0, "goodput": 1.0, "badput": {}, "recoveries": [],
}  # fmt: skip
