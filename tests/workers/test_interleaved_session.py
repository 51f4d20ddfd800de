"""A session on ranks that have two stages each: the user's loop has each micro-batch twice, and
what a step reports is what it reports under ddp."""

import multiprocessing
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elastic.protocol.schedule import INTERLEAVED, ZERO_BUBBLE
from tests.workers import where
from tests.workers.pipeline_models import WIDTH, Counting
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.session_rig import Rig
from tests.workers.sharded_rig import enter
from workers.data.placement import to_device
from workers.parallel.pipeline.strategy import Staged
from workers.parallel.shards import Ownership

pytestmark = pytest.mark.usefixtures("place_slowly")
STEPS = 3


class Work:
    """Its loss leaves nothing of a batch."""

    loader_processes = 1

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(Counting() for _ in range(4)))

    def build_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1)

    def dataset(self) -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.full((WIDTH,), i / 7), "y": torch.tensor(i % 3)} for i in range(41)]

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        inputs, wanted = batch.pop("x"), batch.pop("y")
        return nn.functional.cross_entropy(model(inputs), wanted, reduction="sum"), len(wanted)


def take_step(rig: Rig) -> None:
    """Values are logged between steps, before a backward and behind it."""
    session = rig.session
    session.log(between=session.step)
    if session.rank == 0:  # which has no loss where there are several
        session.log(first=session.step / 3)
    with session.next_step() as step:
        for batch in step.microbatches():
            total, weight = rig.workload.loss(session.model, batch)
            session.log(total=total)
            step.backward((total, weight))
            session.log(weight=weight)
        step.commit()


def trained(parallel: str, group: Any = None) -> tuple[str, float, list[Any]]:
    """The weights' hash, an evaluation, and what the first rank reports of each step."""
    torch.set_num_threads(1)
    rig = Rig("bitwise", Work(), parallel=parallel)
    if isinstance(rig.strategy, Staged):
        batch = {"x": torch.ones(3, WIDTH), "y": torch.zeros(3, dtype=torch.int64)}
        batch = to_device(batch, where.HERE)
        model = rig.train_state.model
        loss = partial(rig.workload.loss, model)
        rig.strategy.examine(loss, lambda: dict(batch), is_seen=False)
        rig.strategy.shards.holding = Ownership("initial")
    rig.form(1, 0)
    if group is not None:
        rig.join(group)
        assert isinstance(rig.strategy, Staged)
        rig.strategy.shards.holding = Ownership("initial")
        enter(rig.strategy, group, 0)
    for _ in range(STEPS):
        take_step(rig)
    values = [{"x": torch.full((WIDTH,), i / 5), "y": torch.tensor(i % 2)} for i in range(10)]
    evaluated = rig.session.evaluate(values, rig.workload.loss)
    told = [step.metrics for of, _ in rig.link.of("committed") for step in of["steps"]]
    rig.loader.close()
    names = ("step", "loss", "user", "samples")
    about = [[getattr(m, name) for name in names] for m in told]
    return rig.strategy.weights_sha256(), evaluated, about


@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [(f"pp:2/{INTERLEAVED}", 2), (f"pp:2/{ZERO_BUBBLE}", 2), ("pp:2,fsdp-grad-op", 4)],
)
def test_a_step_in_stages_reports_and_evaluates_what_ddp_does(parallel: str, num_ranks: int):
    """With ZBVZeroBubble the first rank has the loss. With fsdp-grad-op an evaluation gathers what
    two pipelines share."""

    def body(ranks: Ranks) -> Any:
        process: Any = multiprocessing.current_process()
        process._config["daemon"] = False  # it has a loader process, which dies with it
        return trained(parallel, ranks.form(1, list(range(num_ranks))))

    sha256, evaluated, told = trained("ddp")
    first, *others = run_ranks(num_ranks, body)
    assert [step for step, *_ in told] == [1, 2, 3]
    assert first == (sha256, evaluated, told)
    assert others == [(sha256, evaluated, [])] * (num_ranks - 1)
