"""What `elastic data check` compares a run's record with."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic.data import pack_tokens, parquet
from elastic.data.checking import planned_stream
from elastic.data.footers import make_plan
from elastic.data.record import open_record


def test_rows_of_tokens_whose_ids_coincide_are_no_repeated_documents(tmp_path):
    """An id is the document's << 20 plus the token's place: a long document runs into the next."""
    length = 2**18
    pq.write_table(pa.table({"text": ["a" * 5 * length, "b" * length]}), tmp_path / "0.parquet")
    source = parquet(tmp_path, shuffle=False, transform=pack_tokens(length=length))
    stream = planned_stream(open_record(make_plan(source, 3), str(tmp_path)))
    (zero, ids), (one, again) = itertools.islice(stream, 2)
    assert (zero, one, len(ids), len(set(ids.tolist()))) == (0, 1, 6, 5)
    assert np.array_equal(ids, again)
