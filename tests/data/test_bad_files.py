"""`on_bad_file="skip"`: what is left out, what only looks bad, how a later start knows."""

import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.data import parquet
from elastic.data.crashing import crashes
from elastic.data.footers import make_plan
from elastic.data.reading import Unreachable, read_window
from elastic.data.record import FeedRecord, open_record
from elastic.data.stream import WindowKey
from elastic.protocol.errors import BadData, WrongInput
from elastic.store.files import open_folder
from tests.data.histories import ROWS, SEED, LocalFeed, write_rows


@pytest.fixture
def source(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return parquet(write_rows(tmp_path / "set"), window_bytes=300, on_bad_file="skip")


def damage(folder) -> None:
    """One row group of p2.parquet: its bytes are overwritten."""
    path = folder / "p2.parquet"
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    content[start + 4 : start + 60] = bytes(56)
    path.write_bytes(content)


def walk(feed) -> list[int]:
    """The rows of an epoch and a half, window by window."""
    found, at = [], 0
    while at < 3 * ROWS // 2:
        window = feed.window_at(at, at, lambda: False)
        found += window.rows.table["row"].to_pylist()
        at = window.end
    return found


def test_a_window_with_rows_left_out_is_served_once_the_run_directory_knows(source, tmp_path):
    damage(tmp_path / "set")
    feed, at, left_out = LocalFeed(source, tmp_path), 0, {}
    while not left_out:
        left_out = dict(feed.record.skipped)
        at = feed.window_at(at, at, lambda: False).end
    known = json.loads((tmp_path / "data.json").read_text())  # a killed feed writes no more
    feed.close()
    expected = [[k.epoch, k.window, *units] for k, units in left_out.items()]
    assert [entry for entry in expected if entry not in known["skipped"]] == []


def test_row_groups_that_are_left_out_are_counted_and_stay_out_when_they_are_repaired(
    source, tmp_path
):
    content = (tmp_path / "set" / "p2.parquet").read_bytes()
    damage(tmp_path / "set")
    feed = LocalFeed(source, tmp_path)
    rows = walk(feed)
    feed.close()
    assert {note["row_groups_left_out"] for note in feed.notes} == {1}
    assert {note["epoch"] for note in feed.notes} >= {0}
    (tmp_path / "set" / "p2.parquet").write_bytes(content)
    again = LocalFeed(source, tmp_path)
    assert walk(again)[:ROWS] == rows[:ROWS]
    again.close()


def test_what_was_used_is_not_left_out_later_and_the_reason_is_the_file(source, tmp_path):
    feed = LocalFeed(source, tmp_path)
    walk(feed)
    feed.close()
    damage(tmp_path / "set")
    again = LocalFeed(source, tmp_path)
    with pytest.raises(BadData, match=r"p2.parquet, row group 1: cannot be read.*was read before"):
        walk(again)
    again.close()


def test_a_run_that_left_rows_out_does_not_go_on_without_the_setting(source, tmp_path):
    damage(tmp_path / "set")
    feed = LocalFeed(source, tmp_path)
    walk(feed)
    feed.close()
    strict = parquet(tmp_path / "set", window_bytes=300)
    with pytest.raises(
        WrongInput, match=r"left out row groups in \d+ windows; go on with on_bad_fil"
    ):
        open_record(make_plan(strict, SEED), str(tmp_path))


class Passing(pq.ParquetFile):
    """pyarrow's, that cannot read a few times."""

    troubles: list[Exception] = []  # noqa: RUF012

    def read_row_group(self, *args, **options):
        if self.troubles:
            raise self.troubles.pop()
        return super().read_row_group(*args, **options)


def all_rows(plan) -> list[int]:
    windows = [read_window(plan, 0, w)[0] for w in range(len(plan.windows(0)))]
    return sorted(np.concatenate([w.table["row"].to_numpy() for w in windows]).tolist())


def test_trouble_that_passes_leaves_nothing_out(source, monkeypatch):
    plan = make_plan(source, SEED)
    monkeypatch.setattr(pq, "ParquetFile", Passing)
    monkeypatch.setattr(Passing, "troubles", [OSError("stale file handle")])
    assert all_rows(plan) == list(range(ROWS))
    monkeypatch.setattr(Passing, "troubles", [pa.ArrowMemoryError("malloc failed")])
    with pytest.raises(Unreachable, match=r"p\d.parquet, row group \d+: no memory to read it: mal"):
        read_window(plan, 0, 0)


def test_a_mount_that_a_node_lacks_is_no_bad_file(source, tmp_path):
    plan = make_plan(source, SEED)
    (tmp_path / "set").rename(tmp_path / "elsewhere")
    with pytest.raises(Unreachable, match=r"p\d.parquet, row group \d+: cannot be read"):
        read_window(plan, 0, 0)
    (tmp_path / "set").mkdir()
    with pytest.raises(Unreachable, match=r"p\d.parquet, row group \d+: cannot be read"):
        read_window(plan, 0, 0)
    (tmp_path / "elsewhere").rename(tmp_path / "set")
    (tmp_path / "set" / "p2.parquet").unlink()
    skipped = [s for w in range(len(plan.windows(0))) for s in read_window(plan, 0, w)[1]]
    assert {plan.units[s.unit].file.path for s in skipped} == {str(tmp_path / "set/p2.parquet")}


def test_what_happens_while_the_record_is_written_is_written_the_next_time(source, tmp_path):
    plan = make_plan(source, SEED)

    class Slow(FeedRecord):
        """Something is read while its file is being written."""

        def to_json(self):
            found = super().to_json()
            threading.Thread(target=self.add, args=(WindowKey(0, len(self.counts)), 7, ())).start()
            return found

    record = Slow(plan, open_folder(str(tmp_path)))
    record.add(WindowKey(0, 0), 5, [3])
    record.write()
    while len(record.counts) < 2:
        pass
    record.write()
    known = json.loads((tmp_path / "data.json").read_text())
    assert known["counts"][:2] == [[0, 0, 5], [0, 1, 7]]
    assert known["skipped"] == [[0, 0, 3]]


def test_a_run_that_skips_goes_on_without_a_file_that_is_gone_or_damaged_since(source, tmp_path):
    """As it would have, had the feed not been started again."""
    feed = LocalFeed(source, tmp_path)
    feed.record.write()
    feed.close()
    damage(tmp_path / "set")
    (tmp_path / "set" / "p4.parquet").unlink()
    without = LocalFeed(source, tmp_path)
    rows = walk(without)
    without.record.write()
    without.close()
    assert set(rows) < set(range(ROWS))
    again = LocalFeed(source, tmp_path)
    assert walk(again) == rows
    again.close()


def test_a_run_that_skips_does_not_take_new_files_in(source, tmp_path):
    feed = LocalFeed(source, tmp_path)
    feed.record.write()
    feed.close()
    first = next(iter(sorted((tmp_path / "set").glob("*.parquet"))))
    (tmp_path / "set" / "zz.parquet").write_bytes(first.read_bytes())
    with pytest.raises(WrongInput, match=r"zz.parquet is new"):
        open_record(make_plan(source, SEED), str(tmp_path))


def flip(path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def values_in(path) -> int:
    """Where a plain column's values are in a file of `one_column`."""
    return pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset + 100


def one_column(folder, *, has_checksums: bool):
    """A source of one file whose values are stored as they are."""
    folder.mkdir()
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    table = pa.table({"row": np.arange(100)})
    path = folder / "p.parquet"
    pq.write_table(table, path, write_page_checksum=has_checksums, **options)
    return path, parquet(folder)


def test_a_flipped_bit_in_a_page_with_a_checksum_is_damage(tmp_path):
    path, source = one_column(tmp_path / "set", has_checksums=True)
    flip(path, values_in(path))
    with pytest.raises(BadData, match=r"p.parquet, row group 0: cannot be read: .*CRC"):
        read_window(make_plan(source, SEED), 0, 0)


def test_a_bit_that_flips_after_the_first_epoch_is_damage_also_for_a_later_start(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path, source = one_column(tmp_path / "set", has_checksums=False)
    feed = LocalFeed(source, tmp_path)
    feed.window_at(0, 0, lambda: False)
    feed.close()
    flip(path, values_in(path))
    again = LocalFeed(source, tmp_path)
    with pytest.raises(BadData, match=r"p.parquet, row group 0: its bytes are not those that"):
        again.window_at(100, 100, lambda: False)
    again.close()
    flip(path, values_in(path))
    again = LocalFeed(source, tmp_path)
    assert again.window_at(100, 100, lambda: False).rows.table["row"].to_pylist()
    again.close()


def test_columns_that_are_not_read_may_change(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    table = pa.table({"a": np.arange(100), "b": np.arange(100)})
    pq.write_table(table, folder / "p.parquet", compression="none", use_dictionary=False)
    plan = make_plan(parquet(folder, columns=["a"]), SEED)
    checksums = read_window(plan, 0, 0)[0].checksums
    flip(folder / "p.parquet", values_in(folder / "p.parquet") + 850)
    assert list(checksums) == [0]
    assert read_window(plan, 1, 0, (), checksums)[0].checksums == checksums


CRASHING = """
import os, pyarrow.parquet

class Crashing(pyarrow.parquet.ParquetFile):
    def read_row_group(self, row_group, **options):
        if row_group == 1:
            os.abort()
        return super().read_row_group(row_group, **options)

pyarrow.parquet.ParquetFile = Crashing
"""


def test_a_row_group_that_ends_the_process_that_reads_it_is_a_bad_one(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(CRASHING)  # of every new process
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = write_rows(tmp_path / "set")
    plan = make_plan(parquet(folder / "p2.parquet", on_bad_file="skip"), SEED)
    rows, skipped = read_window(plan, 0, 0, is_wary=True)
    assert (rows.count, [s.unit for s in skipped]) == (101 - 15, [1])
    assert "p2.parquet, row group 1: cannot be read: the process" in skipped[0].problem
    assert "SIGABRT" in skipped[0].problem


CRASHING_FOOTER = """
import os, pyarrow.parquet

class Crashing(pyarrow.parquet.ParquetFile):
    def __init__(self, source, **options):
        if source.size() == SIZE:
            os.abort()
        super().__init__(source, **options)

pyarrow.parquet.ParquetFile = Crashing
"""


def test_a_footer_that_ends_the_process_that_reads_it_is_named(tmp_path, monkeypatch):
    folder = write_rows(tmp_path / "set")
    size_bytes = (folder / "p3.parquet").stat().st_size
    hook = CRASHING_FOOTER.replace("SIZE", str(size_bytes))
    (tmp_path / "sitecustomize.py").write_text(hook)  # of every new process
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plan = make_plan(parquet(folder, on_bad_file="skip"), SEED, is_wary=True)
    assert [f.path for f in plan.files if f.problem] == [str(folder / "p3.parquet")]
    with pytest.raises(WrongInput, match=r"p3.parquet: the footer .* ends with SIGABRT; repair"):
        make_plan(parquet(folder), SEED, is_wary=True)


CALLED = """
import os, pathlib, threading

met, mark = threading.Barrier(4, timeout=60), pathlib.Path(__file__).with_name("met")

def meet(ends):
    if not mark.exists():
        met.wait()
    if ends:
        mark.touch()
        os.abort()
"""


@pytest.fixture
def called(tmp_path, monkeypatch):
    (tmp_path / "called.py").write_text(CALLED)
    monkeypatch.syspath_prepend(tmp_path)
    return ("called", "meet"), tmp_path / "met"


def test_calls_are_tried_together_and_only_those_beside_a_crash_one_by_one(called):
    """The first four go on only once all of them have begun."""
    function, met = called
    assert crashes(function, [[n == 3] for n in range(20)], at_once=4) == {3: "SIGABRT"}
    assert met.exists()


@pytest.mark.parametrize("at_once", [1, 8])
def test_every_call_that_ends_a_process_is_found_among_many(called, at_once):
    function, met = called
    met.touch()
    calls = [[n in (3, 4, 30)] for n in range(40)]
    assert crashes(function, calls, at_once) == dict.fromkeys((3, 4, 30), "SIGABRT")
