"""The plan of a Parquet data set: what it holds, what its order depends on, what changes it."""

import itertools
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data import pack_tokens, parquet
from elastic.data.ahead import Ahead, Turn
from elastic.data.footers import make_plan
from elastic.data.permutation import permutation
from elastic.data.plan import differences
from elastic.data.reading import read_window
from elastic.data.stream import Span, Stream, WindowKey
from elastic.protocol.errors import BadData, WrongInput
from workers.data.parquet_batches import columns_of

SIZES = (100, 0, 37, 251, 1)


def write(folder: Path, sizes=SIZES, row_group_size=40) -> Path:
    """Files of these many rows; column x is the row's number in the data set."""
    folder.mkdir(exist_ok=True)
    first = 0
    for i, size in enumerate(sizes):
        x = np.arange(first, first + size)
        table = pa.table({"x": x, "text": [f"document {v}" for v in x]})
        pq.write_table(table, folder / f"part-{i:02d}.parquet", row_group_size=row_group_size)
        first += size
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "set")


def epoch_rows(plan, epoch, column="x"):
    found = [read_window(plan, epoch, w)[0] for w in range(len(plan.windows(epoch)))]
    values = [v for rows in found if rows.count for v in rows.table.column(column).to_pylist()]
    return values, np.concatenate([rows.ids for rows in found]).tolist()


def test_an_epoch_holds_each_row_once_in_an_order_by_seed_and_epoch(folder):
    plan = make_plan(parquet(folder, window_bytes=2000), 7)
    assert len(plan.windows(0)) > 2
    seen = []
    for epoch in range(3):
        values, ids = epoch_rows(plan, epoch)
        assert values == ids
        assert sorted(values) == list(range(sum(SIZES)))
        seen.append(values)
    seen.append(epoch_rows(make_plan(parquet(folder, window_bytes=2000), 8), 0)[0])
    assert all(a != b for a, b in itertools.combinations(seen, 2))
    again = make_plan(parquet(folder, window_bytes=2000), 7)
    assert epoch_rows(again, 1)[0] == seen[1]
    assert again.hash == plan.hash


def test_without_shuffle_the_files_order_is_the_streams(folder):
    plan = make_plan(parquet([folder / "part-03.parquet", folder], shuffle=False), 7)
    assert epoch_rows(plan, 5)[0] == list(range(sum(SIZES)))


def test_the_permutation_is_pinned():
    assert permutation(10, "units", 7, 0).tolist() == [0, 1, 5, 2, 7, 4, 9, 3, 8, 6]


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_stream_finds_any_element_from_the_footers_alone(folder, batch):
    plan = make_plan(parquet(folder, window_bytes=2000), 7)
    order = [row for epoch in range(3) for row in epoch_rows(plan, epoch)[0]]
    for element in random.Random(1).sample(range(len(order)), 50):
        place = Stream(plan).find(element)
        assert isinstance(place, Span)
        rows, _ = read_window(plan, place.key.epoch, place.key.window)
        assert rows.count == place.count
        assert rows.table["x"][element - place.first].as_py() == order[element]


def drop_and_repeat(table):
    """Drops a third at random, repeats the rest."""
    kept = table.filter(pa.array(np.random.rand(table.num_rows) > 1 / 3))
    return pa.concat_tables([kept, kept.slice(0, 2)])


def test_a_transform_that_changes_counts_is_found_by_counting_once(folder):
    plan = make_plan(parquet(folder, window_bytes=2000, transform=drop_and_repeat), 7)
    stream, element, reads = Stream(plan), 700, []
    while isinstance(found := stream.find(element), WindowKey):
        reads.append(found)
        stream.record(found, read_window(plan, found.epoch, found.window)[0].count)
    assert reads == list(itertools.takewhile(lambda k: k <= found.key, stream.follow(reads[0])))
    resumed = Stream(plan)
    for key, count in stream.counts().items():
        resumed.record(key, count)
    assert resumed.find(element) == found
    order = [row for e in range(found.key.epoch + 1) for row in epoch_rows(plan, e)[0]]
    rows, _ = read_window(plan, found.key.epoch, found.key.window)
    assert rows.table["x"][element - found.first].as_py() == order[element]
    with pytest.raises(BadData, match="must give the same rows"):
        resumed.record(found.key, found.count + 1)


