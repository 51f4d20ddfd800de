"""The strategy of stages on ranks of their own: what a lost rank computed the others cut anew."""

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from elastic.protocol.errors import PeerLost, StepCancelled, WrongInput
from tests.workers import where
from tests.workers.pipeline_models import CASES, Case
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.sharded_rig import CPU, enter, sha256, spec
from workers.backup.backup import NoBackup
from workers.data.placement import to_device
from workers.distributed.process_group import Alone
from workers.parallel.pipeline.strategy import Staged, build_staged
from workers.parallel.shards import Ownership
from workers.parallel.strategy import Passes
from workers.step.randomness import seed_microbatch
from workers.train_state.train_state import Update

pytestmark = pytest.mark.usefixtures("place_slowly")
STEPS, LOST_AFTER = 4, 2


class Work:
    """A case, as a workload."""

    def __init__(self, name: str) -> None:
        self.case: Case = CASES[name]

    def build_model(self) -> Any:
        return self.case.build()

    def build_optimizer(self, params: Any) -> Any:
        return torch.optim.AdamW(params, lr=0.1)

    def pipeline_costs(self, model: Any) -> list[int]:
        """Of four blocks: two stages have two each, three stages have the ends alone. Of seven:
        two pipelines of four stages on four ranks, one of six on three."""
        return [3, 1, 2, 3, 1, 2, 3] if self.case is CASES["deep"] else [3, 1, 1, 3]

    def loss(self, model: Any, batch: Any) -> Any:
        return self.case.loss(model, batch)


def build(
    name: str,
    precision: str = "fp32",
    *,
    parallel: str = "pp:2",
    is_examined: bool = True,
    **changes: Any,
) -> Staged:
    """changes: of the worker's spec."""
    torch.set_num_threads(1)
    work, sizes = Work(name), {"global_batch": 16, "micro_batch": 4}
    config = spec(parallel, precision=precision, **sizes, **changes)
    strategy = build_staged(work, config, where.HERE, NoBackup(), config.parallel.pp)
    batch = to_device(work.case.batches()[0], where.HERE)
    if is_examined:
        strategy.examine(partial(work.loss, strategy.train_state.model), lambda: batch)
    strategy.shards.holding = Ownership("initial")
    return strategy


def train(
    strategy: Staged,
    group: Any,
    of: str | Case,
    num_steps: int,
    after_step: Any = None,
    *,
    see: Callable[[Passes], None] = lambda passes: None,
) -> None:
    """As a session does it, with a vote of what was used. of: the case, or its name. see: given the
    passes."""
    case = of if isinstance(of, Case) else CASES[of]
    state, batches = strategy.train_state, to_device(case.batches(), where.current())
    mesh = strategy.mesh_of(group.size())
    reducer = strategy.reducer(state.parameters, mesh, group)
    passes = strategy.passes(mesh, group, reducer)
    see(passes)
    ids = mesh.ids(len(batches), group.rank())
    for _ in range(num_steps):
        reducer.begin()
        passes.begin(state.step)
        state.buffers.begin_step()
        state.casting.cast()
        scale = state.loss_scale.value if state.loss_scale else 1.0
        order = passes.order(ids)
        for number, i in enumerate(order, 1):
            state.buffers.begin_microbatch()
            seed_microbatch(3, state.step, i)
            passes.before_forward(i)
            try:
                loss = passes.loss_of(case.loss(state.model, batches[i]))
                passes.backward(i, loss and loss[0] * scale, len(order) - number)
            except (PeerLost, StepCancelled):
                passes.reset()
                raise
        for _ in range(mesh.num_passes(len(batches), group.rank()) - len(order)):
            reducer.serve_pass()
        state.casting.restore()
        reduced = strategy.before_vote(reducer.finish(), group.read)
        is_bad = torch.tensor([not reduced.magnitude(group.read).is_finite], dtype=torch.int64)
        group.control.all_reduce(is_bad).wait()
        mine = [parameter in reducer.used for parameter in state.parameters]
        used = torch.tensor(mine, dtype=torch.int64)
        group.control.all_reduce(used).wait()
        flags = zip(state.parameters, used.tolist(), strict=True)
        some = {parameter for parameter, flag in flags if flag}
        strategy.apply(
            Update(
                step=state.step + 1,
                is_finite=not is_bad.item(),
                divisor=float(len(batches)),
                num_microbatches=len(batches),
                gradients={n: g for n, g in reduced.gradients.items() if n in some},
                buffers=reduced.buffers,
                integers=state.buffers.integers,
                log_names=(),
                squares=reduced.squares,
            )
        )
        if after_step is not None:
            after_step(state)
    reducer.close()


