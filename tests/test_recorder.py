"""The recorder and storage that is away: it waits where it must, and the controller never does."""

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elastic.config import RunConfig
from elastic.control.commands import Discard, Publish
from elastic.control.events import Cancelled, Committed
from elastic.control.transition import start
from elastic.controller.publisher import Publisher
from elastic.controller.recorder import Recorder
from elastic.controller.settings import limits_of
from elastic.driver.resume import SCRIPT
from elastic.observe.anatomy import is_row
from elastic.on_ray.cluster import RayCluster
from elastic.protocol.manifest import SavedPart
from elastic.protocol.messages.to_controller import Loaded, PartSaved
from elastic.protocol.step_record import OF_OPTIMIZER, SampleRecord, StepMetrics, StepRecord
from elastic.store import run_directory
from elastic.store.before import Before
from elastic.store.catalogue import Catalogue, Damage, file_name
from elastic.store.checkpoint_files import write_part
from elastic.store.files import open_folder, read_json
from elastic.store.journal import read_lines
from elastic.store.remote import StoreAway
from elastic.store.run_directory import without
from tests.cli.test_cli import RESULT, STATUS
from tests.cli.test_profile import row
from tests.object_store import FaultProxy, S3Server, uri
from tests.store.saves import part_of, tensors
from tests.store.test_run_directory import metrics, samples