def test_a_broken_promise_of_keeps_rows_names_file_and_row_group(folder):
    plan = make_plan(parquet(folder, transform=drop_and_repeat, keeps_rows=True), 7)
    with pytest.raises(BadData, match=r"part-0\d.parquet, row group \d+: the transform gives"):
        read_window(plan, 0, 0)


def test_packed_tokens_are_all_documents_one_after_the_other(folder):
    source = parquet(folder, window_bytes=2000, transform=pack_tokens(length=16, separator=0))
    plan = make_plan(source, 7)
    whole, _ = epoch_rows(plan, 0, "tokens")
    documents = bytes(whole).split(b"\0")
    assert documents.pop() == b""
    assert sorted(documents) == sorted(f"document {i}".encode() for i in range(sum(SIZES)))
    rows, _ = read_window(plan, 0, 0)
    tokens = rows.table["tokens"].to_numpy()
    for element, row in enumerate(rows.ids_of(np.arange(len(tokens)))):
        document, place = divmod(int(row), 2**20)
        assert f"document {document}\0".encode()[place] == tokens[element]


def test_a_file_named_as_path_and_as_uri_is_refused(folder):
    file = folder / "part-00.parquet"
    with pytest.raises(WrongInput, match=r"/set/part-00.parquet are one file; name it once"):
        make_plan(parquet([folder, f"file://{file}"]), 0)


def test_the_column_of_the_documents_is_part_of_the_plan(folder):
    packings = [pack_tokens(length=4), pack_tokens(length=4, column="x")]
    usual, other = (make_plan(parquet(folder, transform=p), 0).to_json() for p in packings)
    assert (usual["packing"], other["packing"]) == ([4, None], [4, None, "x"])


def test_changed_files_are_told_apart(folder):
    plan = make_plan(parquet(folder), 7)
    write(folder, (100, 0, 38, 251))
    (folder / "part-04.parquet").unlink()
    write(folder / "more", (3,))
    (folder / "_metadata.parquet").write_text("not one of the files")
    now = make_plan(parquet(folder, shuffle=False), 7)
    found = differences(plan.to_json(), now.to_json())
    assert found[0] == "shuffle was True and now is False"
    assert [f.split("set/")[-1].split(":")[0] for f in found[1:]] == [
        "part-04.parquet is missing",
        "more/part-00.parquet is new",
        "part-02.parquet changed",
        "part-03.parquet changed",
    ]
    assert differences(plan.to_json(), plan.to_json()) == []


def test_what_cannot_be_planned_says_where_and_why(folder, tmp_path):
    with pytest.raises(WrongInput, match="does not exist"):
        make_plan(parquet(tmp_path / "nowhere"), 0)
    with pytest.raises(WrongInput, match="hold no row"):
        make_plan(parquet(folder / "part-01.parquet"), 0)
    with pytest.raises(WrongInput, match="has no column 'y'"):
        make_plan(parquet(folder, columns=["y"]), 0)
    other = pa.table({"x": [1.0], "text": [""]})
    pq.write_table(other, folder / "part-09.parquet")
    drift = r"column 'x' is int64 in .*part-00.parquet and double in .*part-09.parquet"
    with pytest.raises(WrongInput, match=drift):
        make_plan(parquet(folder), 0)
    make_plan(parquet(folder, columns=["text"]), 0)
    (folder / "part-09.parquet").write_bytes(b"PAR1 no footer PAR1")
    with pytest.raises(WrongInput, match=r"part-09.parquet: the footer cannot be read"):
        make_plan(parquet(folder), 0)
    plan = make_plan(parquet(folder, on_bad_file="skip"), 0)
    assert [f.path for f in plan.files if f.problem] == [str(folder / "part-09.parquet")]


