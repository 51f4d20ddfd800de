"""Every strategy has the CPU's hash on one to four simulated devices.

The fixture fails where a rule of the device was broken meanwhile: a race, a touch by the host.
"""

from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.workers import where
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.test_one_hash import build, trained
from workers.distributed.process_group import Alone

pytestmark = pytest.mark.usefixtures("on_device")
STEPS, MOST_RANKS, KIND = 2, 4, "tied"
UNCLIPPED = {"clip_norm": None}
"""The norm that clips has another formula on a device (workers/reduction/norm.py)."""
STRATEGIES = ("ddp", "fsdp", "fsdp-grad-op", "hsdp:2", "pp:2", "pp:2/ZBVZeroBubble", "pp:3")
ALL = [*product(range(1, MOST_RANKS + 1), STRATEGIES), (4, "pp:2,fsdp-grad-op")]
QUICK = [(2, "ddp"), (3, "fsdp"), (4, "hsdp:2")]


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def of_the_cpu(request):
    """(precision, the hash of one rank on the CPU without sharding)"""
    with where.on_cpu():
        strategy = build("ddp", KIND, request.param, **UNCLIPPED)
        return request.param, trained(strategy, STEPS, KIND, Alone())


def in_process(ranks: Ranks, world_size: int, parallel: str, precision: str) -> str:
    group = ranks.form(1, list(range(world_size)))
    return trained(build(parallel, KIND, precision, **UNCLIPPED), STEPS, KIND, group)


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL],
)
def test_every_strategy_has_the_hash_of_one_rank_on_the_cpu(
    of_the_cpu: tuple[str, str], world_size: int, parallel: str
):
    precision, expected = of_the_cpu
    if parallel.startswith("pp"):  # a look at a block is of the whole process
        how = {"world_size": world_size, "parallel": parallel, "precision": precision}
        assert run_ranks(world_size, partial(in_process, **how)) == [expected] * world_size
        return
    strategies: list[Any] = []
    for rank in range(world_size):  # before there are threads, which share the host's generator
        where.use(where.of_rank(rank))
        strategies.append(build(parallel, KIND, precision, **UNCLIPPED))

    def body(group: Any) -> str:
        return trained(strategies[group.rank()], STEPS, KIND, group)

    assert where.run_threads(world_size, body) == [expected] * world_size
