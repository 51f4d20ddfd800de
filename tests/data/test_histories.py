"""Whatever happens to the workers and to the feed: the same rows in the same order, each once."""

import numpy as np
import pytest

from elastic.data import pack_tokens, parquet
from tests.data.histories import GLOBAL_BATCH, ROWS, random_history, uninterrupted, write_rows

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