NOTHING: Any = None


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread waits for a store that is away, however long a test takes."""
    monkeypatch.setattr(run_directory, "UPLOAD_EVERY_S", 24 * 3600.0)


@pytest.fixture
def place(s3: FaultProxy, s3_server: S3Server) -> str:
    return uri(s3_server.new_bucket(), "runs", s3.port)


def recorder(storage: str, pauses_s: Any = (), **order: Any) -> Recorder:
    """In a running loop."""
    config = RunConfig(workers=1, steps=9, global_batch=4, micro_batch=4, storage=storage, name="r")
    order = {
        "storage": storage,
        "name": "r",
        "probe": None,
        "content": {"steps": 9},
        "run_id": "elastic-12345678",
        "config": config,
        "detach": False,
        **order,
    }
    made = Recorder(
        order,
        limits_of(config),
        now=lambda: 5.0,
        fail=NOTHING,
        tell_of_save=NOTHING,
        pauses_s=pauses_s,
    )
    made.writer.loop = asyncio.get_running_loop()
    return made


def record(opened: Recorder, *steps: int) -> None:
    for step in steps:
        opened.record_step(StepRecord(StepMetrics(**metrics(step)), SampleRecord(**samples(step))))


async def settled(opened: Recorder) -> None:
    await opened.writer.settle()
    await asyncio.sleep(0)  # what the writer's thread tells the loop


async def close(opened: Recorder) -> None:
    """As the end of a run, without its last lines."""
    opened.writer.flush()
    if opened.directory is not None:
        await asyncio.get_running_loop().run_in_executor(
            opened.writer.executor, opened.directory.close
        )
    opened.writer.executor.shutdown()


def back_after_a_pause(s3: FaultProxy) -> Iterator[float]:
    yield 0.0  # before the first try
    s3.faults.heal()
    yield 0.0


def test_a_store_that_is_away_when_the_run_directory_is_made_is_waited_for(place, s3, capsys):
    async def run() -> None:
        opened = recorder(place, back_after_a_pause(s3))
        opened.note("early", {"n": 1})
        s3.faults.is_unreachable = True
        told = await opened.open_at(0, [])
        opened.note("late", {"n": 2})
        assert (told, opened.committed) == (opened.place, None)
        await close(opened)

    asyncio.run(run())
    assert capsys.readouterr().err.count("storage is away") == 1
    lines = read_lines(open_folder(place).at("r"), "journal.jsonl")
    assert lines == [{"at": 5.0, "early": {"n": 1}}, {"at": 5.0, "late": {"n": 2}}]


async def end(opened: Recorder) -> None:
    await opened.close(lambda: STATUS, RESULT)


def test_a_run_is_seen_before_a_worker_is_ready_and_is_gone_if_it_comes_to_nothing(tmp_path):
    async def run(**order: Any) -> None:
        opened = recorder(str(tmp_path), **order)
        opened.note("early", {"n": 1})
        assert await opened.open() == str(tmp_path / "r")
        opened.write_status(STATUS)
        await settled(opened)
        assert read_json(open_folder(opened.place), "status.json") == STATUS
        assert len(read_lines(open_folder(opened.place), "journal.jsonl")) == 1
        await end(opened)
        assert opened.directory is None

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "r/checkpoints/step-00000000").mkdir(parents=True)  # as an import leaves it
    asyncio.run(run())
    assert [str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*")] == [
        "r",
        "r/checkpoints",
        "r/checkpoints/step-00000000",
    ]


def test_measurements_are_in_a_file_and_in_the_curves_while_the_run_goes_on(tmp_path):
    rows = tuple(
        {k: v for k, v in row(1, rank, wait_s=1.0).items() if k != "worker"} for rank in (0, 1)
    )

    async def run() -> None:
        opened = recorder(str(tmp_path))
        await opened.open_at(0, [])
        record(opened, 1)
        opened.record_anatomy(3, rows[:1])
        opened.record_anatomy(4, rows[1:])
        await settled(opened)
        lines = read_lines(open_folder(opened.place), "anatomy.jsonl")
        assert [(line["worker"], line["rank"]) for line in lines] == [("w3", 0), ("w4", 1)]
        assert all(is_row(line) for line in lines)
        await end(opened)

    asyncio.run(run())
    (events,) = (tmp_path / "r/tensorboard").iterdir()
    assert b"anatomy/wait" in events.read_bytes()


def test_a_resume_that_comes_to_nothing_leaves_the_run_as_it_was(tmp_path):
    """What it has replaced is put back: nothing was overwritten."""
    old = {"config.json": b'{"steps": 5}', "status.json": b'{"step": 5}', "result.json": b"{}"}
    (tmp_path / "r").mkdir()
    for name, content in old.items():
        (tmp_path / "r" / name).write_bytes(content)

    async def run() -> None:
        opened = recorder(str(tmp_path))
        await opened.open()
        opened.write_status(STATUS)
        await settled(opened)
        assert not (tmp_path / "r/result.json").exists()
        await end(opened)

    asyncio.run(run())
    assert {name: (tmp_path / "r" / name).read_bytes() for name in old} == old


def files_in(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))


@pytest.mark.parametrize("is_new", [True, False])
def test_a_run_that_comes_to_nothing_deletes_only_what_it_has_made(tmp_path, is_new):
    """It may have waited for machines for hours, and its folder is not its own alone."""
    run_dir = tmp_path / "r"
    if not is_new:
        run_dir.mkdir()

    async def run() -> None:
        opened = recorder(str(tmp_path))
        await opened.open()
        opened.write_status(STATUS)
        assert opened.keep_stacks({"w0.stacks": "..."}) is not None
        await settled(opened)
        (run_dir / "data.json").write_text("{}")  # as the feed writes it
        (run_dir / "notes.txt").write_text("mine")
        (run_dir / "checkpoints/step-00000000").mkdir(parents=True)  # as an import leaves it
        (run_dir / "checkpoints/step-00000000/manifest.json").write_text("{}")
        await end(opened)

    asyncio.run(run())
    assert files_in(run_dir) == [
        "checkpoints",
        "checkpoints/step-00000000",
        "checkpoints/step-00000000/manifest.json",
        "notes.txt",
    ]


def test_nobody_else_can_open_a_run_before_it_is_as_it_was(tmp_path, monkeypatch):
    put_back, was_locked = Before.put_back, list[bool]()

    def watched(before: Before) -> None:
        was_locked.append((tmp_path / "r/.lock").exists())
        put_back(before)

    monkeypatch.setattr(Before, "put_back", watched)

    async def run() -> None:
        opened = recorder(str(tmp_path))
        await opened.open()
        await end(opened)

    asyncio.run(run())
    assert was_locked == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_begun_or_was_left_alone_keeps_its_end(tmp_path):
    async def run(*, has_begun: bool, detach: bool) -> None:
        opened = recorder(str(tmp_path), detach=detach)
        await opened.open()
        if has_begun:
            await opened.open_at(0, [])
        await end(opened)
        assert opened.directory is not None

    for has_begun in (True, False):
        asyncio.run(run(has_begun=has_begun, detach=not has_begun))
        (tmp_path / "r/result.json").unlink()


def test_an_opening_under_way_when_the_run_ends_is_undone_as_well(tmp_path):
    async def run() -> None:
        opened = recorder(str(tmp_path))
        opening = asyncio.create_task(opened.open())
        await asyncio.sleep(0)
        await end(opened)
        await opening

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_stays_away_ends_the_run_with_a_line_and_no_internal_error(place, s3):
    async def run() -> list[Any]:
        opened = recorder(place, (0.0,))
        host: Any = SimpleNamespace(record=opened, on_unprotected=NOTHING, open_at=opened.open_at)
        cluster = RayCluster("t", 3.0, NOTHING, NOTHING, host, lambda: 5.0)
        cluster.workers[0] = slot = SimpleNamespace(state="loading")  # type: ignore
        cluster._loading = 0
        s3.faults.is_unreachable = True
        cluster._on_loaded(0, slot, Loaded(0, ()))
        events = [await cluster.events.get()]
        assert (cluster.wrong_input, opened.directory) == (None, None)
        await close(opened)
        return events

    (event,) = asyncio.run(run())
    assert event == Cancelled("failed", event.reason, 5.0)
    assert event.reason.startswith(f"storage failed: {place.partition('?')[0]}/r")
    assert "cannot be used now" in event.reason
    assert "internal error" not in event.reason


@pytest.mark.parametrize("target", ["job.py:Job", f"{SCRIPT}job.py"])
def test_of_a_script_the_engine_knows_no_learning_rate(tmp_path: Path, target: str):
    async def run() -> None:
        opened = recorder(str(tmp_path), content={"steps": 9, "target": target})
        await opened.open_at(0, [])
        record(opened, 1)
        await close(opened)

    asyncio.run(run())
    name = "metrics.jsonl" if target == "job.py:Job" else "commits.jsonl"
    (line,) = read_lines(open_folder(str(tmp_path)).at("r"), name)
    assert set(OF_OPTIMIZER) <= line.keys() if target == "job.py:Job" else line == metrics(1)


def test_a_run_that_goes_back_waits_for_no_store(place, s3):
    async def run() -> None:
        opened = recorder(place)
        await opened.open_at(0, [])
        assert opened.directory is not None
        assert opened.checkpoints is not None
        record(opened, 1, 2, 3)
        await settled(opened)
        opened.directory.flush()
        assert opened.safe_step == 3
        opened.checkpoints._known = {2, 3}
        opened.checkpoints.committed = 3
        s3.faults.is_silent = True  # a request takes half a minute
        assert await asyncio.wait_for(opened.open_at(2, []), 20) == opened.place
        assert opened.safe_step == 2, "what storage has not heard of is not safe"
        assert opened.lost_steps == 1, "the result has it, whenever the run ends"
        record(opened, 3)
        s3.faults.heal()
        await settled(opened)
        assert (opened.committed, opened.lost_steps) == (2, 1)
        await close(opened)

    asyncio.run(run())
    run_folder = open_folder(place).at("r")
    for name, steps in (("metrics.jsonl", (1, 2, 3)), ("metrics.rolledback.jsonl", (3,))):
        found = [without(line, OF_OPTIMIZER) for line in read_lines(run_folder, name)]
        assert found == [metrics(s) for s in steps]


def test_a_controller_that_goes_back_while_the_store_is_away_decides_on(tmp_path):
    """A local folder whose listing fails: a mount whose server is away."""

    async def run() -> None:
        opened = recorder(str(tmp_path))
        await opened.open_at(0, [])
        record(opened, 1, 2)
        await settled(opened)
        checkpoints = tmp_path / "r" / "checkpoints"
        with contextlib.suppress(FileNotFoundError):
            checkpoints.rmdir()
        checkpoints.write_text("no folder")
        await opened.open_at(1, [])
        await settled(opened)
        assert opened.directory is not None
        assert (opened.directory.last_step, opened.lost_steps) == (1, 1)
        os.remove(checkpoints)
        await close(opened)

    asyncio.run(run())


def test_the_next_worker_does_not_open_what_the_first_one_waits_for(place, s3):
    async def run() -> None:
        opened = recorder(place, back_after_a_pause(s3))
        s3.faults.is_unreachable = True
        await asyncio.gather(opened.open_at(0, []), opened.open_at(0, []))
        claims = [re.search(r"^PUT \S*/.claims/(\d+-\w+)", line) for line in s3.seen]
        assert len({claim[1] for claim in claims if claim}) == 1, "opened once"
        await close(opened)

    asyncio.run(run())


def test_an_end_of_the_run_ends_the_waiting(place, s3):
    async def run() -> None:
        opened = recorder(place, (100.0,))
        s3.faults.is_unreachable = True
        opening = asyncio.ensure_future(opened.open_at(0, []))
        await asyncio.sleep(0)
        await opened.close(dict, {})
        with pytest.raises(StoreAway):
            await opening
        opened.writer.executor.shutdown()

    asyncio.run(run())


def test_damaged_checkpoints_are_aside_before_the_run_goes_on(tmp_path: Path):
    async def run() -> None:
        opened = recorder(str(tmp_path))
        await opened.open_at(0, [])
        assert opened.checkpoints is not None
        for step in (2, 4):
            folder = tmp_path / "r" / "checkpoints" / f"step-{step:08d}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")
        opened.checkpoints.take_over(is_open=True)
        assert opened.committed == 4
        await opened.open_at(2, [Damage(4, "torn")])
        assert opened.committed == 2
        aside = tmp_path / "r" / "checkpoints" / "step-00000004.damaged"
        assert aside.is_dir()
        await close(opened)

    asyncio.run(run())


def test_a_successor_of_a_controller_that_had_no_sound_worker_yet_sweeps_torn_saves(tmp_path):
    torn = tmp_path / "r/checkpoints/step-00000004"
    torn.mkdir(parents=True)

    async def run() -> None:
        died = recorder(str(tmp_path))
        await died.open()
        died.record(None, None, start(died.limits, 5.0))
        await settled(died)
        died.writer.executor.shutdown()
        successor = recorder(str(tmp_path))
        past = await successor.reopen()
        assert past is not None
        assert torn.exists()
        await successor.open_at(0, [])
        assert not torn.exists()
        torn.mkdir()  # a save is on its way
        await successor.open_at(0, [])
        assert torn.exists()
        await close(successor)

    asyncio.run(run())


def test_a_save_is_published_from_the_parts_that_ranks_have_reported_and_workers_hear_of_it(
    tmp_path: Path,
):
    """Said twice, and in any order; what is given up is told, too, and leaves nothing."""

    async def run() -> None:
        opened, told = recorder(str(tmp_path)), list[tuple[int, bool]]()
        opened.publisher = publisher = Publisher(opened.writer, lambda *said: told.append(said))
        await opened.open_at(0, [])
        catalogue = Catalogue(open_folder(str(tmp_path / "r" / "checkpoints")))
        pieces = part_of(tensors(1), 0, 1)
        contents = (memoryview(np.ascontiguousarray(value)) for _, value in pieces)
        boxes, name = [box for box, _ in pieces], file_name(1, 0, 1)
        part = write_part(catalogue.prepare(3), name, boxes, contents)
        payload = SavedPart(part, {}, is_pinned=False).pack()
        for _ in range(2):
            publisher.hear(PartSaved(1, 0, 3, payload))
        publisher.conclude(Publish(1, 3))
        await settled(opened)
        assert (opened.committed, catalogue.steps(), told) == (3, [3], [(3, True)])
        publisher.hear(PartSaved(1, 0, 5, payload))
        publisher.conclude(Discard(1, 5))
        await settled(opened)
        assert (opened.committed, told[1:]) == (3, [(5, False)])
        await close(opened)

    asyncio.run(run())


def test_steps_wait_for_each_other_and_are_there_before_what_is_written_later(tmp_path: Path):
    async def run() -> None:
        opened = recorder(str(tmp_path))
        await opened.open_at(0, [])
        record(opened, 1, 2)
        assert opened.directory is not None
        assert opened.directory.last_step == 0
        found = opened.writer.write(lambda: opened.directory and opened.directory.last_step)
        assert await asyncio.wrap_future(found) == 2
        record(opened, 3)
        await asyncio.sleep(0.3)
        assert opened.directory.last_step == 3, "nothing else was to be written"
        await close(opened)

    asyncio.run(run())


def test_a_step_that_is_missing_ends_the_run_whatever_is_written_beside_it(tmp_path: Path):
    async def run() -> None:
        broken: list[str] = []
        opened = recorder(str(tmp_path))
        opened.writer._on_broken = broken.append
        await opened.open_at(0, [])
        record(opened, 1, 3)
        await settled(opened)
        assert [why.split(" cannot")[0] for why in broken] == ["record: step 3"]
        await close(opened)

    asyncio.run(run())


def test_a_steps_line_in_the_journal_waits_with_it_and_comes_before_later_ones(tmp_path: Path):
    async def run() -> None:
        opened = recorder(str(tmp_path))
        await opened.open_at(0, [])
        begun = start(opened.limits, 5.0)
        opened.record(Committed(1, 1, 0.1, 5.0), begun, begun._replace(commands=()))
        assert opened.directory is not None
        await asyncio.get_running_loop().run_in_executor(opened.writer.executor, int)
        journal = open_folder(str(tmp_path)).at("r")
        assert read_lines(journal, "journal.jsonl") == []
        opened.note("later", {"n": 1})
        await settled(opened)
        first, second = read_lines(journal, "journal.jsonl")
        assert ("later" in first, second) == (False, {"at": 5.0, "later": {"n": 1}})
        await close(opened)

    asyncio.run(run())
