"""A run of a day in a bucket, where files grow by a segment every 5 s: what it costs at its end is
what it costs at its beginning. Scaled: no segment is waited for, and requests are counted."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import pytest

from elastic.driver.resume import newest_generation, read_past_run
from elastic.store import tiers
from elastic.store.entries import Entry
from elastic.store.files import Folder, write_json
from elastic.store.journal import LineFile, LineTail, read_backwards, read_lines, segments
from elastic.store.run_directory import UPLOAD_EVERY_S
from elastic.store.tiers import FAN_IN, KEPT, Tiers
from tests.store.test_journal import lines, object_store

DAY = int(86_400 / UPLOAD_EVERY_S)
FEW = 100
"""Segments of a file, after a day as well."""
LOOKS = 3_000
"""Of a test that looks each time: the rest of the day would be the same."""
LISTED = 1_000
"""Entries per request."""


@dataclass(frozen=True)
class Counted(Folder):
    """An object store that counts requests."""

    asked: Counter[str] = field(default_factory=Counter[str])
    refuse_after: list[int] = field(default_factory=list[int])
    """So many requests that change something are served, then the writer is dead."""

    def _change(self, what: str) -> None:
        self.asked[what] += 1
        if self.refuse_after:
            self.refuse_after[0] -= 1
            if self.refuse_after[0] < 0:
                raise OSError("killed")

    def sizes(self) -> dict[str, int]:
        found = super().sizes()
        self.asked["list"] += 1 + len(found) // LISTED
        return found

    def read(self, name: str) -> bytes:
        self.asked["read"] += 1
        return super().read(name)

    def _entry(self, path: str) -> Entry | None:
        self.asked["stat"] += 1
        return super()._entry(path)

    def write(self, name: str, content: bytes, *, is_durable: bool = True) -> None:
        self._change("write")
        super().write(name, content, is_durable=is_durable)

    def delete(self, name: str) -> None:
        self._change("delete")
        super().delete(name)


def counted(path: Path) -> Counted:
    folder = object_store(path)
    return Counted(folder.filesystem, folder.path)


def new_file(folder: Path, remote: Folder) -> LineFile:
    folder.mkdir(exist_ok=True)
    return LineFile(folder / "metrics.jsonl", remote, is_new=True)


def add(file: LineFile, n: int) -> None:
    file.append({"n": n})
    file.upload()


def test_a_look_at_a_day_long_run_costs_what_it_cost_in_its_first_minute(tmp_path):
    remote = counted(tmp_path / "remote")
    write_json(remote, "config.json", {"steps": 2 * LOOKS, "detect_s": 3.0})
    write_json(remote, "status.json", {"generation": 1})
    file, tail = new_file(tmp_path / "spool", remote), LineTail(remote, "metrics.jsonl")
    costs = list[int]()
    for n in range(LOOKS):
        add(file, n)
        remote.asked.clear()
        assert tail.poll() == lines(1, n)
        past = read_past_run(remote)
        costs.append(remote.asked.total())
    assert past is not None
    assert set(costs[:20]) == set(costs[1:]), "a look costs the same at any time"
    remote.asked.clear()
    assert newest_generation(remote, past) == 1
    assert LineTail(remote, "metrics.jsonl", last_bytes=50).poll()[-1] == {"n": LOOKS - 1}
    assert next(read_backwards(remote, "metrics.jsonl")) == {"n": LOOKS - 1}
    assert remote.asked.total() < 20, "nor does who looks at it for the first time read its history"


def test_a_successor_and_the_end_of_a_day_long_run_ask_the_store_a_few_times(tmp_path):
    remote = counted(tmp_path / "remote")
    file = new_file(tmp_path / "spool", remote)
    for n in range(DAY):
        add(file, n)
    assert remote.asked.total() < 4 * DAY, "a segment is written, and deleted once it is merged"
    assert len(segments(remote, "metrics.jsonl")) < FEW
    remote.asked.clear()
    successor = LineFile(tmp_path / "metrics.jsonl", remote)
    assert remote.asked.total() < 4 * FEW
    assert remote.names() == ["metrics.jsonl"]
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == DAY
    add(successor, DAY)
    assert read_lines(remote, "metrics.jsonl") == lines(DAY + 1)


def test_a_follower_that_was_away_finds_its_place_in_what_was_merged(tmp_path):
    remote = counted(tmp_path / "remote")
    file, tail = new_file(tmp_path / "spool", remote), LineTail(remote, "metrics.jsonl")
    for n in range(5):
        add(file, n)
    assert tail.poll() == lines(5)
    for n in range(5, 200):
        add(file, n)
    found = [line for _ in range(5) for line in tail.poll()]
    assert found == lines(195, 5)


@pytest.mark.parametrize("num_taken", [0, 1, 20, 39])
def test_lines_that_are_merged_while_they_are_read_backwards_come_once(tmp_path, num_taken):
    remote = counted(tmp_path / "remote")
    file = new_file(tmp_path / "spool", remote)
    num = FAN_IN + KEPT - 1
    for n in range(num):
        add(file, n)
    found = read_backwards(remote, "metrics.jsonl")
    taken = list(islice(found, num_taken))
    add(file, num)
    assert len(segments(remote, "metrics.jsonl")) == KEPT + 1, "it was merged"
    assert [*taken, *found] in (lines(num)[::-1], lines(num + 1)[::-1])


def test_a_writer_that_is_killed_at_any_request_of_a_merge_leaves_every_line(tmp_path):
    num = FAN_IN + KEPT - 1
    for served in range(1, FAN_IN + 2):
        remote = counted(tmp_path / f"remote-{served}")
        file = new_file(tmp_path / f"spool-{served}", remote)
        for n in range(num):
            add(file, n)
        remote.refuse_after.append(served)  # the last segment, the merged one, then deletions
        if served < FAN_IN + 1:
            with pytest.raises(OSError, match="killed"):
                add(file, num)
        else:
            add(file, num)
        remote.refuse_after.clear()
        assert read_lines(remote, "metrics.jsonl") == lines(num + 1)
        assert list(read_backwards(remote, "metrics.jsonl")) == lines(num + 1)[::-1]
        add(file, num + 1)  # the store was only away
        assert read_lines(remote, "metrics.jsonl") == lines(num + 2)


def test_segments_become_one_in_order_and_none_becomes_too_large(monkeypatch):
    size = 1000
    monkeypatch.setattr(tiers, "MAX_BYTES", 300 * size)
    found, there = Tiers(), list[tuple[int, int]]()
    for n in range(5_000):
        found.add(n * size, (n + 1) * size)
        there.append((n * size, (n + 1) * size))
        for group in found.due():
            at = there.index(group[0])
            assert there[at : at + FAN_IN] == group
            there[at : at + FAN_IN] = [(group[0][0], group[-1][1])]
    assert all(end == start for (_, end), (start, _) in pairwise(there))
    assert max(end - start for start, end in there) == FAN_IN**2 * size
    assert len(there) < 5_000 / FAN_IN**2 + 2 * FAN_IN + KEPT
