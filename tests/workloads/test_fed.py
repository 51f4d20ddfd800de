"""The workloads on Parquet: their files are made once, their rows are the others' samples."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.footers import make_plan
from elastic.data.reading import read_window
from workers.data.parquet_batches import columns_of
from workers.workloads.charlm import CharLM, decode
from workers.workloads.digits import Digits
from workers.workloads.documents import CHARACTERS, character_ids
from workers.workloads.parquet import ParquetCharLM, ParquetDigits


def first_window(workload):
    source = workload.dataset()
    return source, read_window(make_plan(source, 3), 0, 0)[0]


def test_fed_digits_are_the_digits(tmp_path):
    workload = ParquetDigits(folder=str(tmp_path / "digits"))
    source, rows = first_window(workload)
    assert sorted(f.name for f in (tmp_path / "digits").iterdir()) == ["digits.parquet"]
    batch = columns_of([rows.table], source.row_length)
    images, labels = Digits().dataset().tensors
    assert torch.equal(batch["image"].reshape(-1, 1, 8, 8), images[rows.ids])
    assert torch.equal(batch["label"], labels[rows.ids])
    model = workload.build_model().eval()
    total, weight = workload.loss(model, batch)
    plain, _ = Digits().loss(model, [images[rows.ids], labels[rows.ids]])
    assert (total.item(), weight) == (plain.item(), len(rows.ids))
    again = workload.dataset()
    assert again == source


def test_fed_text_is_the_library_in_rows_of_one_length(tmp_path):
    workload = ParquetCharLM(folder=str(tmp_path / "text"), context=32, width=8, heads=2, layers=1)
    source, rows = first_window(workload)
    part = rows.table.slice(0, 33 * 8)
    batch = columns_of([part], source.row_length)
    assert batch["tokens"].shape == (8, 33)
    assert batch["tokens"].dtype == torch.int64
    assert set(decode(batch["tokens"].flatten())) <= {*CHARACTERS, "?"}
    loss = workload.loss(workload.build_model(), batch)
    assert abs(loss.item() - np.log(len(CHARACTERS) + 1)) < 1
    assert isinstance(workload.validation()[0], tuple)
    assert type(workload).evaluate is CharLM.evaluate


def test_fed_text_is_as_long_as_it_was_set_to_be_whatever_was_made_before(tmp_path):
    small, large = (
        ParquetCharLM(folder=str(tmp_path), limit_bytes=limit).dataset()
        for limit in (50_000, 2_000_000)
    )
    sizes = [sum(u.size_bytes for u in make_plan(s, 3).units) for s in (small, large)]
    assert 10 * sizes[0] < sizes[1]


@given(st.text(max_size=50))
def test_every_byte_has_one_id(text):
    ids = character_ids(text)
    assert len(ids) == len(text.encode())
    kept = "".join(c if c in CHARACTERS else "?" * len(c.encode()) for c in text)
    assert decode(torch.from_numpy(ids)) == kept
