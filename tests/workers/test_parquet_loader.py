"""Micro-batches out of fed windows: what columns become, and how troubles arrive."""

import random
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch

from elastic.data import pack_tokens, parquet
from elastic.protocol.errors import BadData, StepCancelled, UserError, WrongInput
from elastic.protocol.mesh import microbatch_ids
from tests.data.histories import GLOBAL_BATCH, MICRO_BATCH, ROWS, SEED, LocalFeed, V, write_rows
from workers.data.parquet_batches import columns_of, samples_of
from workers.data.parquet_loader import ParquetLoader
from workers.step.randomness import seed_microbatch


@pytest.fixture
def make(tmp_path):
    made = []

    def _make(collate=None, feed=None, **options):
        if feed is None:
            source = parquet(write_rows(tmp_path / "set"), window_bytes=300, **options)
            feed = LocalFeed(source, tmp_path)
            made.append(feed)
        sizes = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH}
        made.insert(0, ParquetLoader(feed, seed=SEED, collate=collate, **sizes))
        return made[0]

    yield _make
    for each in made:
        each.close()


def never():
    return False


def test_columns_become_tensors_and_texts_stay_lists():
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(range(8), pa.uint8()), 2)
    table = pa.table(
        {
            "number": pa.array([1.5, 2.5, 3.5, 4.5], pa.float32()),
            "is_even": [False, True, False, True],
            "pixels": pixels,
            "lists": [[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]], [[7.0, 8.0]]],
            "text": ["a", "b", "c", "d"],
            "kind": pa.array(["x", "y", "x", "y"]).dictionary_encode(),
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((4, 2, 3))),
        }
    )
    batch = columns_of([table.slice(1, 1), table.slice(2, 2)], 1)
    assert batch["number"].tolist() == [2.5, 3.5, 4.5]
    assert batch["is_even"].tolist() == [True, False, True]
    assert batch["pixels"].tolist() == [[2, 3], [4, 5], [6, 7]]
    assert batch["lists"].tolist() == [[[3.0, 4.0]], [[5.0, 6.0]], [[7.0, 8.0]]]
    assert batch["text"] == ["b", "c", "d"]
    assert batch["kind"] == ["y", "x", "y"]
    assert batch["image"].shape == (3, 2, 3)
    batch["number"].add_(1)
    assert table["number"].to_pylist() == [1.5, 2.5, 3.5, 4.5], "the batch is a copy"
    assert batch["number"].data_ptr() % 16 == 0
    assert samples_of(batch)[1]["text"] == "c"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([1, None], "has nulls"),
        ([[1], [2, 3]], "holds lists of 1 to 2 values"),
        ([["a"], ["b"]], "holds lists of text"),
        (np.array(["2020-01-01", "2020-01-02"], "M8[D]"), "has type date32"),
    ],
)
def test_a_column_that_is_no_tensor_is_named(values, why):
    with pytest.raises(BadData, match=f"column 'c': {why}"):
        columns_of([pa.table({"c": values})], 1)


def test_lists_of_dictionaries_values_are_decoded():
    values = pa.array([1.5, 2.5, 1.5, 1.5]).dictionary_encode()
    table = pa.table({"c": pa.FixedSizeListArray.from_arrays(values, 2)})
    assert columns_of([table], 1)["c"].tolist() == [[1.5, 2.5], [1.5, 1.5]]


def test_rows_of_one_token_are_packed_rows_too(make):
    loader = make(transform=(texts, pack_tokens(length=1)))
    batch = loader.fetch(0, 0).batch
    assert (batch["tokens"].dtype, batch["tokens"].shape) == (torch.int64, (MICRO_BATCH, 1))


def texts(table):
    return {"text": ["ab"] * table.num_rows}


def nulls(table):
    return {"row": pa.array([None] * table.num_rows, pa.int64())}


def test_a_column_that_is_no_tensor_is_found_at_its_stream_positions(make):
    with pytest.raises(WrongInput, match=r"stream positions 3\.\.5, column 'row': has nulls"):
        make(transform=nulls).fetch(0, 1)


def test_all_worlds_cut_the_same_rows(make):
    first = make()
    streams = []
    for world in (1, 3, V):
        rows = []
        loaders = [first, *(make(feed=first._feed) for _ in range(world - 1))]
        for rank, loader in enumerate(loaders):
            loader.assign(0, microbatch_ids(V, world, rank))
        for step in range(20):
            for rank, loader in enumerate(loaders):
                for i in microbatch_ids(V, world, rank):
                    loaded = loader.next(step, i, never)
                    assert loaded.rows.tolist() == loaded.batch["row"].tolist()
                    rows += loaded.rows.tolist()
        streams.append(rows)
    assert streams[0] == streams[1] == streams[2]
    assert sorted(streams[0][:ROWS]) == list(range(ROWS))


