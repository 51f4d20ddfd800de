"""The step that stops a run says where its gradients stop being finite."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic.protocol.mesh import DDP, Mesh
from tests.workers import where
from tests.workers.fake_groups import run_threads
from tests.workers.session_rig import InThread, Rig, Tiny
from tests.workers.sharded_rig import build, enter
from workers.distributed.process_group import Alone
from workers.nonfinite import Inspection, explain, told
from workers.parallel.strategy import NoPasses
from workers.step.vote import MicrobatchRecord

pytestmark = pytest.mark.usefixtures("place")


class PassesAt(NoPasses):
    def __init__(self, microbatch_id):
        self.in_backward = microbatch_id


class Poisoned(Tiny):
    """Of this rank's two micro-batches the second has a gradient that is no number."""

    calls = 0

    def __init__(self, is_poisoned):
        self.is_poisoned = is_poisoned

    def loss(self, model, batch):
        self.calls += 1
        total, weight = super().loss(model, batch)
        if self.is_poisoned and self.calls % 2 == 0:
            total = total + torch.sqrt(0 * model[2].bias.sum())
        return total, weight


@pytest.mark.parametrize("reduction", ["bitwise", "fast"])
def test_rank_micro_batch_and_parameter_are_named_when_the_run_stops(reduction):
    torch.set_num_threads(1)
    poisoned = [Poisoned(is_poisoned=rank == 1) for rank in range(2)]
    rigs = [Rig(reduction, work, thread=rank) for rank, work in enumerate(poisoned)]
    for rig in rigs:
        rig.form(generation=1, step=0)

    def body(group):
        rig = rigs[group.rank()]
        rig.join(InThread(group.rank(), group._mailboxes))
        assert rig.step().committed, "one such step is skipped"
        repeated = rig.step()
        assert not repeated.committed, "the next one would stop the run: it is looked at first"
        with pytest.raises(FloatingPointError) as raised:
            rig.step()
        return str(raised.value), rig.workload.calls

    said, calls = zip(*run_threads(2, body), strict=True)
    for rig in rigs:
        rig.loader.close()
    assert said[0] == said[1]
    assert said[0].startswith(
        "the gradients of 2 steps in a row, up to step 2, were not finite: the first is of "
        "parameter '2.bias', in micro-batch 3 on rank 1 (loss "
    )
    assert calls == (6, 6)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "fsdp-grad-op"])
def test_every_strategy_names_the_whole_parameter(parallel):
    strategy = build(parallel)
    enter(strategy, Alone(), 0)
    state = strategy.train_state
    member = SimpleNamespace(generation=1, strategy=strategy, train_state=state, group=Alone())
    inspection = Inspection(member)
    norm = strategy.train_state.model.blocks[1].norm
    norm.register_forward_hook(lambda _, inputs, output: output + torch.sqrt(0 * norm.bias.sum()))
    for is_asked in (False, True):
        if is_asked:
            inspection.ask(1, strategy.train_state.step)
        output = strategy.train_state.model(torch.tensor([1, 2, 3, 4], device=where.HERE), 1)
        inspection.before_backward(PassesAt(5))
        output.sum().backward()
        inspection.after_backward()
        assert inspection.found == ((5, "blocks.1.norm.bias") if is_asked else None)


def test_a_sum_that_overflows_and_several_ranks_are_told():
    advice = ". Lower the learning rate, set clip_norm"
    assert told([]) == "every micro-batch's gradient is finite, their sum is not" + advice
    assert told([(1, 0, "a", float("nan")), (5, 2, "b", 1.0)]) == (
        "the first is of parameter 'a', in micro-batch 1 on rank 0 (loss nan); 2 ranks have some"
        + advice
    )


def test_of_stages_that_share_a_micro_batch_the_last_one_is_told_with_the_loss_that_it_has():
    def body(group):
        rank = group.rank()
        member: Any = SimpleNamespace(group=group, mesh=Mesh(DDP, 2))
        inspection: Any = SimpleNamespace(found=(1, ("first.bias", "last.bias")[rank]))
        record = MicrobatchRecord(1, 2.5, None, np.zeros(2, np.int64), (), {})
        return explain(inspection, [record] if rank == 1 else [], member)

    (said,) = set(run_threads(2, body))
    assert said.startswith(
        "the first is of parameter 'last.bias', in micro-batch 1 on rank 1 (loss 2.5); 2 ranks"
    )


class Weightless(Tiny):
    def loss(self, model, batch):
        return super().loss(model, batch)[0], 0.0


def test_steps_without_any_weight_are_skipped_and_then_named_as_what_they_are():
    torch.set_num_threads(1)
    rig = Rig("fast", Weightless())
    rig.form(generation=1, step=0)
    assert rig.step().committed
    [said] = rig.link.of("committed")[0][0]["steps"]
    assert said.metrics.applied is False
    with pytest.raises(FloatingPointError) as raised:
        rig.step()
    rig.loader.close()
    assert str(raised.value) == (
        "the gradients of 2 steps in a row, up to step 2, were not finite: the total weight of "
        "step 2 is 0: loss() returned (sum, 0) for each of its micro-batches, and a step's sum is "
        "divided by its total weight. Return how many samples or tokens each sum is over, or raise "
        "faults.max_nonfinite (now 1)"
    )
