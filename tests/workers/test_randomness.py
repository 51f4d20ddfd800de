"""Seeding by sample and by micro-batch."""

import random

import numpy as np
import pytest
import torch

from tests.workers import where
from workers.step.randomness import seed_dataset, seed_microbatch, seed_sample


def _draws() -> tuple[float, ...]:
    return (
        *torch.rand(2).tolist(),
        *torch.rand(2, device=where.HERE).tolist(),
        *np.random.rand(2).tolist(),
        random.random(),
        random.random(),
    )


@pytest.mark.usefixtures("place")
def test_draws_depend_on_the_sample_alone() -> None:
    seed_sample(0, 5)
    first = _draws()
    torch.rand(17), np.random.rand(3), random.random()
    seed_sample(0, 5)
    assert _draws() == first


def test_all_purposes_seeds_positions_and_ids_give_other_draws() -> None:
    seen = set()
    for seed in (0, 1, -1, 2**70):
        seed_dataset(seed)
        seen.add(_draws())
        for position in range(20):
            seed_sample(seed, position)
            seen.add(_draws())
        for step in range(5):
            for microbatch_id in range(5):
                seed_microbatch(seed, step, microbatch_id)
                seen.add(_draws())
    assert len(seen) == 4 * (1 + 20 + 25)
    for i in range(8):
        assert len({draws[i] for draws in seen}) == len(seen)


def test_first_draws_of_neighbours_are_uniform_and_uncorrelated() -> None:
    firsts = []
    for position in range(2000):
        seed_sample(1, position)
        firsts.append(float(torch.rand(1)))
    values = np.array(firsts)
    assert abs(values.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.08