def test_a_new_assignment_replaces_the_old_one_at_any_moment(make):
    loader = make()
    expected = {}
    loader.assign(0, range(V))
    for step in range(12):
        for i in range(V):
            expected[step, i] = loader.next(step, i, never).rows.tolist()
    draw = random.Random(1)
    for _ in range(100):
        step, start = draw.randrange(12), draw.randrange(V)
        ids = range(start, draw.randrange(start, V) + 1)
        loader.assign(step, ids)
        for i in list(ids)[: draw.randrange(len(ids) + 1)]:
            assert loader.next(step, i, never).rows.tolist() == expected[step, i]
    assert loader.fetch(3, 2).rows.tolist() == expected[3, 2]


def test_the_workloads_own_collate_is_seeded_and_its_exception_told(make):
    def collate(samples):
        if samples[0]["row"] == 5:
            raise KeyError("five")
        return torch.rand(2), [int(s["row"]) for s in samples]

    loader = make(collate)

    def take_all():
        loader.assign(0, range(V))
        for step in range(40):
            for i in range(V):
                loaded = loader.next(step, i, never)
                seed_microbatch(SEED, step, i)
                draws, rows = loaded.batch
                assert torch.equal(draws, torch.rand(2))
                assert rows == loaded.rows.tolist()

    with pytest.raises(UserError, match=r"KeyError: 'five', collating .* positions \d+") as caught:
        take_all()
    assert "in collate" in caught.value.traceback_text


def failing(table):
    raise KeyError("label")


def test_a_users_transform_fails_as_the_users_and_a_bad_file_as_wrong_input(make, tmp_path):
    with pytest.raises(UserError, match=r"row group \d+: the transform raised KeyError") as caught:
        make(transform=failing).fetch(0, 0)
    assert "in failing" in caught.value.traceback_text
    (tmp_path / "set").rename(tmp_path / "other")
    loader = make()
    for file in (tmp_path / "set").iterdir():
        file.unlink()
    with pytest.raises(WrongInput, match=r"p\d.parquet, row group \d+: cannot be read"):
        loader.fetch(0, 0)
    loader.assign(0, range(V))
    with pytest.raises(UserError, match=r"p\d.parquet, row group \d+: cannot be read"):
        loader.next(0, 0, never)


def test_waiting_ends_when_the_step_is_cancelled(make):
    class Silent:
        row_length = 1

        def window_at(self, element, committed, is_over):
            while not is_over():
                pass
            raise StepCancelled

    loader = make(feed=Silent())
    loader.assign(0, range(V))
    looks = iter([False] * 5 + [True] * 100)
    with pytest.raises(StepCancelled):
        loader.next(0, 0, lambda: next(looks))


class Counting:
    """A feed that answers only when the test says so."""

    def __init__(self, feed):
        self.feed, self.row_length = feed, feed.row_length
        self.asked, self.may_answer = [], threading.Event()

    def window_at(self, element, committed, is_over):
        self.asked.append(element)
        while not self.may_answer.wait(0.01):
            if is_over():
                raise StepCancelled
        return self.feed.window_at(element, committed, is_over)


def test_a_window_that_is_late_is_asked_for_once(make):
    feed = Counting(make()._feed)
    loader = make(feed=feed)
    feed.may_answer.set()
    loader.assign(0, range(V))
    loader.next(0, 0, never)
    feed.may_answer.clear()
    timeouts = threading.Timer(0.3, feed.may_answer.set)
    timeouts.start()
    for step in range(3):
        for i in range(V):
            if (step, i) > (0, 0):
                loader.next(step, i, never)
    timeouts.join()
    firsts = [0]
    while firsts[-1] <= feed.asked[-1]:
        firsts.append(feed.feed.window_at(firsts[-1], 0, never).end)
    assert feed.asked == firsts[: len(feed.asked)]


def test_a_worker_keeps_few_passed_windows_of_a_long_step(make):
    feed, sizes = make()._feed, {"global_batch": 180, "micro_batch": 3}
    loader = ParquetLoader(feed, seed=SEED, kept_bytes=1000, **sizes)
    loader.assign(0, range(60))
    rows = [loader.next(0, i, never).rows.tolist() for i in range(60)]
    kept = [w.rows.size_bytes for w in loader._windows]
    assert 300 < sum(kept) <= 1000 + 3 * max(kept)
    loader.assign(0, range(60))
    assert [loader.next(0, i, never).rows.tolist() for i in range(60)] == rows
    loader.close()
