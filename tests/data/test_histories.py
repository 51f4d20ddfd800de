"""Whatever happens to the workers and to the feed: the same rows in the same order, each once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from elastic.data import pack_tokens, parquet
from elastic.data.stream import WindowKey
from tests.data.histories import (
    GLOBAL_BATCH,
    ROWS,
    LocalFeed,
    random_history,
    uninterrupted,
    write_rows,
)

STEPS = 3 * ROWS // GLOBAL_BATCH + 1


def some_dropped(table):
    """Drops a third, repeats a third: by content alone."""
    rows = table.column("row").to_numpy()
    return table.take(np.repeat(np.arange(len(rows)), rows % 3))


def as_text(table):
    rows = table.column("row").to_pylist()
    return {"text": ["row " + "." * (row % 19) for row in rows]}


SOURCES = {
    "planned": {},
    "filtered": {"transform": some_dropped},
    "packed": {"transform": (as_text, pack_tokens(length=5, separator=0))},
    "skipping": {"on_bad_file": "skip"},
}


def source_of(folder, kind):
    return parquet(folder, window_bytes=300, prefetch_bytes=2000, **SOURCES[kind])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    known = {}

    def of(kind):
        if kind not in known:
            place = tmp_path_factory.mktemp(kind)
            source = source_of(write_rows(place / "set"), kind)
            known[kind] = (source, uninterrupted(source, place, STEPS))
        return known[kind]

    return of


def test_each_row_is_used_once_per_epoch(reference):
    _, run = reference("planned")
    for epoch in range(3):
        assert sorted(run.rows[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(ROWS))


def test_a_filtered_epoch_holds_what_the_transform_gives(reference):
    _, run = reference("filtered")
    counts = [row % 3 for row in range(ROWS)]
    size = sum(counts)
    for epoch in range(2):
        used = np.bincount(run.rows[epoch * size : (epoch + 1) * size], minlength=ROWS)
        assert used.tolist() == counts


def assert_same(kind, reference, place, seed):
    source, expected = reference(kind)
    run = random_history(source, place, STEPS, seed)
    assert run.samples == expected.samples
    assert run.rows == expected.rows
    assert run.weights.tobytes() == expected.weights.tobytes()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", SOURCES)
def test_no_history_leaves_a_trace(kind, reference, tmp_path, seed):
    assert_same(kind, reference, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.parametrize("kind", SOURCES)
def test_no_long_series_of_histories_leaves_a_trace(kind, reference, tmp_path, seed):
    assert_same(kind, reference, tmp_path, seed)


def test_a_slow_consumer_never_makes_the_feed_exceed_its_budget(tmp_path):
    source = parquet(write_rows(tmp_path / "set"), window_bytes=300, prefetch_bytes=3000)
    feed = LocalFeed(source, tmp_path)
    for position in range(0, 4 * ROWS, 5):
        feed.window_at(position, position, lambda: False)
    assert 1000 < feed.peak_bytes <= 3000
    feed.close()


def test_a_step_of_many_windows_does_not_exceed_the_budget_either(tmp_path):
    source = parquet(write_rows(tmp_path / "set"), window_bytes=300, prefetch_bytes=3000)
    feed = LocalFeed(source, tmp_path)
    for position in range(0, 2 * ROWS, 5):
        feed.window_at(position, 0, lambda: False)
    assert 1000 < feed.peak_bytes <= 3000
    assert len(feed.reads) == len(set(feed.reads)), "what is passed goes, and not what comes"
    key = feed.server.ahead.stream.find(ROWS).key
    assert key not in feed.server.ahead.held
    again = feed.window_at(ROWS, 0, lambda: False)
    assert (again.first, feed.reads.count(key)) == (ROWS, 2), "a failed step reads it again"
    feed.close()


def test_workers_at_far_places_of_a_step_all_go_on_within_a_small_budget(tmp_path):
    source = parquet(write_rows(tmp_path / "set"), window_bytes=300, prefetch_bytes=700)
    feed = LocalFeed(source, tmp_path)
    with ThreadPoolExecutor(4) as pool:
        walks = pool.map(lambda first: rows_between(feed, first, first + 50), range(0, 200, 50))
        rows = [row for walk in walks for row in walk]
    assert sorted(rows) == sorted(rows_between(feed, 0, 200))
    feed.close()


def rows_between(feed, first: int, end: int) -> list[int]:
    rows = []
    for position in range(first, end):
        window = feed.window_at(position, 0, lambda: False)
        rows.append(window.rows.table["row"][position - window.first].as_py())
    return rows


def test_going_on_in_the_middle_reads_nothing_that_lies_before(tmp_path):
    source = source_of(write_rows(tmp_path / "set"), "planned")
    feed = LocalFeed(source, tmp_path)
    middle = ROWS + ROWS // 2
    key = feed.server.ahead.stream.find(middle).key
    feed.window_at(middle, middle, lambda: False)
    feed.close()
    assert min(feed.reads) == key
    assert key.epoch == 1
    assert key.window > 2


def test_a_filtered_run_goes_on_by_its_record_and_reads_nothing_before(tmp_path):
    source = source_of(write_rows(tmp_path / "set"), "filtered")
    (tmp_path / "config.json").write_text("{}")
    feed = LocalFeed(source, tmp_path)
    middle = ROWS + ROWS // 2
    first = feed.window_at(middle, middle, lambda: False)
    key = feed.server.ahead.stream.find(middle).key
    feed.close()
    assert min(feed.reads) == WindowKey(0, 0), "without a record it has to count"
    again = LocalFeed(source, tmp_path)
    window = again.window_at(middle, middle, lambda: False)
    again.close()
    assert min(again.reads) == key
    assert (window.first, window.rows.table) == (first.first, first.rows.table)


@pytest.mark.parametrize("kind", ["planned", "filtered"])
def test_nothing_is_read_far_behind_the_end_of_the_run(kind, tmp_path):
    """The budget would hold hundreds of epochs."""
    source = parquet(write_rows(tmp_path / "set"), window_bytes=300, **SOURCES[kind])
    feed, at = LocalFeed(source, tmp_path, end=ROWS), 0
    while at < ROWS:
        at = feed.window_at(at, at, lambda: False).end
    feed.close()
    last = max(feed.reads)
    known = feed.server.ahead.stream.find(ROWS - 1)
    assert last.epoch <= known.key.epoch + 1
    assert last <= known.key or (kind == "filtered" and last.window < source.max_reads)
