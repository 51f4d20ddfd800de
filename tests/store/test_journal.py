"""Line files: torn ends, tails, and segments where storage cannot append."""

from pathlib import Path

import pyarrow.fs as arrow_fs
import pytest

from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, open_folder
from elastic.store.journal import LineFile, LineTail, lines_backwards, read_lines


def object_store(path: Path) -> Folder:
    path.mkdir(exist_ok=True)
    return Folder(arrow_fs.SubTreeFileSystem(str(path), arrow_fs.LocalFileSystem()), "")


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
