"""What a run keeps of a `ray.data.Dataset`, and compares when it goes on."""

import pytest

from elastic.data import parquet
from elastic.data.dataset_record import DatasetFacts, compare_facts, write_facts
from elastic.data.footers import make_plan
from elastic.data.record import open_record
from elastic.protocol.errors import WrongInput
from elastic.store.files import open_folder
from tests.data.histories import write_rows


def test_a_dataset_that_changed_is_refused_with_the_difference(tmp_path):
    folder, facts = open_folder(str(tmp_path)), DatasetFacts(70, "x: int64")
    assert not write_facts(folder, facts), "no run, no record"
    (tmp_path / "config.json").write_text("{}")
    assert not compare_facts(folder, facts)
    assert write_facts(folder, facts)
    assert compare_facts(folder, facts)
    with pytest.raises(
        WrongInput, match="num_rows was 70 and now is 71; columns was 'x: int64' and"
    ):
        compare_facts(folder, DatasetFacts(71, "x: double"))
    plan = make_plan(parquet(write_rows(tmp_path / "set")), 3)
    with pytest.raises(WrongInput, match="began with other data than Parquet files"):
        open_record(plan, str(tmp_path))
