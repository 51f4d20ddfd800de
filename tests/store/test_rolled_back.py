"""Roll backs that storage does not take: no line is missing, given up or there twice in the end."""

import asyncio
import errno
import os
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.fs as arrow_fs
import pytest

from elastic.on_ray.cluster import RayCluster
from elastic.on_ray.head_calls import HeadCalls
from elastic.protocol.manifest import MANIFEST
from elastic.protocol.messages.to_controller import Committed
from elastic.protocol.step_record import SampleRecord, StepMetrics, StepRecord
from elastic.store import claim, run_directory
from elastic.store.catalogue import Catalogue
from elastic.store.files import Folder
from elastic.store.journal import read_lines
from elastic.store.run_directory import RunDirectory
from tests.store.test_run_directory import Full, metrics, samples

FILES = ("metrics.jsonl", "samples.jsonl", "metrics.rolledback.jsonl")
ALWAYS = 1_000_000


@dataclass(frozen=True)
class Store(Folder):
    """An object store that goes away after so many more requests."""

    left: list[int] = field(default_factory=lambda: [ALWAYS])

    def at(self, name: str) -> "Store":
        return Store(self.filesystem, self.path_of(name), self.left)

    def read(self, name: str) -> bytes:
        self._ask()
        return super().read(name)

    def write(self, name: str, content: bytes, *, is_durable: bool = True) -> None:
        self._ask()
        super().write(name, content, is_durable=is_durable)

    def delete(self, name: str) -> None:
        self._ask()
        super().delete(name)

    def sizes(self) -> dict[str, int]:
        self._ask()
        return super().sizes()

    def _ask(self) -> None:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are counted here: no thread makes any, however long a test takes."""
    monkeypatch.setattr(run_directory, "UPLOAD_EVERY_S", 24 * 3600.0)
    monkeypatch.setattr(claim, "RENEW_EVERY_S", 24 * 3600.0)
    monkeypatch.setattr(claim, "SURE_S", 24 * 3600.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "bucket").mkdir()
    local = arrow_fs.LocalFileSystem()
    return Store(arrow_fs.SubTreeFileSystem(str(tmp_path / "bucket"), local), "runs")


def line(step: int, generation: int) -> dict[str, Any]:
    """A step that a generation reports; each does it with other samples here."""
    done = {**metrics(step), "generation": generation}
    return {"metrics": done, "samples": {**samples(step), "sha256": f"by {generation}"}}


def said(step: int, generation: int) -> StepRecord:
    done = line(step, generation)
    return StepRecord(StepMetrics(**done["metrics"]), SampleRecord(**done["samples"]))


def record(run: RunDirectory, generation: int, steps: range) -> None:
    for step in steps:
        done = line(step, generation)
        assert run.record_step(done["metrics"], done["samples"])


def contents(folder: Folder) -> dict[str, list[tuple[int, Any]]]:
    """(step, who has done it) of every line."""
    return {
        name: [(x["step"], x.get("generation", x.get("sha256"))) for x in read_lines(folder, name)]
        for name in FILES
    }


def expected(last: int) -> dict[str, list[tuple[int, Any]]]:
    """Six steps by the first generation, three of them given up for those of the second one."""
    done_by = [(step, 1 if step <= 3 else 2) for step in range(1, last + 1)]
    by_word = [(step, f"by {generation}") for step, generation in done_by]
    return dict(zip(FILES, (done_by, by_word, [(4, 1), (5, 1), (6, 1)]), strict=True))


def test_a_store_that_is_away_at_a_roll_back_has_every_line_once_it_is_back(store, tmp_path):
    run = RunDirectory(store, "r", spool=tmp_path / "spool")
    record(run, 1, range(1, 7))
    run.flush()
    store.left[0] = 0
    assert run.roll_back(3) == 3
    record(run, 2, range(4, 9))
    with pytest.raises(OSError, match="No route"):
        run.flush()
    assert (run.last_step, run.safe_step) == (8, 3)
    store.left[0] = ALWAYS
    run.flush()
    assert (run.safe_step, contents(run.folder)) == (8, expected(8))
    run.close()
    assert contents(run.folder) == expected(8)


@pytest.mark.parametrize("last", [5, 8])
@pytest.mark.parametrize("num_requests", range(17))
def test_a_controller_that_dies_during_the_outage_leaves_its_successor_every_line(
    store, tmp_path, num_requests, last
):
    run = RunDirectory(store, "r", spool=tmp_path / "spool")
    for first in (1, 3, 5):
        record(run, 1, range(first, first + 2))
        run.flush()
    store.left[0] = num_requests
    run.roll_back(3)
    record(run, 2, range(4, last + 1))
    try:
        run.flush()
    except OSError:
        assert store.left[0] < 0
    told_step = run.safe_step  # what workers need not remember; the controller dies here
    store.left[0] = ALWAYS
    again = RunDirectory(store, "r", spool=tmp_path / "another node")
    workers_say(again, range(told_step + 1, last + 1))
    again.close()
    assert contents(again.folder) == expected(last)


def workers_say(run: RunDirectory, steps: range) -> None:
    """To a controller that has taken over."""

    async def hear() -> None:
        kept = SimpleNamespace(
            roll_back=run.roll_back,
            record_step=lambda said: run.record_step(
                said.metrics.to_line(), said.samples.to_line()
            ),
            note=print,
        )
        host = SimpleNamespace(record=kept, on_unprotected=None)
        clock = asyncio.get_running_loop().time
        calls = HeadCalls()
        cluster = RayCluster("token", 3.0, cast(Any, None), calls, cast(Any, host), clock)
        last = read_lines(run.folder, "metrics.jsonl")[-1]
        cluster.take_over(run.place, run.last_step, last, has_formed=True)
        lines = [said(step, 2) for step in steps]
        for _ in range(2):  # whoever is the lowest rank next repeats them
            if lines:
                cluster.progress.commits.hear(Committed(2, 0, tuple(lines), vote=None))
        calls.close()

    asyncio.run(hear())


@pytest.mark.parametrize("num_requests", range(8))
def test_a_damaged_checkpoint_that_an_outage_keeps_from_going_aside_goes_once(store, num_requests):
    catalogue = Catalogue(store)
    store.at("step-00000004").create()
    files = {"a": b"1", "b": b"2", MANIFEST: b"{}", "z": b"3"}
    for name, content in files.items():
        store.at("step-00000004").write(name, content)
    store.left[0] = num_requests
    try:
        name = catalogue.set_aside(4)
    except OSError:
        store.left[0] = ALWAYS
        name = catalogue.set_aside(4)
    store.left[0] = ALWAYS
    assert (name, store.folders()) == ("step-00000004.damaged", [name])
    assert {each: store.at(name).read(each) for each in store.at(name).names()} == files


@pytest.mark.parametrize("num_requests", range(0, 60, 4))
def test_a_run_directory_whose_opening_an_outage_breaks_off_is_opened_again(
    store, tmp_path, monkeypatch, num_requests
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = RunDirectory(store, "r", launch="before")
    record(run, 1, range(1, 7))
    run.flush()
    run.roll_back(3)
    run.close()
    spools, threads = len(list(tmp_path.iterdir())), threading.active_count()
    store.left[0] = num_requests
    try:
        again = RunDirectory(store, "r", launch="a")
    except OSError:
        assert len(list(tmp_path.iterdir())) == spools, "nothing is left of it"
        assert threading.active_count() <= threads + 1, "a claim that notices that it is over"
        store.left[0] = ALWAYS
        again = RunDirectory(store, "r", launch="a")
    store.left[0] = ALWAYS
    assert again.last_step == 3
    record(again, 2, range(4, 9))
    again.close()
    assert contents(again.folder) == expected(8)
    assert again.folder.at(".claims").names() == []


@pytest.mark.parametrize("full", FILES)
def test_a_disk_that_is_full_at_a_roll_back_gets_every_line_once_it_has_room(tmp_path, full):
    run = RunDirectory(str(tmp_path), "r")
    record(run, 1, range(1, 5))
    run.roll_back(3)
    record(run, 1, range(4, 6))
    lines = {"m": run._metrics, "s": run._samples, "r": run._rolled_back}
    files = dict(zip(FILES, (lines["m"], lines["s"], lines["r"]), strict=True))
    files[full]._file = disk = Full(files[full].path, "ab")
    try:
        record(run, 1, range(6, 7))
    except OSError:
        assert full != FILES[2]
    run.roll_back(3)
    for step in range(4, 8):
        try:
            record(run, 2, range(step, step + 1))
        except OSError:
            assert run.safe_step <= 3
    disk.is_full = False
    record(run, 2, range(8, 9))
    run.close()
    end = expected(8)
    assert contents(run.folder) == {**end, FILES[2]: [(4, 1), *end[FILES[2]]]}
