"""Checkpoint files, manifests, the catalogue: nothing is half there, no alteration is believed."""

import builtins
import errno
import fcntl
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.protocol.layout import whole
from elastic.protocol.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    Chunk,
    Manifest,
    Part,
    StoredFile,
    StoredTensor,
    check_cover,
    decode,
    merge,
)
from elastic.store.catalogue import Catalogue, file_name, folder_name
from elastic.store.checkpoint_files import SavedBox, write_part
from elastic.store.checkpoint_reading import PartReader
from elastic.store.files import Folder, open_folder
from tests.store.saves import assert_holds, newest_good, part_of, save, tensors


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(open_folder(str(tmp_path / "checkpoints")))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_was_saved_is_read_whoever_wrote_it(catalogue: Catalogue, world_size: int) -> None:
    save(catalogue, 100, seed=1, world_size=world_size)
    assert catalogue.steps() == [100]
    assert_holds(catalogue, 100, seed=1)
    assert sum(catalogue.verify(100)) == catalogue.manifest(100).size_bytes
    assert catalogue.strangers(100) == []


def test_each_file_opens_with_safetensors_alone(catalogue: Catalogue) -> None:
    manifest = save(catalogue, 1, seed=1, world_size=3)
    folder = catalogue.of_step(1).local
    assert folder is not None
    rows = [load_file(folder / file.name)["model/a"] for file in manifest.files]
    assert np.array_equal(np.concatenate(rows), tensors(1)["model/a"])


