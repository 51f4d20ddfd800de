"""Folders, checkpoints and run directories on a real S3 server that fails in every way."""

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.controller.publisher import Checkpoints
from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.protocol.layout import whole
from elastic.protocol.manifest import MANIFEST, Part, SavedPart
from elastic.store.catalogue import Catalogue, file_name
from elastic.store.checkpoint_files import SavedBox, write_part
from elastic.store.files import Folder, open_folder, place_of, read_json, refuse_unwritable
from elastic.store.journal import read_lines
from elastic.store.remote import read_whole
from elastic.store.run_directory import RunDirectory
from tests.object_store import FaultProxy, S3Server, uri
from tests.store.saves import assert_holds, newest_good, part_of, save, tensors
from tests.store.test_run_directory import STATUS, metrics, record

MINUTE = 60.0
BIG = os.urandom(12_000_000)  # more than one part of an upload
KEEP = (2, None)


@pytest.fixture
def place(s3: FaultProxy, s3_server: S3Server) -> str:
    return uri(s3_server.new_bucket(), "runs", s3.port)


@pytest.fixture(params=["local", "S3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """The same folder on a local disk and in S3."""
    where = str(tmp_path / "f") if request.param == "local" else request.getfixturevalue("place")
    return open_folder(where)


@pytest.fixture
def catalogue(place: str) -> Catalogue:
    return Catalogue(open_folder(place).at("checkpoints"))


@pytest.fixture
def in_a_minute():
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 1.5 * MINUTE, "the tests' machine may be busy"


def test_a_folder_in_s3_is_like_one_on_disk(folder: Folder) -> None:
    assert (folder.names(), folder.folders(), folder.exists("a")) == ([], [], False)
    folder.create()
    folder.at("a").create()
    folder.at("b").create()
    folder.at("b").write("file", b"one")
    folder.at("b").write("file", b"two")
    folder.at("b").write("empty", b"")
    assert (folder.names(), folder.folders()) == ([], ["a", "b"])
    assert folder.at("b").names() == ["empty", "file"]
    assert (folder.at("b").read("file"), folder.at("b").read("empty")) == (b"two", b"")
    folder.at("b").delete("file")
    folder.at("b").delete("file")
    folder.at("b").delete("empty")
    assert (folder.folders(), folder.at("b").names()) == (["a", "b"], [])
    folder.at("b").write("again", b"1")
    folder.move_folder("b", "c", last="again")
    folder.at("a").delete_all()
    folder.at("a").delete_all()
    assert (folder.folders(), folder.at("c").names()) == (["c"], ["again"])
    with pytest.raises(FileNotFoundError):
        folder.read("none")


def test_a_bucket_that_may_be_written_keeps_nothing_of_the_question(place: str) -> None:
    refuse_unwritable(place)
    assert open_folder(place).names() == []


def test_a_file_that_is_replaced_again_and_again_is_read_whole(place: str) -> None:
    folder = open_folder(place)
    folder.write("status.json", b"{}")
    is_over = threading.Event()

    def replace() -> None:
        for n in itertools.count(1):
            if is_over.wait(0.05):  # more often, the server itself mixes two versions
                return
            size = n % 2 * 100_000 + n  # shorter and longer, and never the same again
            folder.write("status.json", b"{" + b" " * size + b"}")

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        read = [read_json(folder, "status.json") for _ in range(50)]
    finally:
        is_over.set()
        writer.join(MINUTE)
    assert read == [{}] * 50


class DeletingOnceOpened:
    """A store whose file somebody deletes when its size has been asked for."""

    def __init__(self, filesystem: Any) -> None:
        self.filesystem = filesystem

    def open_input_file(self, path: str) -> Any:
        file = self.filesystem.open_input_file(path)
        file.size()
        self.filesystem.delete_file(path)
        return file

    def get_file_info(self, path: str) -> Any:
        return self.filesystem.get_file_info(path)


def test_a_file_that_is_deleted_while_it_is_read_is_none(place: str) -> None:
    folder = open_folder(place)
    folder.write("claim", b"{}")
    with pytest.raises(FileNotFoundError):
        read_whole(DeletingOnceOpened(folder.filesystem), folder.path_of("claim"))


def test_a_name_goes_before_the_query_of_a_uri(place: str, tmp_path: Path) -> None:
    path, _, query = place.partition("?")
    assert place_of(place, "first") == f"{path}/first?{query}"
    assert open_folder(place_of(place, "first")).path == open_folder(place).at("first").path
    assert place_of(f"file://{tmp_path}", "first") == place_of(str(tmp_path), "first")


def test_checkpoints_in_s3_are_listed_retired_swept_and_set_aside(catalogue: Catalogue) -> None:
    for step in (10, 20, 30):
        save(catalogue, step, seed=step)
    assert catalogue.retire(*KEEP) == [10]
    assert_holds(catalogue, 30, seed=30)
    assert sum(catalogue.verify(20)) == catalogue.manifest(20).size_bytes
    catalogue.of_step(30).write(MANIFEST, b"{")
    found, damaged = newest_good(catalogue)
    assert found is not None
    assert (found.step, [d.step for d in damaged]) == (20, [30])
    kept = catalogue.of_step(30).names()
    assert catalogue.set_aside(30) == "step-00000030.damaged"
    assert catalogue.folder.at("step-00000030.damaged").names() == kept
    catalogue.prepare(40)
    assert catalogue.sweep() == ["step-00000040"]
    assert catalogue.folder.folders() == ["step-00000020", "step-00000030.damaged"]
    catalogue.of_step(20).delete(catalogue.manifest(20).files[0].name)
    with pytest.raises(DamagedCheckpoint, match="the file is missing"):
        list(catalogue.verify(20))


def test_a_save_that_is_given_up_leaves_no_file(catalogue: Catalogue) -> None:
    box, value = part_of(tensors(1), 0, 1)[0]
    other = SavedBox("other", box.dtype, box.tensor_shape, box.box)

    def contents():
        yield memoryview(np.ascontiguousarray(value))
        raise KeyError("given up")

    folder = catalogue.prepare(10)
    with pytest.raises(KeyError):
        write_part(folder, file_name(1, 0, 1), [box, other], contents())
    assert folder.names() == []


@pytest.mark.usefixtures("in_a_minute")
@pytest.mark.parametrize("fault", ["cut", "errors", "unreachable"])
def test_a_torn_upload_is_no_checkpoint_and_the_next_save_works(
    s3: FaultProxy, catalogue: Catalogue, fault: str
) -> None:
    save(catalogue, 10, seed=1)
    catalogue.prepare(20)
    match fault:
        case "cut":
            s3.faults.cut_upload_after = 3_000_000
        case "errors":
            s3.faults.errors = 1_000
        case _:
            s3.faults.is_unreachable = True
    box = SavedBox("x", "uint8", (len(BIG),), whole((len(BIG),)))
    with pytest.raises(OSError, match="AWS Error"):
        write_part(catalogue.of_step(20), file_name(1, 0, 1), [box], [memoryview(BIG)])
    s3.faults.heal()
    assert catalogue.of_step(20).names() == []
    assert catalogue.steps() == [10]
    catalogue.discard(20, generation=1)
    assert catalogue.folder.folders() == ["step-00000010"]
    save(catalogue, 30, seed=3)
    assert_holds(catalogue, 30, seed=3)
    assert_holds(catalogue, 10, seed=1)


def test_a_few_errors_and_a_slow_line_are_only_slow(s3: FaultProxy, catalogue: Catalogue) -> None:
    s3.faults.errors = 2
    s3.faults.bytes_per_s = 20e6
    save(catalogue, 10, seed=1)
    s3.faults.errors = 2
    assert_holds(catalogue, 10, seed=1)


@pytest.mark.usefixtures("in_a_minute")
def test_a_store_that_is_away_says_nothing_about_its_checkpoints(
    s3: FaultProxy, catalogue: Catalogue
) -> None:
    save(catalogue, 10, seed=1)
    blocks = catalogue.verify(10)
    next(blocks)
    s3.faults.is_unreachable = True
    with pytest.raises(OSError, match="AWS Error"):
        newest_good(catalogue)
    with pytest.raises(OSError, match="AWS Error"):
        list(blocks)
    s3.faults.heal()
    assert_holds(catalogue, 10, seed=1)


@pytest.mark.usefixtures("in_a_minute")
def test_a_manifest_that_cannot_be_written_is_no_checkpoint_and_goes_with_the_next(
    s3: FaultProxy, place: str, tmp_path: Path
) -> None:
    lines: list[dict[str, object]] = []
    run = RunDirectory(place, "r", spool=tmp_path / "spool")
    checkpoints = Checkpoints(run, keep=KEEP, about={}, run_id="0", journal=lines.append)
    catalogue = Catalogue(run.folder.at("checkpoints"))
    save(catalogue, 10, seed=1)
    catalogue.of_step(20).create()
    saved = save(Catalogue(run.folder.at("elsewhere")), 20, seed=2, world_size=1)
    name = saved.files[0].name
    content = run.folder.at("elsewhere").at("step-00000020").read(name)
    catalogue.of_step(20).write(name, content)
    s3.faults.errors, s3.faults.only = 1_000, MANIFEST
    packed = SavedPart(Part(saved.files[0], saved.tensors), {}, is_pinned=False).pack()
    with pytest.raises(OSError, match="AWS Error"):
        checkpoints.publish(1, 20, [packed])
    assert checkpoints.committed is None
    s3.faults.heal()
    assert catalogue.steps() == [10]
    catalogue.of_step(30).write(name, content)
    checkpoints.publish(1, 30, [packed])
    assert catalogue.folder.folders() == ["step-00000010", "step-00000030"]
    assert [line["published"] for line in lines] == [30]
    run.close()


@pytest.mark.usefixtures("in_a_minute")
def test_a_run_directory_grows_by_segments_and_survives_an_outage(
    s3: FaultProxy, place: str, tmp_path: Path
) -> None:
    run = RunDirectory(place, "r", spool=tmp_path / "spool")
    assert run.place == place_of(place, "r")
    run.begin({"steps": 6})
    record(run, range(1, 3))
    run.write_status(STATUS)
    run.flush()
    s3.faults.errors = 1_000
    record(run, range(3, 5))
    with pytest.raises(OSError, match="AWS Error"):
        run.flush()
    s3.faults.heal()
    record(run, range(5, 6))
    run.flush()
    seen = open_folder(run.place)
    assert read_lines(seen, "metrics.jsonl") == [metrics(s) for s in range(1, 6)]
    assert read_json(seen, "status.json") == STATUS
    # the controller is killed here; another one opens the run on another node
    again = RunDirectory(place, "r", spool=tmp_path / "other")
    assert again.last_step == 5
    assert again.roll_back(3) == 2
    record(again, range(4, 6), attempt=1)
    (again.logs / "w0.log").write_text("hello\n")
    again.close()
    assert read_lines(seen, "metrics.rolledback.jsonl") == [metrics(4), metrics(5)]
    assert read_lines(seen, "metrics.jsonl") == [
        metrics(s, attempt=a) for s, a in itertools.zip_longest(range(1, 6), (0, 0, 0, 1, 1))
    ]
    names = ["metrics.jsonl", "metrics.rolledback.jsonl", "samples.jsonl", "status.json"]
    assert seen.names() == ["anatomy.jsonl", "config.json", "journal.jsonl", *names]
    assert seen.at("logs").read("w0.log") == b"hello\n"


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_minute")
def test_a_store_that_never_answers_is_given_up_within_a_minute(s3: FaultProxy, place: str) -> None:
    folder = open_folder(place)
    folder.write("file", b"one")
    s3.faults.is_silent = True
    with pytest.raises(OSError, match="AWS Error"):
        folder.write("file", b"two")
    s3.faults.heal()
    assert folder.read("file") == b"one"


def test_a_bucket_that_does_not_exist_is_wrong_input(s3: FaultProxy) -> None:
    with pytest.raises(WrongInput, match="cannot be created"):
        RunDirectory(uri("nobody-made-it", "runs", s3.port), "r")
