"""Rows of all ranks become one curve per part, step by step."""

import json

import pytest

from elastic.observe.anatomy import PARTS, Shares, SharesByStep, newest, peaks_of, shares
from elastic.store.files import open_folder
from tests.cli.test_profile import row


def of(compute_s: float, wait_s: float) -> dict[str, float]:
    return {"compute_s": compute_s, "wait_s": wait_s}


def test_shares_are_of_the_time_of_all_ranks():
    rows = [row(1, 0, **of(3.0, 0.0)), row(1, 1, **of(2.0, 1.0))]
    assert shares(rows) == pytest.approx(
        dict.fromkeys(PARTS, 0.0) | {"compute": 5 / 6, "wait": 1 / 6}
    )
    assert shares([]) == {}


def test_a_step_is_told_once_all_ranks_have_sent_it():
    seen = SharesByStep()
    assert seen.hear([row(1, 0, **of(1.0, 0.0)), row(2, 0, **of(1.0, 0.0))]) == []
    (first,) = seen.hear([row(1, 1, **of(0.0, 1.0))])
    rows = [row(1, 0, **of(1.0, 1.0))]
    assert first == Shares(1, 1.0, shares(rows), peaks_of(rows))
    assert [s.step for s in seen.hear([row(2, 1, **of(1.0, 0.0))])] == [2]
    assert seen.hear([row(2, 1, **of(1.0, 0.0))]) == []


def test_a_step_that_is_done_again_is_told_again_and_a_lost_row_stops_nothing():
    seen = SharesByStep()
    seen.hear([row(5, rank) for rank in (0, 1)])
    assert [s.step for s in seen.hear([row(4, rank, 2) for rank in (0, 1)])] == [4]
    assert seen.hear([row(5, rank) for rank in (0, 1)]) == []  # of the generation before
    assert seen.hear([row(5, 0, 2)]) == []
    told = [s.step for n in range(6, 80) for rank in (0, 1) for s in seen.hear([row(n, rank, 2)])]
    assert told == list(range(5, 80))


def test_status_shows_the_newest_row_of_each_rank_of_the_newest_generation(tmp_path):
    rows = [row(3, 2), row(4, 0, 2), row(4, 1, 2), row(5, 0, 2), {"step": "none"}, row(6, 1)]
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (tmp_path / "anatomy.jsonl").write_text(text + '{"torn')
    assert newest(open_folder(str(tmp_path))) == [row(5, 0, 2), row(4, 1, 2)]