def test_a_damaged_row_group_is_named_or_skipped(folder):
    plan = make_plan(parquet(folder, window_bytes=2000), 7)
    skipping = make_plan(parquet(folder, window_bytes=2000, on_bad_file="skip"), 7)
    path = folder / "part-03.parquet"
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).dictionary_page_offset or 0
    content[start + 4 : start + 200] = bytes(196)
    path.write_bytes(content)
    with pytest.raises(BadData, match=r"part-03.parquet, row group 2: cannot be read"):
        epoch_rows(plan, 0)
    found = [read_window(skipping, 0, w) for w in range(len(skipping.windows(0)))]
    skipped = [s for _, each in found for s in each]
    assert [skipping.units[s.unit].row_group for s in skipped] == [2]
    assert sum(rows.count for rows, _ in found) == sum(SIZES) - 40


def test_a_file_that_changed_after_planning_is_named(folder):
    plan = make_plan(parquet(folder), 7)
    write(folder, (100, 0, 37, 252, 1))
    with pytest.raises(BadData, match=r"part-0\d.parquet, row group \d: the file changed since"):
        read_window(plan, 0, 0)


def raising(table):
    raise KeyError("label")


def test_a_transforms_exception_comes_with_the_unit_and_its_traceback(folder):
    plan = make_plan(parquet(folder, transform=raising), 7)
    with pytest.raises(BadData, match=r"row group \d: the transform raised KeyError") as caught:
        read_window(plan, 0, 0)
    assert "in raising" in caught.value.traceback_text


def by_first_row(table, column):
    """Differs from row group to row group."""
    return {"a": [1], "b": [1]} if column[0].as_py() % 80 else {"a": [1]}


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (
            lambda t: None,
            r"row group \d: the transform returned a NoneType; return a pya",
        ),
        (lambda t: t.to_batches()[0], r"row group \d: the transform returned a RecordBatch"),
        (lambda t: {"a": [1], "b": [1, 2]}, r"row group \d: the transform raised ArrowInvalid"),
        (lambda t: by_first_row(t, t["x"]), "window 0: the transform gives differing columns: Sch"),
        (pack_tokens(length=4, column="z"), "there is no column 'z' in \\['x', 'text'\\]"),
        (
            pack_tokens(length=4, column="x"),
            r"row group \d, row \d+: column 'x': has type int64, and pack_tokens takes",
        ),
        (
            pack_tokens(length=4, encode=lambda d: 1 / 0),
            r"row group \d, row \d+: pack_tokens: encode raised ZeroDivisionError",
        ),
        (
            (lambda t: t.slice(1), pack_tokens(length=4, encode=lambda d: 1 / 0)),
            r"row group \d, row \d+ of what the transform gives: pack_tokens: encode raised Zero",
        ),
        (pack_tokens(length=4, encode=lambda d: "ab"), "encode gave <U2 of shape \\(\\); return"),
        (pack_tokens(length=4, encode=lambda d: [0.5]), "encode gave float64 of shape \\(1,\\)"),
    ],
)
def test_what_a_transform_may_not_do_is_one_line(folder, transform, why):
    plan = make_plan(parquet(folder, transform=transform), 7)
    with pytest.raises(BadData, match=why) as caught:
        read_window(plan, 0, 0)
    assert "\n" not in str(caught.value)


def test_a_transform_may_give_arrays_of_torch_and_of_more_dims(folder):
    def doubled(table):
        x = table["x"].to_numpy()
        return {"pair": np.stack([x, 2 * x], axis=1), "half": torch.from_numpy(x / 2)}

    plan = make_plan(parquet(folder, transform=doubled, keeps_rows=True), 7)
    rows, _ = read_window(plan, 0, 0)
    batch = columns_of([rows.table.slice(3, 50)], 1)
    expected = rows.ids[3:53]
    assert batch["pair"].tolist() == np.stack([expected, 2 * expected], axis=1).tolist()
    assert batch["half"].tolist() == (expected / 2).tolist()


