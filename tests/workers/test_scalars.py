"""Learning rate and gradient norm of each step, as they are told: the same by every strategy."""

import multiprocessing
from typing import Any

import pytest
import torch

from tests.workers import where
from tests.workers.pipeline_models import WIDTH
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.session_rig import Rig
from tests.workers.sharded_rig import enter
from tests.workers.test_interleaved_session import Work, take_step
from workers.data.placement import to_device
from workers.parallel.over_shards import OverShards
from workers.parallel.shards import Ownership
from workers.train_state.learning_rate import learning_rate

NUM_RANKS, STEPS = 3, 2
"""Of three ranks hsdp:2 and pp:2 leave one without a part."""
WORDS = ("ddp", "fsdp", "hsdp:2", "pp:2")


def norms(parallel: str, group: Any = None, generation: int = 1, **changes: Any) -> list[float]:
    """As the first rank tells them; nothing as another one."""
    torch.set_num_threads(1)
    rig = Rig("bitwise", Work(), parallel=parallel, **changes)
    strategy: Any = rig.strategy
    is_spread = isinstance(strategy, OverShards)
    if is_spread:
        model = rig.train_state.model
        batch = {"x": torch.ones(3, WIDTH), "y": torch.zeros(3, dtype=torch.int64)}
        batch = to_device(batch, where.HERE)
        strategy.examine(lambda b: rig.workload.loss(model, b), lambda: dict(batch))
        strategy.shards.holding = Ownership("initial")
    rig.form(generation, 0)
    if group is not None:
        rig.join(group)
        if is_spread:
            strategy.shards.holding = Ownership("initial")
        enter(strategy, group, 0, generation=generation)
    for _ in range(STEPS):
        take_step(rig)
    rig.loader.close()
    told = [step.metrics for of, _ in rig.link.of("committed") for step in of["steps"]]
    assert {m.learning_rate for m in told} <= {0.1}
    return [m.gradient_norm for m in told]


@pytest.mark.usefixtures("place_slowly")
def test_every_strategy_tells_the_norm_that_clipping_would_divide_by():
    """Clipping has it to the bit; without, it is that of the pass that looks for infinities."""
    expected, unclipped = norms("ddp", clip_norm=0.5), norms("ddp", clip_norm=None)
    assert len(set(expected)) == STEPS
    assert unclipped[0] == pytest.approx(expected[0], rel=1e-5), "of the same weights"

    def body(ranks: Ranks) -> list[list[float]]:
        process: Any = multiprocessing.current_process()
        process._config["daemon"] = False  # it has a loader process, which dies with it
        found: list[list[float]] = []
        for generation, (word, clip_norm) in enumerate(
            ((word, clip_norm) for word in WORDS for clip_norm in (None, 0.5)), 1
        ):
            group = ranks.form(generation, list(range(NUM_RANKS)))
            found.append(norms(word, group, generation, clip_norm=clip_norm))
        return found

    first, *others = run_ranks(NUM_RANKS, body)
    assert first[1::2] == [expected] * len(WORDS), "with clipping"
    for word, found in zip(WORDS, first[::2], strict=True):
        assert found == pytest.approx(unclipped, rel=1e-5), word
    assert others == [[[]] * 2 * len(WORDS)] * (NUM_RANKS - 1)


@pytest.mark.usefixtures("place")
def test_the_learning_rate_is_that_which_a_step_was_taken_with():
    rig = Rig("bitwise")
    rig.form(1, 0)
    rig.step()
    rig.step()
    rig.loader.close()
    told = [step.metrics for of, _ in rig.link.of("committed") for step in of["steps"]]
    assert [m.learning_rate for m in told] == [0.1, 0.05]
    assert told[0].gradient_norm > 0


def test_a_learning_rate_is_a_number_that_the_host_knows():
    weight = torch.nn.Parameter(torch.ones(2))
    assert learning_rate(torch.optim.SGD([weight], lr=0.5)) == 0.5
    assert learning_rate(torch.optim.AdamW([weight], lr=torch.tensor(0.25))) == 0.25
    groups = [{"params": [weight], "lr": 0.125}]
    assert learning_rate(torch.optim.SGD(groups, lr=0.5)) == 0.125
    bare = torch.optim.SGD([weight], lr=0.5)
    for unknown in (float("nan"), torch.tensor(float("inf")), torch.ones(2)):
        bare.param_groups[0]["lr"] = unknown
        assert learning_rate(bare) is None
    del bare.param_groups[0]["lr"]
    assert learning_rate(bare) is None
