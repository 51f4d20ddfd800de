"""Who writes a run where the file system has no locks: one controller, whatever the others do."""

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as arrow_fs
import pytest

from elastic.controller.writer import Writer
from elastic.protocol.errors import WrongInput
from elastic.store import claim as claim_module
from elastic.store.claim import CLAIMS, SILENT_S, TakenOver, this_machine
from elastic.store.files import Folder, open_folder, write_json
from elastic.store.journal import read_lines
from elastic.store.run_directory import RunDirectory
from tests.object_store import FaultProxy, S3Server, uri
from tests.store.test_run_directory import RESULT, metrics, record, samples

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def bucket(path: Path) -> Folder:
    path.mkdir(exist_ok=True)
    return Folder(arrow_fs.SubTreeFileSystem(str(path), arrow_fs.LocalFileSystem()), "runs")


class Controller:
    """A process that has opened the run. It records its first step when told so."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "tests.store.test_claim", str(path)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        assert self.hear() == "open"

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear()


def be_a_controller(path: Path) -> None:
    run = RunDirectory(bucket(path), "r", spool=path.parent / "its spool", launch="first")
    print("open", flush=True)
    sys.stdin.readline()
    assert run._claim is not None
    run._claim._renewed_at -= SILENT_S  # as if so much time had gone by
    run.record_step(metrics(1, attempt=7), samples(1))
    try:
        run.flush()
    except TakenOver as error:
        print(error, run.taken_by, flush=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rivals are threads here, which a busy machine may hold up for seconds. Who has come too late
    is refused after so long."""
    monkeypatch.setattr(claim_module, "WITHDRAW_S", 10.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Controller]]:
    started: list[Controller] = []

    def start() -> Controller:
        started.append(Controller(tmp_path / "bucket"))
        return started[-1]

    yield start
    for controller in started:
        controller.process.kill()
        controller.process.communicate(timeout=PATIENCE_S)


def claims(path: Path) -> list[Path]:
    return sorted((path / "bucket" / "runs" / "r" / CLAIMS).iterdir())


def let_time_pass(path: Path, seconds: float) -> None:
    """All that was claimed so far was renewed so long ago."""
    for claim in claims(path):
        at = time.time() - seconds
        os.utime(claim, (at, at))


def open_at_once(storages: list[Any], tmp_path: Path) -> list[RunDirectory | WrongInput]:
    found: list[RunDirectory | WrongInput] = []
    together = threading.Barrier(len(storages))

    def start(launch: int) -> None:
        spool = tmp_path / f"spool {launch}"
        together.wait(PATIENCE_S)
        try:
            found.append(RunDirectory(storages[launch], "r", spool=spool, launch=f"l{launch}"))
        except WrongInput as error:
            found.append(error)

    threads = [threading.Thread(target=start, args=(n,)) for n in range(len(storages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


@pytest.mark.parametrize("attempt", range(10))
def test_of_drivers_that_start_a_run_at_the_same_time_one_has_it(tmp_path, attempt):
    found = open_at_once([bucket(tmp_path / "bucket")] * 3, tmp_path)
    (run,) = (each for each in found if isinstance(each, RunDirectory))
    refused = [str(each) for each in found if isinstance(each, WrongInput)]
    assert len(refused) == 2
    assert all("runs/r is being written by a live run" in each for each in refused)
    record(run, range(1, 3))
    run.close()
    assert (read_lines(run.folder, "metrics.jsonl"), claims(tmp_path)) == (
        [metrics(1), metrics(2)],
        [],
    )


def test_of_two_drivers_that_start_a_run_in_s3_one_has_it(
    s3: FaultProxy, s3_server: S3Server, tmp_path: Path
) -> None:
    place = uri(s3_server.new_bucket(), "runs", s3.port)
    found = open_at_once([place] * 2, tmp_path)
    (run,) = (each for each in found if isinstance(each, RunDirectory))
    assert len(found) == 2
    run.close()
    RunDirectory(place, "r", spool=tmp_path / "next", launch="next").close()


def test_a_run_whose_controller_was_killed_here_is_taken_at_once(tmp_path, start):
    controller = start()
    with pytest.raises(WrongInput, match="live run"):
        RunDirectory(bucket(tmp_path / "bucket"), "r", launch="second")
    controller.process.send_signal(signal.SIGKILL)
    controller.process.wait(PATIENCE_S)
    RunDirectory(bucket(tmp_path / "bucket"), "r", launch="second").close()


def test_a_successor_of_the_same_launch_takes_it_from_a_controller_that_is_not_heard(
    tmp_path, start
):
    controller = start()
    again = RunDirectory(bucket(tmp_path / "bucket"), "r", launch="first")
    assert controller.go_on() == "runs/r was taken over by another controller"
    again.close()


@pytest.mark.parametrize(("silent_s", "is_refused"), [(0, True), (SILENT_S + 5, False)])
def test_a_process_number_of_another_machine_says_nothing(tmp_path, silent_s, is_refused):
    folder = bucket(tmp_path / "bucket").at("r").at(CLAIMS)
    folder.create()
    owner = {"pid": 2**22 + 1, "machine": "another boot/pid:[1]", "is_held": True}
    write_json(folder, "000001-abcdabcd-first", owner)
    let_time_pass(tmp_path, silent_s)
    try:
        RunDirectory(bucket(tmp_path / "bucket"), "r", launch="second").close()
    except WrongInput:
        assert is_refused
    else:
        assert not is_refused


def test_a_controller_that_was_frozen_for_long_writes_nothing_more_and_says_so(tmp_path, start):
    frozen = start()
    frozen.process.send_signal(signal.SIGSTOP)
    let_time_pass(tmp_path, SILENT_S + 5)
    run = RunDirectory(bucket(tmp_path / "bucket"), "r", launch="second", spool=tmp_path / "s")
    record(run, range(1, 3))
    run.flush()
    frozen.process.send_signal(signal.SIGCONT)
    assert frozen.go_on() == "runs/r was taken over by another controller second"
    run.close()
    assert read_lines(run.folder, "metrics.jsonl") == [metrics(1), metrics(2)]


def test_a_run_that_was_taken_over_ends_with_a_line(tmp_path):
    ours = RunDirectory(bucket(tmp_path / "bucket"), "r", launch="first", spool=tmp_path / "s")
    folder = ours.folder.at(CLAIMS)
    owner = {"pid": os.getpid(), "machine": this_machine(), "is_held": True}
    write_json(folder, "000009-abcdabcd-second", owner)
    assert ours._claim is not None
    ours._claim.renew()
    said: list[str] = []
    writer = Writer(said.append, said.append)
    writer.loop = asyncio.new_event_loop()
    for _ in range(2):
        writer.hear_uploads(ours)
    writer.loop.close()
    assert said == ["runs/r was taken over by second"]
    with pytest.raises(TakenOver):
        ours.write_result(RESULT)
    assert folder.names() == ["000009-abcdabcd-second"]


def test_a_disk_without_locks_is_claimed_as_a_bucket_is(tmp_path, monkeypatch):
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    run = RunDirectory(str(tmp_path), "r", launch="first")
    with pytest.raises(WrongInput, match="live run"):
        RunDirectory(str(tmp_path), "r", launch="second")
    record(run, range(1, 3))
    run.close()
    RunDirectory(str(tmp_path), "r", launch="second").close()
    assert open_folder(str(tmp_path / "r")).at(CLAIMS).names() == []


if __name__ == "__main__":
    be_a_controller(Path(sys.argv[1]))
