"""The sample order: permutations, epochs, cost."""

import time
from collections import Counter
from math import factorial

import numpy as np
import pytest

from workers.data.order import SampleOrder


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4097])
def test_every_row_comes_exactly_once_in_every_epoch(num_rows: int) -> None:
    order = SampleOrder(num_rows, seed=7)
    for epoch in range(3):
        rows = order.rows(epoch * num_rows, num_rows)
        assert rows.dtype == np.int64
        assert sorted(rows.tolist()) == list(range(num_rows))


def test_epochs_run_on_into_each_other() -> None:
    for num_rows in (1, 2, 3, 10, 37):
        order = SampleOrder(num_rows, seed=1)
        whole = order.rows(0, 200)
        for first, count in [(0, 1), (3, 50), (9, 1), (36, 3), (5, 0), (100, 100)]:
            assert order.rows(first, count).tolist() == whole[first : first + count].tolist()


def test_epochs_and_seeds_have_different_orders_and_equal_ones_are_equal() -> None:
    order = SampleOrder(1000, seed=3)
    first, second = order.rows(0, 1000), order.rows(1000, 1000)
    assert (first == second).mean() < 0.02
    assert (first == SampleOrder(1000, seed=4).rows(0, 1000)).mean() < 0.02
    assert (first == SampleOrder(1000, seed=3).rows(0, 1000)).all()
    assert (first == np.arange(1000)).mean() < 0.02


def test_a_huge_dataset_and_a_late_position_cost_nothing() -> None:
    order = SampleOrder(10**9, seed=0)
    began = time.process_time()
    rows = np.concatenate([order.rows(5 * 10**15 + i * 64, 64) for i in range(50)])
    assert time.process_time() - began < 1.0
    assert len(set(rows.tolist())) > 3190
    assert rows.min() >= 0
    assert rows.max() < 10**9
    assert SampleOrder(2**62, seed=0).rows(2**62 - 3, 6).min() >= 0


@pytest.mark.parametrize("num_rows", [2, 3, 4])
def test_all_permutations_of_few_rows_are_about_equally_frequent(num_rows: int) -> None:
    num_epochs = 4800
    rows = SampleOrder(num_rows, seed=11).rows(0, num_rows * num_epochs).reshape(-1, num_rows)
    counts = Counter(map(tuple, rows.tolist()))
    expected = num_epochs / factorial(num_rows)
    assert len(counts) == factorial(num_rows)
    chi_squared = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi_squared < {2: 12, 3: 25, 4: 60}[num_rows]


def test_neighbours_and_places_are_unrelated_to_rows() -> None:
    num_rows = 1009
    table = np.stack([SampleOrder(num_rows, seed=s).rows(0, num_rows) for s in range(40)])
    places = np.arange(num_rows)
    correlations = [np.corrcoef(places, row)[0, 1] for row in table]
    steps = [np.corrcoef(row[:-1], row[1:])[0, 1] for row in table]
    assert np.abs(np.mean(correlations)) < 0.03
    assert np.abs(np.mean(steps)) < 0.03
    halves = (table[:, : num_rows // 2] < num_rows // 2).mean(axis=1)
    assert abs(halves.mean() - 0.5) < 0.01


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 row"):
        SampleOrder(0, seed=0)
