"""The most memory of a rank while the layers are cut anew, as a share of what it holds of the state
before or afterwards, whichever is more: pipelines lose a rank, get one, and so on.

16 blocks of 6.3 MB, AdamW: 300 MB of state. Ranks are processes without a controller.
`python -m tests.bench.pipeline --only memory` records it.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.workers.pipeline_models import Case, square
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.sharded_rig import CPU, enter, spec
from tests.workers.test_sharded_bytes import peak_of, resident_bytes
from tests.workers.test_stage_state import bytes_held
from tests.workers.test_staged_strategy import train
from workers.backup.backup import NoBackup
from workers.parallel.pipeline.strategy import Staged, build_staged
from workers.parallel.shards import Ownership
from workers.resharding.host_memory import give_back

BLOCKS, WIDTH = 16, 1254
WORLDS = ((0, 1, 2, 3), (0, 1, 3), (0, 1, 3, 4), (1, 3, 4), (1, 3, 4, 5), (3, 4, 5))
"""The ranks of each generation."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


CASE = Case(blocks, lambda generator, index: torch.full((2, WIDTH), 0.01), square)


class Work:
    """Built on the meta device: what a rank holds is its stage's from the beginning."""

    def build_model(self) -> nn.Module:
        return CASE.build()

    def init_weights(self, module: nn.Module, name: str) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)

    def build_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return CASE.loss(model, batch)


def build() -> Staged:
    torch.set_num_threads(1)
    work = Work()
    config = spec("pp:2", global_batch=16, micro_batch=4)
    strategy = build_staged(work, config, CPU, NoBackup(), 2)
    batch = CASE.batches()[0]
    strategy.examine(partial(work.loss, strategy.train_state.model), lambda: batch)
    return strategy


def shares(ranks: Ranks) -> list[tuple[int, float, str]]:
    """(generation, peak by the larger share, what it held before and holds now) of this rank."""
    found: list[tuple[int, float, str]] = []
    strategy, is_newcomer = build(), True
    for generation, members in enumerate(WORLDS, 1):
        if ranks.index not in members:
            continue
        group = ranks.form(generation, list(members))
        if is_newcomer and generation == 1:
            strategy.shards.holding = Ownership("initial")
        elif is_newcomer:
            strategy.forget()
        before = 0 if is_newcomer else bytes_held(strategy)
        give_back()
        base = resident_bytes("VmRSS") - before
        what = partial(enter, strategy, group, generation - 1, generation=generation)
        peak, _ = peak_of(what)
        after = bytes_held(strategy)
        said = f"{before / 1e6:.0f} MB, then {after / 1e6:.0f}"
        if generation > 1:
            found.append((generation, (peak - base) / max(before, after), said))
        is_newcomer = False
        train(strategy, group, CASE, 1)
    return found


def peaks() -> dict[str, str]:
    results: dict[str, str] = {}
    of_ranks = run_ranks(6, shares)
    for generation, members in enumerate(WORLDS, 1):
        of_it = [(f[1], f[2]) for found in of_ranks for f in found if f[0] == generation]
        if of_it:
            share, said = max(of_it)
            before = len(WORLDS[generation - 2])
            results[f"{before} to {len(members)} ranks"] = f"at most {share:.2f} ({said})"
    return results