@pytest.mark.parametrize(
    ("name", "parallel", "depths"),
    [
        ("llama, dropout", "pp:2", [3]),
        ("resnet", "pp:2", [3]),
        ("deep", "pp:2/Interleaved1F1B", [3]),
        ("resnet", "pp:2/Interleaved1F1B", [2]),
        ("deep", "pp:2/ZBVZeroBubble", [3]),
    ],
)
def test_survivors_of_a_killed_stage_go_on_with_the_bits_of_an_undisturbed_rank(
    name: str, parallel: str, depths: list[int]
):
    """Where four blocks make two stages on each rank, the third rank is inactive."""
    undisturbed = build(name)
    enter(undisturbed, Alone(), 0)
    train(undisturbed, Alone(), name, STEPS)

    def body(ranks: Ranks) -> str:
        group, strategy = ranks.form(1, [0, 1, 2, 3]), build(name, parallel=parallel)
        enter(strategy, group, 0)
        ranks.once_said("abort", group.abandon)

        def die(state: Any) -> None:
            if state.step == LOST_AFTER:
                ranks.meet([0, 1, 2, 3])  # nobody is in that step any more
            if state.step == LOST_AFTER and ranks.index == 2:
                ranks.tell("killed")
                ranks.say("abort")  # on a device nobody else notices
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            train(strategy, group, name, STEPS, die)
        except (PeerLost, StepCancelled):  # in the middle of a step: the others do it again
            strategy.reset()
            strategy.train_state.buffers.restore_all()
            group = ranks.form(2, [0, 1, 3])
            enter(strategy, group, LOST_AFTER)
            assert [p.depth for p in strategy.plan.pipelines] == depths
            train(strategy, group, name, STEPS - strategy.train_state.step)
        return sha256(strategy)

    wanted = sha256(undisturbed)
    assert run_ranks(4, body) == [wanted, wanted, "killed", wanted]


def test_a_gradient_is_of_the_micro_batch_whose_backward_runs():
    """Whatever forward is at hand: on the first of two stages that is the next one's."""

    def body(ranks: Ranks) -> list[int]:
        group, strategy, seen = ranks.form(1, [0, 1]), build("llama, dropout"), list[int]()

        def see(passes: Passes) -> None:
            for parameter in strategy.train_state.parameters.values():
                parameter.register_hook(lambda gradient: seen.append(passes.in_backward))

        enter(strategy, group, 0)
        train(strategy, group, "llama, dropout", 1, see=see)
        return list(dict.fromkeys(seen))

    assert run_ranks(2, body) == [[0, 1, 2, 3]] * 2


def test_a_parameter_of_three_blocks_is_refused_and_one_of_two_is_not():
    class Thrice(Work):
        def build_model(self) -> Any:
            model = super().build_model()
            shared = model.blocks[0].linear.weight
            for block in model.blocks[1:3]:
                block.linear.weight = shared
            return model

        def pipeline_blocks(self, model: Any) -> list[str]:
            return [f"blocks.{i}" for i in range(4)]

    work = Thrice("gates")
    strategy = build_staged(work, spec("pp:2"), CPU, NoBackup(), 2)
    batch = work.case.batches()[0]
    with pytest.raises(WrongInput, match=r"blocks\.0\.linear\.weight is shared by 3 blocks"):
        strategy.examine(partial(work.loss, strategy.train_state.model), lambda: batch)


def test_a_worker_that_could_not_find_the_blocks_says_so():
    strategy = build_staged(Work("gates"), spec("pp:2"), CPU, NoBackup(), 2)
    with pytest.raises(WrongInput, match=r"found with the workload's loss\(\) on a micro-batch"):
        enter(strategy, Alone(), 0)


def test_a_worker_that_could_not_find_the_blocks_learns_them_from_one_that_has():
    def body(ranks: Ranks) -> str:
        strategy = build("llama, tied", is_examined=ranks.index == 1)
        group = ranks.form(1, [0, 1])
        enter(strategy, group, 0)
        train(strategy, group, "llama, tied", STEPS)
        return sha256(strategy)

    undisturbed = build("llama, tied")
    enter(undisturbed, Alone(), 0)
    train(undisturbed, Alone(), "llama, tied", STEPS)
    assert run_ranks(2, body) == [sha256(undisturbed)] * 2


def test_a_compiled_model_is_refused_when_it_is_built_and_before_a_step():
    strategy = build("gates")
    enter(strategy, Alone(), 0)
    strategy.train_state.model.compile()
    with pytest.raises(WrongInput, match=r"pp:2: compile\(\) makes one program of blocks"):
        train(strategy, Alone(), "gates", 1)
    with pytest.raises(WrongInput, match=r"leave it out, or use parallel='fsdp'"):
        strategy.examine(lambda batch: None, lambda: None)
