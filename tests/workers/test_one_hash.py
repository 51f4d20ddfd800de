"""Fifty steps by every strategy, schedule and number of ranks: one hash for each precision."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from elastic.protocol.schedule import SCHEDULES
from tests.workers import where
from tests.workers.pipeline_models import LENGTHS, Case, Llama, next_token, tokens
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.sharded_rig import enter, sha256, spec
from tests.workers.test_staged_strategy import train
from workers.data.placement import to_device
from workers.distributed.process_group import Alone
from workers.parallel.build import build_strategy
from workers.parallel.pipeline.strategy import Staged
from workers.parallel.sharded import Sharded
from workers.parallel.shards import Ownership

MOST_RANKS, NUM_STEPS, LAYERS = 6, 50, 8
"""Pipelines of four ranks with two stages each need as many layers."""
STAGES = [f"pp:{depth}/{schedule}" for depth in (2, 3, 4) for schedule in SCHEDULES]


class SixBatches(Case):
    """One for each rank of ddp."""

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        return [self.batch(generator, i % len(LENGTHS)) for i in range(MOST_RANKS)]


MODELS = {
    kind: SixBatches(
        lambda is_tied=is_tied: Llama(is_tied, dropout=0.1, num_layers=LAYERS), tokens, next_token
    )
    for kind, is_tied in (("tied", True), ("untied", False))
}


class Work:
    def __init__(self, case: Case) -> None:
        self.case = case

    def build_model(self) -> Any:
        return self.case.build()

    def build_optimizer(self, params: Any) -> Any:
        return torch.optim.AdamW(params, lr=0.01)

    def loss(self, model: Any, batch: Any) -> Any:
        return self.case.loss(model, batch)


def hash_after(
    num_steps: int,
    parallel: str,
    kind: str,
    precision: str,
    group: Any,
    after_step: Callable[[Any], None] = lambda state: None,
) -> str:
    return trained(build(parallel, kind, precision), num_steps, kind, group, after_step)


def build(parallel: str, kind: str, precision: str, **changes: Any) -> Any:
    """The strategy. changes: of the worker's spec."""
    torch.set_num_threads(1)
    work = Work(MODELS[kind])
    batch_size = 2 * MOST_RANKS
    sizes = {"global_batch": batch_size, "micro_batch": 2}
    config = spec(parallel, precision=precision, **sizes, **changes)
    strategy: Any = build_strategy(work, config, where.current())
    if isinstance(strategy, Staged):
        batch = to_device(work.case.batches()[0], where.current())
        strategy.examine(partial(work.loss, strategy.train_state.model), lambda: batch)
    if isinstance(strategy, Staged | Sharded):
        strategy.shards.holding = Ownership("initial")
    return strategy


def trained(
    strategy: Any,
    num_steps: int,
    kind: str,
    group: Any,
    after_step: Callable[[Any], None] = lambda state: None,
) -> str:
    """Its hash after so many steps."""
    enter(strategy, group, 0)
    train(strategy, group, MODELS[kind], num_steps, after_step)
    return sha256(strategy)


def wanted(num_steps: int, kind: str, precision: str) -> str:
    """One rank of ddp's."""
    return _wanted(num_steps, kind, precision, where.HERE.type)


@cache
def _wanted(num_steps: int, kind: str, precision: str, place: str) -> str:
    before = torch.get_num_threads()
    found = hash_after(num_steps, "ddp", kind, precision, Alone())
    torch.set_num_threads(before)
    return found


def differing(num_steps: int, kind: str, precision: str, num_ranks: int, words: list[str]) -> Any:
    expected = wanted(num_steps, kind, precision)

    def body(ranks: Ranks) -> list[str]:
        wrong: list[str] = []
        for generation, parallel in enumerate(words, 1):
            group = ranks.form(generation, list(range(num_ranks)))
            step = lambda state: ranks.get_further()  # noqa: E731
            if hash_after(num_steps, parallel, kind, precision, group, step) != expected:
                wrong.append(parallel)
        return wrong

    return run_ranks(num_ranks, body)


@pytest.mark.slow
@pytest.mark.timeout(0)  # the ranks' own limit holds, from step to step
@pytest.mark.parametrize("num_ranks", range(1, MOST_RANKS + 1))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_strategy_schedule_and_number_of_ranks_has_one_hash_after_fifty_steps(
    kind: str, precision: str, num_ranks: int
):
    words = ["ddp", "fsdp", *STAGES, "pp:2,fsdp-grad-op", "pp:2/ZBVZeroBubble,fsdp-grad-op"]
    assert differing(NUM_STEPS, kind, precision, num_ranks, words) == [[]] * num_ranks


@pytest.mark.usefixtures("place_slowly")
def test_two_steps_of_a_few_of_these_have_one_hash():
    words = ["ddp", "fsdp", "pp:2", "pp:2/ZBVZeroBubble", "pp:4/Interleaved1F1B"]
    words += ["pp:2,fsdp-grad-op", "pp:2/ZBVZeroBubble,fsdp-grad-op"]
    assert differing(2, "tied", "bf16", 4, words) == [[]] * 4
