"""Sessions whose ranks are threads, each with a simulated device; groups with NCCL's manners."""

from collections.abc import Callable
from typing import Any

import torch

from tests.workers import where
from tests.workers.session_rig import Rig
from tests.workers.sharded_rig import enter
from workers.parallel.over_shards import OverShards
from workers.parallel.shards import Ownership


def run_sessions(world_size: int, body: Callable[[Rig], Any], **options: Any) -> list[Any]:
    """body(rig) in a thread for each rank, whose first step comes next; its results in rank order.
    options: of the rigs."""
    torch.set_num_threads(1)
    rigs: list[Rig] = []
    for rank in range(world_size):
        where.use(where.of_rank(rank))  # as the only device of a worker's process
        rigs.append(Rig(thread=rank, **options))
    where.use(where.HERE)

    def of_rank(group: Any) -> Any:
        rig = rigs[group.rank()]
        rig.form(1, 0)
        is_spread = isinstance(rig.strategy, OverShards)
        if is_spread:
            rig.strategy.shards.holding = Ownership("initial")
        rig.join(group)
        if is_spread:
            rig.strategy.shards.holding = Ownership("initial")
            enter(rig.strategy, group, 0)
        return body(rig)

    try:
        return where.run_threads(world_size, of_rank)
    finally:
        for rig in rigs:
            rig.loader.close()
