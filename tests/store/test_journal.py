"""Line files: torn ends, tails, and segments where storage cannot append."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.fs as arrow_fs
import pytest

from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, open_folder
from elastic.store.journal import (
    LineFile,
    LineTail,
    lines_backwards,
    read_backwards,
    read_lines,
    segment_name,
)


def object_store(path: Path) -> Folder:
    path.mkdir(exist_ok=True)
    return Folder(arrow_fs.SubTreeFileSystem(str(path), arrow_fs.LocalFileSystem()), "")


@dataclass(frozen=True)
class Told(Folder):
    """An object store that tells what was read of it, and what happens before that."""

    reads: list[str] = field(default_factory=list[str])
    before: dict[str, Any] = field(default_factory=dict[str, Any])

    def read(self, name: str) -> bytes:
        self._tell(name)
        return super().read(name)

    def open(self, name: str) -> Any:
        self._tell(name)
        return super().open(name)

    def _tell(self, name: str) -> None:
        self.reads.append(name)
        self.before.pop(name, int)()


def told(path: Path) -> Told:
    folder = object_store(path)
    return Told(folder.filesystem, folder.path)


def lines(count: int, start: int = 0) -> list[dict[str, int]]:
    return [{"n": n} for n in range(start, start + count)]


@pytest.mark.parametrize("torn", [b'{"n": 2', b'{"n": 2\n', b"\0\0\0\0", b'{"n": 2}'])
def test_a_torn_last_line_is_not_read_and_is_dropped_before_the_next_is_appended(tmp_path, torn):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"n":0}\n{"n":1}\n' + torn)
    assert read_lines(open_folder(str(tmp_path)), path.name) == lines(2)
    file = LineFile(path)
    file.append({"n": 2})
    file.close()
    assert path.read_bytes() == b'{"n":0}\n{"n":1}\n{"n":2}\n'


def test_damage_before_the_last_line_is_named(tmp_path):
    (tmp_path / "journal.jsonl").write_bytes(b'{"n":0}\n{"n"\n{"n":2}\n')
    with pytest.raises(WrongInput, match=r"journal\.jsonl line 2 is damaged"):
        read_lines(open_folder(str(tmp_path)), "journal.jsonl")


def test_a_missing_file_has_no_lines(tmp_path):
    assert read_lines(open_folder(str(tmp_path)), "journal.jsonl") == []


def test_lines_come_backwards_with_their_offsets_across_blocks(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"first\n\nlonger than a block\ntorn")
    assert list(lines_backwards(path, block_bytes=5)) == [
        (27, b"torn"),
        (7, b"longer than a block\n"),
        (6, b"\n"),
        (0, b"first\n"),
    ]


def test_a_torn_last_line_of_many_blocks_is_read_once(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"n":0}\n' + b"\0" * (64 << 20))
    began = time.process_time()
    file = LineFile(path)
    file.close()
    assert (path.read_bytes(), time.process_time() - began < 10) == (b'{"n":0}\n', True)


@pytest.mark.parametrize("foreign", [b"[1]", b"7", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_line_that_is_no_object_is_damage_wherever_it_is(tmp_path, foreign):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"n":0}\n' + foreign + b'\n{"n":1}\n')
    with pytest.raises(WrongInput, match=r"journal\.jsonl line 2 is damaged"):
        read_lines(open_folder(str(tmp_path)), path.name)
    path.write_bytes(b'{"n":0}\n' + foreign + b"\n")
    file = LineFile(path)
    file.close()
    assert path.read_bytes() == b'{"n":0}\n'


def test_a_line_is_in_the_file_when_append_returns(tmp_path):
    file = LineFile(tmp_path / "a.jsonl")
    file.append({"loss": float("nan")})
    assert (tmp_path / "a.jsonl").read_bytes() == b'{"loss":null}\n'
    file.close()


def test_a_tail_gives_each_whole_line_once(tmp_path):
    path, tail = tmp_path / "m.jsonl", LineTail(open_folder(str(tmp_path)), "m.jsonl")
    assert tail.poll() == []
    path.write_bytes(b'{"n":0}\n{"n"')
    assert tail.poll() == lines(1)
    path.write_bytes(b'{"n":0}\n{"n":1}\n')
    assert (tail.poll(), tail.poll()) == (lines(1, 1), [])
    path.write_bytes(b'{"n":0}\n')
    assert tail.poll() == lines(1)


def test_segments_are_read_as_one_file_and_joined_at_the_end(tmp_path):
    remote = object_store(tmp_path / "remote")
    file = LineFile(tmp_path / "m.jsonl", remote)
    tail = LineTail(remote, "m.jsonl")
    for start in (0, 3):
        for line in lines(3, start):
            file.append(line)
        file.upload()
        file.upload()  # nothing new: no empty segment
        assert tail.poll() == lines(3, start)
    assert remote.names() == ["m.jsonl", "m.jsonl.000000000000000", "m.jsonl.000000000000024"]
    assert read_lines(remote, "m.jsonl") == lines(6)
    file.close()
    assert (remote.names(), read_lines(remote, "m.jsonl")) == (["m.jsonl"], lines(6))


def test_a_writer_on_another_machine_goes_on_where_the_segments_end(tmp_path):
    remote = object_store(tmp_path / "remote")
    lost = LineFile(tmp_path / "m.jsonl", remote)
    for line in lines(3):
        lost.append(line)
    lost.upload()  # and its machine is gone: never joined
    (tmp_path / "other").mkdir()
    file = LineFile(tmp_path / "other" / "m.jsonl", remote)
    file.append({"n": 3})
    file.upload()
    assert read_lines(remote, "m.jsonl") == lines(4)


def test_a_segment_that_was_joined_before_does_not_count_twice(tmp_path):
    remote = object_store(tmp_path / "remote")
    remote.write("m.jsonl", b'{"n":0}\n{"n":1}\n')
    remote.write("m.jsonl.000000000000008", b'{"n":1}\n')  # its deletion did not happen
    remote.write("m.jsonl.000000000000016", b'{"n":2}\n')
    assert read_lines(remote, "m.jsonl") == lines(3)


def test_truncating_takes_back_what_was_uploaded(tmp_path):
    remote = object_store(tmp_path / "remote")
    file = LineFile(tmp_path / "m.jsonl", remote)
    for n in range(4):
        file.append({"n": n})
        file.upload()
    file.truncate(16)
    assert (remote.names(), read_lines(remote, "m.jsonl")) == (["m.jsonl"], lines(2))
    file.append({"n": 2})
    file.close()
    assert read_lines(remote, "m.jsonl") == lines(3)


def test_reading_backwards_takes_the_newest_segments_only_then_the_file(tmp_path):
    remote = told(tmp_path / "remote")
    file = LineFile(tmp_path / "m.jsonl", remote, is_new=True)
    file.append({"n": 0})
    file.join()
    for n in range(1, 300):
        file.append({"n": n})
        if n % 3 == 0:
            file.upload()
    file.upload()
    remote.write(segment_name("m.jsonl", 12), b'{"n":-1}\n')  # left by a join, part of it by now
    found = read_backwards(remote, "m.jsonl")
    assert [next(found)["n"] for _ in range(5)] == [299, 298, 297, 296, 295]
    assert len(remote.reads) == 2
    assert [line["n"] for line in found] == list(range(294, -1, -1))
    assert (len(remote.reads), remote.reads[-1]) == (26, "m.jsonl")  # five of them were merged


def test_a_long_file_in_a_bucket_is_read_backwards_in_parts(tmp_path):
    remote = object_store(tmp_path / "remote")
    content = b"".join(b'{"n":%d,"text":"%s"}\n' % (n, b"x" * 5_000) for n in range(1_000))
    remote.write("m.jsonl", content)
    found = [line["n"] for line in read_backwards(remote, "m.jsonl")]
    assert found == list(range(999, -1, -1))


@pytest.mark.parametrize("num_taken", [0, 1, 4])
def test_a_file_that_is_joined_while_it_is_read_backwards_gives_each_line_once(tmp_path, num_taken):
    remote = told(tmp_path / "remote")
    file = LineFile(tmp_path / "m.jsonl", remote)
    for start in (0, 3, 6):
        for line in lines(3, start):
            file.append(line)
        file.upload()
    found = read_backwards(remote, "m.jsonl")
    taken = [next(found) for _ in range(num_taken)]
    file.join()
    assert [*taken, *found] == lines(9)[::-1]
    assert list(read_backwards(remote, "none.jsonl")) == []


@pytest.mark.parametrize("name", ["m.jsonl", "m.jsonl.000000000000024"])
def test_a_file_that_is_joined_while_it_is_read_is_whole(tmp_path, name):
    remote = told(tmp_path / "remote")
    file = LineFile(tmp_path / "m.jsonl", remote)
    for start in (0, 3):
        for line in lines(3, start):
            file.append(line)
        file.upload()
    remote.before[name] = file.join
    assert read_lines(remote, "m.jsonl") == lines(6)
    assert not remote.before


def test_many_segments_are_joined_in_linear_time(tmp_path):
    remote = told(tmp_path / "remote")
    line = json.dumps({"text": "x" * 20_000}).encode() + b"\n"
    for n in range(3_000):
        remote.write(segment_name("m.jsonl", n * len(line)), line)
    began = time.process_time()
    assert len(read_lines(remote, "m.jsonl")) == 3_000
    assert time.process_time() - began < 10
