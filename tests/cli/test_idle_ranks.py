"""A run whose micro-batches leave workers idle says which number would not."""

import pytest

from elastic.config import RunConfig
from elastic.driver.idle_ranks import idle_note, idle_share


def note(workers, global_batch: int, micro_batch: int, **settings) -> str:
    sizes = {"global_batch": global_batch, "micro_batch": micro_batch}
    return idle_note(RunConfig(workers=workers, steps=1, **sizes, **settings))


def test_the_share_is_that_of_the_passes_that_nobody_makes():
    assert [idle_share(4, 3), idle_share(4, 2), idle_share(5, 4)] == [
        pytest.approx(1 / 3),
        0.0,
        pytest.approx(3 / 8),
    ]


def test_it_names_the_nearest_numbers_that_share_out_evenly():
    assert note(3, 24, 6) == (
        "V = 4 micro-batches over 3 workers leave them idle for 33 % of the time; "
        "micro_batch=8 (V = 3) or micro_batch=4 (V = 6) would not"
    )
    assert note((1, 4), 6, 1) == (
        "V = 6 micro-batches over 4 workers leave them idle for 25 % of the time; "
        "global_batch=4 (V = 4) or global_batch=8 (V = 8) would not"
    )


def test_a_run_whose_ranks_all_work_says_nothing():
    assert note(4, 24, 6) == note((1, 2), 24, 6) == note(1, 7, 7) == ""
