"""Parquet behind a URI: a real S3 server, with faults between."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.data import parquet
from elastic.data.footers import make_plan, open_filesystem
from elastic.data.reading import Unreachable, read_window
from elastic.protocol.errors import BadData, WrongInput
from tests.data.histories import ROWS, write_rows
from tests.data.test_plan import epoch_rows
from tests.object_store import uri


@pytest.fixture
def place(s3, s3_server, tmp_path):
    """A URI, with parameters, of the rows of tests/data/histories.py."""
    place = uri(s3_server.new_bucket(), "set", s3.port)
    filesystem, inside = open_filesystem(place)
    for file in write_rows(tmp_path / "set").iterdir():
        pq.write_table(pq.read_table(file), f"{inside}/{file.name}", filesystem=filesystem)
    return place


def test_a_bucket_is_planned_and_read_as_a_folder_is(place):
    plan = make_plan(parquet(place, window_bytes=300), 3)
    bucket = place.split("/")[2]
    assert [f.path for f in plan.files] == [f"s3://{bucket}/set/p{i}.parquet" for i in range(5)]
    values, ids = epoch_rows(plan, 0, "row")
    assert values == ids
    assert sorted(values) == list(range(ROWS))
    one = place.replace("/set?", "/set/p2.parquet?")
    assert make_plan(parquet([one, place]), 3).num_rows == ROWS, "named twice, used once"


def test_the_record_holds_no_parameter_and_no_secret(place):
    secret = place.replace("s3://", "s3://somebody:secret@")
    plan = make_plan(parquet(secret, window_bytes=300), 3)
    said = json.dumps(plan.to_json()) + str(plan.units[0])
    assert plan.hash == make_plan(parquet(place, window_bytes=300), 3).hash
    assert "secret" not in said
    assert "endpoint_override" not in said
    with pytest.raises(WrongInput, match="does not exist") as caught:
        make_plan(parquet(secret.replace("/set?", "/nothing?")), 3)
    assert "secret" not in str(caught.value)


def test_an_outage_is_no_bad_file_that_could_be_left_out(place, s3):
    source = parquet(place, window_bytes=300, on_bad_file="skip")
    plan = make_plan(source, 3)
    s3.faults.errors, s3.faults.only = 10_000, "set"
    with pytest.raises(Unreachable, match=r"p\d.parquet, row group \d+: cannot be read: .*500"):
        read_window(plan, 0, 0)
    s3.faults.heal()
    s3.faults.errors, s3.faults.only = 10_000, "p2.parquet"
    with pytest.raises(WrongInput, match=r"p2.parquet: the footer cannot be read: .*500"):
        make_plan(source, 3)
    s3.faults.heal()
    filesystem, inside = open_filesystem(place)
    filesystem.delete_file(f"{inside}/p2.parquet")
    found = [read_window(plan, 0, w) for w in range(len(plan.windows(0)))]
    assert sum(rows.count for rows, _ in found) == ROWS - 101
    assert all("p2.parquet" in s.problem for _, skipped in found for s in skipped)


def test_an_object_that_was_replaced_since_is_named(place):
    plan = make_plan(parquet(place, window_bytes=300), 3)
    filesystem, inside = open_filesystem(place)
    table = pa.table({"row": list(range(500))})
    pq.write_table(table, f"{inside}/p2.parquet", filesystem=filesystem)
    with pytest.raises(BadData, match=r"p2.parquet, row group \d+: the file changed since"):
        epoch_rows(plan, 0, "row")
