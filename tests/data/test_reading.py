"""What reading makes of files that differ in what does not matter, and of what goes wrong in it."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.data import pack_tokens, parquet
from elastic.data.footers import make_plan
from elastic.data.reading import read_window
from elastic.protocol.errors import BadData, WrongInput
from tests.data.test_plan import epoch_rows


def put(folder: Path, *tables) -> Path:
    folder.mkdir(exist_ok=True)
    for i, table in enumerate(tables):
        pq.write_table(table, folder / f"{i}.parquet")
    return folder


def test_neither_the_order_of_columns_nor_their_nullability_has_to_agree(tmp_path):
    numbers = pa.schema([pa.field("b", pa.int64(), nullable=False), pa.field("a", pa.int64())])
    first = pa.table({"a": [0, 1], "b": [10, 11]})
    second = pa.table({"b": [12], "a": [2]}, schema=numbers)
    plan = make_plan(parquet(put(tmp_path / "set", first, second)), 3)
    window, _ = read_window(plan, 0, 0)
    assert window.table.column_names == ["a", "b"]
    assert sorted(window.table["a"].to_pylist()) == [0, 1, 2]
    assert [b - 10 for b in window.table["b"].to_pylist()] == window.table["a"].to_pylist()
    seen = []
    source = parquet(tmp_path / "set", transform=lambda t: seen.append(t.schema.names) or t)
    epoch_rows(make_plan(source, 3), 0, "a")
    assert seen == [["a", "b"], ["a", "b"]], "a transform sees one order, too"
    named = make_plan(parquet(tmp_path / "set", columns=["b", "a"]), 3)
    assert read_window(named, 0, 0)[0].table.column_names == ["b", "a"]


def test_a_column_whose_name_has_a_dot_is_planned_by_its_size(tmp_path):
    table = pa.table({"a.b": list(range(90)), "pair": [{"x": i, "y": i} for i in range(90)]})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=10)
    plan = make_plan(parquet(tmp_path, columns=["a.b"], window_bytes=100), 3)
    assert len(plan.windows(0)) == 9
    both = make_plan(parquet(tmp_path, columns=["a.b", "pair"], window_bytes=100), 3)
    assert both.units[0].size_bytes == 3 * plan.units[0].size_bytes
    assert sorted(epoch_rows(plan, 0, "a.b")[0]) == list(range(90))


def test_what_encode_draws_depends_on_the_window_alone(tmp_path):
    put(tmp_path / "set", pa.table({"text": ["a", "b", "c"]}))
    packing = pack_tokens(length=2, encode=lambda d: [np.random.randint(1000), random.randrange(9)])
    plan = make_plan(parquet(tmp_path / "set", transform=packing), 3)
    first, again, other = (epoch_rows(plan, epoch, "tokens")[0] for epoch in (0, 0, 1))
    assert first == again
    assert first != other


LAZY = """
import sys
from elastic.data import pack_tokens, parquet
from elastic.data.footers import make_plan
from elastic.data.reading import read_window

def drawn(table):
    import torch
    return {"x": torch.rand(table.num_rows).numpy()}

def encoded(document):
    import torch
    return torch.randint(1000, (3,)).numpy()

transform, column = (drawn, "x") if sys.argv[2] == "x" else (
    pack_tokens(length=2, encode=encoded), "tokens")
plan = make_plan(parquet(sys.argv[1], transform=transform), 3)
assert "torch" not in sys.modules
first, again = (read_window(plan, 0, 0)[0].table[column].to_pylist() for _ in range(2))
assert first == again, (first, again)
"""


def test_torch_is_seeded_even_where_a_transform_has_just_loaded_it(tmp_path):
    put(tmp_path / "set", pa.table({"text": ["a", "b", "c"]}))
    for column in ("x", "tokens"):
        arguments = [sys.executable, "-c", LAZY, str(tmp_path / "set"), column]
        assert subprocess.run(arguments, timeout=240).returncode == 0


def test_more_text_than_an_offset_can_tell_is_named_with_its_row_groups(tmp_path):
    chunk = pa.array(["x" * 2**26])

    def long(table):
        return pa.table({"text": pa.chunked_array([chunk] * 33)})

    put(tmp_path / "set", pa.table({"text": ["a"]}))
    plan = make_plan(parquet(tmp_path / "set", transform=long), 3)
    with pytest.raises(BadData, match=r"0.parquet, row group 0: cannot be joined: offset overfl"):
        read_window(plan, 0, 0)


def test_a_footer_that_arrow_does_not_know_is_named(tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise pa.ArrowNotImplementedError("an encryption of tomorrow")

    put(tmp_path / "set", pa.table({"text": ["a"]}))
    monkeypatch.setattr(pq, "ParquetFile", unknown)
    with pytest.raises(WrongInput, match=r"0.parquet: the footer cannot be read: an encryption"):
        make_plan(parquet(tmp_path / "set"), 3)