def test_filesystems_that_must_go_through_the_page_cache_hold_the_same(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_open, original_write = os.open, os.write
    says_no_at = ["open"]

    def open_(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and "open" in says_no_at:
            raise OSError(errno.EINVAL, "no direct writes")
        return original_open(path, flags, *rest)

    def write(file: int, content: memoryview) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes after all")
        return original_write(file, content)

    direct = save(catalogue, 1, seed=1)
    monkeypatch.setattr(os, "open", open_)
    assert save(catalogue, 2, seed=1).files == direct.files
    says_no_at[:] = ["write"]
    monkeypatch.setattr(os, "write", write)
    assert save(catalogue, 3, seed=1).files == direct.files
    for step in (1, 2, 3):
        assert_holds(catalogue, step, seed=1)


def test_a_manifest_comes_back_equal_and_shows_every_alteration(catalogue: Catalogue) -> None:
    manifest = save(catalogue, 7, seed=1)
    content = manifest.encode()
    assert decode(content, "m") == manifest
    assert json.loads(content)["step"] == 7
    dice = random.Random(0)
    for _ in range(200):
        at, bit = dice.randrange(len(content)), dice.randrange(8)
        altered = bytearray(content)
        altered[at] ^= 1 << bit
        with pytest.raises(DamagedCheckpoint):
            decode(bytes(altered), "m")
    for size in (0, 1, len(content) // 2, len(content) - 1):
        with pytest.raises(DamagedCheckpoint):
            decode(content[:size], "m")


@pytest.mark.parametrize(
    ("altered", "complaint"),
    [
        ({"files": 3}, "not iterable"),
        ({"about": None}, "not iterable"),
        ({"files": [StoredFile("../part", 1, ())]}, "no file of this folder"),
        ({"files": [StoredFile("pa\0rt", 1, (1,))]}, "no file of this folder"),
        ({"files": [StoredFile("part", BLOCK_BYTES + 1, (1,))]}, "has 1 checksums"),
        ({"files": []}, "part"),
        ({"tensors": [StoredTensor("a", "float32", (2,), ())]}, "elements saved"),
    ],
)
def test_a_manifest_that_somebody_made_up_is_damaged(
    catalogue: Catalogue, altered: dict[str, Any], complaint: str
) -> None:
    content = replace(save(catalogue, 7, seed=1), **altered).encode()
    with pytest.raises(DamagedCheckpoint, match=f"sealed, but no manifest: .*{complaint}"):
        decode(content, "m")


def test_a_thousand_flipped_bits_are_found_one_by_one(catalogue: Catalogue) -> None:
    manifest = save(catalogue, 5, seed=1)
    folder = catalogue.of_step(5).local
    assert folder is not None
    names = [file.name for file in manifest.files]
    dice = random.Random(1)
    for _ in range(1000):
        path = folder / dice.choice([*names, *names, MANIFEST])
        at, bit = dice.randrange(path.stat().st_size), dice.randrange(8)
        flip(path, at, bit)
        with pytest.raises(DamagedCheckpoint, match=path.name):
            list(catalogue.verify(5))
        flip(path, at, bit)
    assert_holds(catalogue, 5, seed=1)


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_damage_is_named(catalogue: Catalogue) -> None:
    manifest = save(catalogue, 5, seed=1)
    folder = catalogue.of_step(5).local
    assert folder is not None
    path = folder / manifest.files[1].name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DamagedCheckpoint, match=f"{len(content) - 1} bytes, {len(content)} were"):
        list(catalogue.verify(5))
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=r"the file is missing"):
        list(catalogue.verify(5))
    path.write_bytes(content)
    (folder / "stranger.txt").write_text("hello")
    assert catalogue.strangers(5) == ["stranger.txt"]
    (catalogue.folder.local / folder_name(6)).mkdir()  # type: ignore[operator]
    (catalogue.folder.local / folder_name(6) / MANIFEST).write_bytes(manifest.encode())  # type: ignore[operator]
    with pytest.raises(DamagedCheckpoint, match="of step 5: a foreign file"):
        catalogue.manifest(6)


def test_the_newest_good_one_is_found_and_the_damaged_are_told(catalogue: Catalogue) -> None:
    save(catalogue, 10, seed=1)
    save(catalogue, 20, seed=2)
    save(catalogue, 30, seed=3)
    local = catalogue.of_step(30).local
    assert local is not None
    (local / MANIFEST).write_text("{")
    found, damaged = newest_good(catalogue)
    assert found is not None
    assert (found.step, [d.step for d in damaged]) == (20, [30])
    assert catalogue.set_aside(30) == "step-00000030.damaged"
    assert catalogue.steps() == [10, 20]
    save(catalogue, 30, seed=3)
    assert catalogue.set_aside(30) == "step-00000030.damaged1"
    assert newest_good(Catalogue(catalogue.folder.at("none"))) == (None, [])


def test_retention_keeps_the_last_the_multiples_and_the_pinned(catalogue: Catalogue) -> None:
    for step in (10, 20, 30, 40, 50):
        save(catalogue, step, seed=step, world_size=1, is_pinned=step == 10)
    assert catalogue.retire(last=2, every=20) == [30]
    assert catalogue.steps() == [10, 20, 40, 50]
    (Path(catalogue.of_step(50).path) / MANIFEST).write_text("{")  # damaged, so not one of the two
    assert catalogue.retire(last=0, every=None) == []
    assert catalogue.steps() == [10, 20, 40, 50]


def test_a_torn_save_is_no_checkpoint_and_is_swept_away(catalogue: Catalogue) -> None:
    save(catalogue, 10, seed=1)
    folder = catalogue.prepare(20)
    box, value = part_of(tensors(1), 0, 1)[0]
    write_part(folder, file_name(3, 0, 2), [box], [memoryview(value)])
    assert catalogue.steps() == [10]
    catalogue.discard(20, generation=2)  # another generation's files stay
    assert folder.names() == [file_name(3, 0, 2)]
    save(catalogue, 20, seed=2, generation=4)  # publishing removes what is torn
    assert catalogue.strangers(20) == []
    catalogue.prepare(30)
    assert catalogue.sweep() == ["step-00000030"]
    catalogue.prepare(30)
    catalogue.discard(30, generation=1)
    assert catalogue.folder.folders() == ["step-00000010", "step-00000020"]


def test_a_published_file_is_never_written_again_by_a_later_launch(catalogue: Catalogue) -> None:
    save(catalogue, 10, seed=1)
    names = {file_name(1, rank, 2, launch) for rank in (0, 1) for launch in ("0", "ab12")}
    assert len(names) == 4


def test_publishing_leaves_a_later_generation_alone_and_checks_what_it_names(
    catalogue: Catalogue,
) -> None:
    """A member is lost at the end: the others write the same step again."""
    folder = catalogue.prepare(10)
    (box, value), *_ = part_of(tensors(1), 0, 1)
    later = file_name(3, 0, 1)
    write_part(folder, later, [box], [memoryview(value)])
    save(catalogue, 10, seed=1, generation=2)
    assert later in folder.names()
    part = write_part(folder, file_name(4, 0, 1), [box], [memoryview(value)])
    folder.delete(file_name(4, 0, 1))
    with pytest.raises(OSError, match="is not there as it was written"):
        catalogue.publish(10, 4, [part], {}, {})
    assert_holds(catalogue, 10, seed=1)


def test_a_sound_checkpoint_is_never_replaced_by_another_of_its_step(catalogue: Catalogue) -> None:
    save(catalogue, 10, seed=1, generation=2)
    kept = save(catalogue, 10, seed=9, generation=3, is_pinned=True)
    assert (kept.generation, kept.about) == (2, {"seed": 1, "is_pinned": True})
    assert catalogue.manifest(10) == kept
    assert catalogue.strangers(10) == []
    assert_holds(catalogue, 10, seed=1)


def test_a_checkpoint_whose_files_are_gone_is_written_again(catalogue: Catalogue) -> None:
    name = save(catalogue, 10, seed=1, generation=2).files[0].name
    catalogue.of_step(10).delete(name)
    save(catalogue, 10, seed=9, generation=3)
    assert_holds(catalogue, 10, seed=9)


def test_retention_counts_only_checkpoints_whose_files_are_there(catalogue: Catalogue) -> None:
    for step in (1, 2, 3):
        save(catalogue, step, seed=step)
    for step in (2, 3):
        for file in catalogue.manifest(step).files:
            catalogue.of_step(step).delete(file.name)
    assert catalogue.retire(last=2, every=None) == []
    assert 1 in catalogue.steps()


def test_saves_that_were_never_whole_go_when_a_later_one_is_published(catalogue: Catalogue) -> None:
    folder = catalogue.prepare(10)
    (box, value), *_ = part_of(tensors(1), 0, 1)
    write_part(folder, file_name(1, 0, 2), [box], [memoryview(value)])
    catalogue.prepare(30)
    save(catalogue, 20, seed=2)
    assert catalogue.folder.folders() == ["step-00000020", "step-00000030"]


SILENT_ERRORS = (errno.EMFILE, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
"""What says nothing about a file: a limit of this process, a mount whose server is away."""


@pytest.mark.parametrize("number", SILENT_ERRORS)
def test_a_manifest_that_cannot_be_read_now_is_no_damage(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for step in (10, 20):
        save(catalogue, step, seed=1)

    def fail(*_: object, **__: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", fail)
    for look in (lambda: catalogue.manifest(20), lambda: newest_good(catalogue)):
        with pytest.raises(OSError, match=os.strerror(number)):
            look()


@pytest.mark.parametrize("number", SILENT_ERRORS)
def test_blocks_that_cannot_be_read_now_are_no_damage(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(catalogue, 10, seed=1)
    preadv, calls = os.preadv, itertools.count()

    def fail_late(*arguments: Any) -> int:
        if next(calls):
            raise OSError(number, os.strerror(number))
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", fail_late)
    with pytest.raises(OSError, match=os.strerror(number)):
        list(catalogue.verify(10))


def test_parts_that_make_no_whole_are_refused(catalogue: Catalogue) -> None:
    manifest = save(catalogue, 10, seed=1, world_size=2)
    one = Part(manifest.files[0], part_tensors(manifest, manifest.files[0].name))
    two = Part(manifest.files[1], part_tensors(manifest, manifest.files[1].name))
    assert len(merge([one, two])[1]) == 5
    with pytest.raises(ValueError, match=r"350000 of 700000 elements saved"):
        merge([one])
    with pytest.raises(ValueError, match=r"1050000 of 700000 elements"):
        merge([one, two, two])


def part_tensors(manifest: Manifest, file: str):
    found = []
    for t in manifest.tensors:
        chunks = tuple(c for c in t.chunks if c.file == file)
        if chunks:
            found.append(type(t)(t.name, t.dtype, t.shape, chunks))
    return tuple(found)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_of_many_chunks_is_checked_in_time(dim: int) -> None:
    count = 4000
    shape = (count, 8) if dim == 0 else (8, count)
    starts = [tuple(n if d == dim else 0 for d in (0, 1)) for n in range(count)]
    chunk_shape = tuple(1 if d == dim else 8 for d in (0, 1))
    chunks = tuple(Chunk(start, chunk_shape, "f", 0) for start in starts)
    began = time.process_time()
    check_cover(StoredTensor("x", "int8", shape, chunks))
    assert time.process_time() - began < 5
    with pytest.raises(ValueError, match="saved twice"):
        check_cover(StoredTensor("x", "int8", shape, (chunks[0], *chunks[:-1])))


def test_a_dtype_without_a_word_is_refused_by_name(catalogue: Catalogue) -> None:
    box = SavedBox("x", "complex128", (1,), whole((1,)))
    with pytest.raises(WrongInput, match=r"'x' is complex128"):
        write_part(catalogue.prepare(1), "f", [box], [memoryview(np.zeros(1, np.complex128))])


def test_a_range_reads_whole_blocks_and_nothing_else(catalogue: Catalogue) -> None:
    value = np.arange(3 * BLOCK_BYTES // 8, dtype=np.int64)
    box = SavedBox("x", "int64", value.shape, whole(value.shape))
    folder = catalogue.prepare(1)
    part = write_part(folder, "f", [box], [memoryview(value)])
    assert len(part.file.blocks) == 4
    flip(Path(folder.path) / "f", part.file.size_bytes - 1, 0)  # in the last block
    chunk = part.tensors[0].chunks[0]
    with PartReader(folder, part.file) as reader:
        pieces = [bytes(piece) for piece in reader.read(chunk.offset + 8000, BLOCK_BYTES)]
        assert b"".join(pieces) == value.tobytes()[8000 : 8000 + BLOCK_BYTES]
        with pytest.raises(DamagedCheckpoint):
            list(reader.read(chunk.offset, value.nbytes))


class Doom:
    """SIGKILL of this process before its n-th call that opens, writes, syncs or renames a file."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return call

    def hang_over(self) -> None:
        """Over the standard library of this process, for good."""
        os.open, os.write = self.counted(os.open), self.counted(os.write)
        os.fsync = self.counted(os.fsync)
        Path.replace = self.counted(Path.replace)
        original = self.counted(Path.open)
        Path.open = lambda *a, **k: _Doomed(original(*a, **k), self)  # type: ignore[method-assign]


class _Doomed:
    """An open file."""

    def __init__(self, file: Any, doom: Doom) -> None:
        self._file, self.write = file, doom.counted(file.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_Doomed":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def in_a_child(work: Callable[[], int]) -> int:
    """`work` in a fork of this process; its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 255
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_call_leaves_the_previous_checkpoint(
    catalogue: Catalogue, every: int
) -> None:
    """One by one, at more than a hundred calls of one save."""
    save(catalogue, 10, seed=1)

    tensors(2)  # once, for all children

    def save_until(calls: int) -> int:
        doom = Doom(calls)
        doom.hang_over()
        save(catalogue, 20, seed=2, world_size=20)
        return min(calls - doom.left, 254)

    num_calls = in_a_child(lambda: save_until(10**6))
    catalogue.of_step(20).delete_all()
    assert 100 <= num_calls < 254
    found: list[int] = []
    tried = [calls for calls in range(num_calls) if calls % every == 0 or calls > num_calls - 10]
    for calls in tried:
        assert in_a_child(lambda n=calls: save_until(n)) == -signal.SIGKILL
        manifest, damaged = newest_good(catalogue)
        assert manifest is not None
        assert not damaged
        assert_holds(catalogue, manifest.step, seed=manifest.step // 10)
        found.append(manifest.step)
        catalogue.of_step(20).delete_all()
    num_early = sum(calls < 100 for calls in tried)
    assert found[:num_early] == [10] * num_early
    assert found == sorted(found), "once published it stays"


def test_no_pickle_is_ever_read(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    save(catalogue, 10, seed=1)
    original = builtins.__import__

    def guarded(name: str, *arguments: object, **named: object):
        assert "pickle" not in name
        return original(name, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", guarded)
    for module in ("pickle", "_pickle"):
        monkeypatch.setitem(sys.modules, module, None)
    assert_holds(catalogue, 10, seed=1)


def test_a_checkpoint_of_another_filesystem_object_is_the_same(tmp_path: Path) -> None:
    """Through a pyarrow filesystem that cannot append, as object stores are."""
    import pyarrow.fs

    inner = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    catalogue = Catalogue(Folder(inner, "checkpoints"))
    save(catalogue, 10, seed=1)
    save(catalogue, 20, seed=2)
    assert catalogue.steps() == [10, 20]
    assert_holds(catalogue, 20, seed=2)
    assert catalogue.set_aside(20) == "step-00000020.damaged"
    assert_holds(catalogue, 10, seed=1)