def test_a_file_whose_columns_changed_is_named(folder):
    plan = make_plan(parquet(folder), 7)
    path = folder / "part-00.parquet"
    table = pq.read_table(path).rename_columns(["y", "text"])
    pq.write_table(table, path, row_group_size=40)
    assert path.stat().st_size == plan.files[0].size_bytes
    with pytest.raises(BadData, match=r"00.parquet, .* columns text: string, x: int64 before, te"):
        epoch_rows(plan, 0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"columns": "x"}, "columns must be a list of names, got 'x'"),
        ({"columns": []}, "columns must be a list of names"),
        ({"transform": 3}, "a transform is a function or pack_tokens"),
        ({"transform": (pack_tokens(length=2), raising)}, "must be the last transform"),
        ({"window_bytes": 0}, "0 < window_bytes <= prefetch_bytes must hold, got 0"),
        ({"on_bad_file": "ignore"}, 'must be "raise" or "skip"'),
    ],
)
def test_settings_that_cannot_work_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        parquet("somewhere", **options)


@settings(max_examples=60, deadline=None)
@given(budget=st.integers(1, 30), reads=st.integers(1, 4), seed=st.integers(0, 99))
def test_reading_ahead_keeps_to_the_budget_and_to_what_is_needed(budget, reads, seed):
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        path = write(Path(place) / "set", (200,), 10)
        unit = make_plan(parquet(path), 0).units[0].size_bytes
        source = parquet(path, window_bytes=1, prefetch_bytes=budget * unit * 2, max_reads=reads)
        plan = make_plan(source, seed)
    stream = Stream(plan)
    ahead, draw = Ahead(plan, stream), random.Random(seed)
    keys = list(itertools.islice(stream.follow(WindowKey(0, 0)), 60))
    at = 0
    while at < 30:
        turn = ahead.turn(keys[at], keys[at])
        assert all(k < keys[at] for k in turn.forget), "what is planned well never has to go"
        assert keys[at] in ahead.held or keys[at] in ahead.running
        assert len(ahead.running) <= reads + 1
        expected = sum(ahead.held.values()) + sum(
            u.size_bytes for k in ahead.running for u in plan.windows(k.epoch)[k.window]
        )
        assert expected <= source.prefetch_bytes or len(ahead.held) + len(ahead.running) == 1
        for key in sorted(ahead.running):
            if draw.random() < 0.5:
                ahead.read(key, sum(u.size_bytes for u in plan.windows(key.epoch)[key.window]))
        if keys[at] in ahead.held:
            at += draw.random() < 0.7


def test_windows_larger_than_their_footers_promise_make_room(folder):
    source = parquet(folder, window_bytes=2000, prefetch_bytes=20_000, max_reads=2)
    ahead = Ahead(make_plan(source, 7), stream := Stream(make_plan(source, 7)))
    first, second, third, fourth = itertools.islice(stream.follow(WindowKey(0, 0)), 4)
    assert ahead.turn(first, first) == Turn((first,), ())
    ahead.read(first, 2000)
    assert ahead.turn(first, first) == Turn((second, third), ())
    ahead.read(second, 7000)
    ahead.read(third, 7000)
    assert ahead.turn(first, first) == Turn((), (third,)), "the last of the stream goes"
    assert ahead.turn(second, second) == Turn((), (first,)), "and it is known not to fit"
    assert ahead.turn(third, third) == Turn((third,), (second,)), "unless it is needed"
    ahead.read(third, 50_000)
    assert ahead.turn(third, third) == Turn((), ())
    assert ahead.turn(fourth, fourth) == Turn((fourth,), (third,))


def test_values_that_are_much_larger_than_their_pages_are_planned_by_their_size(tmp_path):
    table = pa.table({"number": np.zeros(9000, np.int64), "text": ["so many words"] * 9000})
    pq.write_table(table, tmp_path / "a.parquet")
    plan = make_plan(parquet(tmp_path), 0)
    assert table.nbytes <= plan.units[0].size_bytes < 1.1 * table.nbytes
    assert pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).total_byte_size < 2000


def test_a_window_that_somebody_needs_again_is_read_again(folder):
    plan = make_plan(parquet(folder, window_bytes=2000, max_reads=1), 7)
    keys = [WindowKey(0, i) for i in range(4)]
    ahead = Ahead(plan, Stream(plan))
    assert ahead.turn(keys[2], keys[2]) == Turn((keys[2],), ())
    ahead.read(keys[2], 10)
    assert ahead.turn(keys[3], keys[3]) == Turn((keys[3],), (keys[2],))
    assert ahead.turn(keys[2], keys[2]) == Turn((keys[2],), ())
