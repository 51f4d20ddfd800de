"""Sums of three ranks have the bits of stock DDP, whose buckets are cut in the same places; also at
the end of a pass, where batches are smaller."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.scripts.test_units import Listening
from tests.workers.ranks import Ranks, run_ranks
from workers.scripts.default_group import DefaultGroup, as_default
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.loader import Loaders
from workers.scripts.in_place.seams import standing_in

STEPS, BATCH = 4, 5


class Crossed(nn.Module):
    """Its parameters are used in another order than they are made in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(33, 1), nn.Linear(17, 65)
        self.middle = nn.Linear(65, 33)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(inputs).relu()).relu())


def gradients(ranks: Ranks, generation: int, *, in_place: bool, **settings: Any) -> list[Any]:
    group = DefaultGroup(ranks.form(generation, [0, 1, 2]))
    course = Course("buckets", group, Listening())
    found: list[Any] = []
    with as_default(group):
        if in_place:
            group.course = course
            with standing_in(course, Loaders(course)):
                trained(found, settings)
        else:
            trained(found, settings)
    return found


def trained(found: list[Any], settings: dict[str, Any]) -> None:
    """The last batch of a pass is smaller; the second pass is one step."""
    torch.manual_seed(0)
    net = Crossed()
    model = DistributedDataParallel(net, **settings)
    dataset = TensorDataset(torch.randn(3 * (2 * BATCH + 3), 17))
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset))
    for accumulates in (False, True):
        for number, (inputs,) in enumerate(loader, 1):
            is_unit = number == len(loader) or not accumulates
            with nullcontext() if is_unit else model.no_sync():
                model(inputs).square().mean().backward()
            if is_unit:
                found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
                net.zero_grad()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bucket_cap_mb": 0.004},
        {"bucket_cap_mb": 0.004, "find_unused_parameters": True},
        {"bucket_cap_mb": 0.004, "static_graph": True},
    ],
    ids=["as it is", "small buckets", "never cut anew", "static graph"],
)
def test_the_sums_of_three_ranks_are_stock_ddps(settings):
    def body(ranks: Ranks) -> Any:
        stock = gradients(ranks, 1, in_place=False, **settings)
        ours = gradients(ranks, 2, in_place=True, **settings)
        return [
            all(torch.equal(a, b) for a, b in zip(x, y, strict=True))
            for x, y in zip(stock, ours, strict=True)
        ]

    assert run_ranks(3, body) == [[True] * STEPS] * 3
