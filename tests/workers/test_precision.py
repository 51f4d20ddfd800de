"""Half precision and recomputed activations in real processes: one hash for every strategy."""

from typing import Any

import pytest
import torch
from torch import nn

from elastic.protocol.errors import WrongInput
from tests.workers import where
from tests.workers.ranks import run_ranks
from tests.workers.sharded_rig import CPU, Microbatched, Work, build, enter, sha256, spec, train
from workers.distributed.process_group import Alone
from workers.parallel.ddp import build_replica
from workers.step.precision import GROWTH_STEPS, LossScale

pytestmark = pytest.mark.usefixtures("place")

KINDS = (("ddp", 2), ("ddp", 3), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp-grad-op", 3))
SETTINGS = (
    ("bf16", {"precision": "bf16"}, 3),
    ("fp16", {"precision": "fp16"}, 8),
    ("recomputed", {"activation_checkpointing": True}, 3),
    ("bf16, recomputed", {"precision": "bf16", "activation_checkpointing": True}, 3),
)
"""name, options, steps: enough for some that fp16 does not skip."""
ALL = tuple((name, kind) for name, *_ in SETTINGS for kind in KINDS)
SOME = (
    ("bf16", ("ddp", 2)),
    ("bf16", ("fsdp", 3)),
    ("fp16", ("fsdp", 2)),
    ("recomputed", ("ddp", 3)),
    ("bf16, recomputed", ("fsdp", 1)),
    ("bf16, recomputed", ("fsdp-grad-op", 3)),
)
"""Each setting and each kind once at least."""


def after(num_steps: int, work: Work | None = None, **options) -> Any:
    """One rank's strategy."""
    strategy = build("ddp", workload=work, **options)
    train(strategy, Alone(), "ddp", num_steps, work=work)
    return strategy


@pytest.mark.parametrize(
    "pairs",
    [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.slow)],
)
def test_every_setting_has_one_hash_for_all_strategies_and_world_sizes(pairs):
    settings = {name: (options, num_steps) for name, options, num_steps in SETTINGS}

    def body(ranks):
        found = {}
        for generation, (name, (parallel, world_size)) in enumerate(pairs):
            if ranks.index < world_size:
                options, num_steps = settings[name]
                group = ranks.form(generation, list(range(world_size)))
                strategy = build(parallel, **options)
                enter(strategy, group, 0)
                train(strategy, group, parallel, num_steps)
                found[name, parallel, world_size] = sha256(strategy)
        return found

    plain = {name: sha256(after(steps, **options)) for name, options, steps in SETTINGS}
    assert plain["recomputed"] == sha256(after(3))
    assert plain["bf16, recomputed"] == plain["bf16"]
    assert len({sha256(after(3)), plain["bf16"], plain["fp16"]}) == 3
    for rank, found in enumerate(run_ranks(3, body)):
        wanted = [(name, *kind) for name, kind in pairs if kind[1] > rank]
        assert found == {key: plain[key[0]] for key in wanted}


def test_a_skipped_step_halves_the_loss_scale_and_changes_nothing_else():
    strategy = build("ddp", precision="fp16")
    before = sha256(strategy)
    train(strategy, Alone(), "ddp", 1)
    assert (strategy.train_state.step, strategy.train_state.loss_scale, sha256(strategy)) == (
        1,
        LossScale(2.0**15),
        before,
    )
    assert strategy.train_state.skipped_in_a_row == 0  # the scale was too high: no sign of trouble
    train(strategy, Alone(), "ddp", 7)
    assert strategy.train_state.loss_scale is not None
    assert strategy.train_state.loss_scale.num_finite > 0
    assert sha256(strategy) != before


def test_the_loss_scale_follows_from_what_was_committed():
    scale = LossScale(8.0, GROWTH_STEPS - 2)
    assert scale.after(True) == LossScale(8.0, GROWTH_STEPS - 1)
    assert scale.after(True).after(True) == LossScale(16.0)
    assert scale.after(False) == LossScale(4.0)


def test_the_loss_scale_travels_with_the_state():
    strategy, other = after(4, precision="fp16"), build("ddp", precision="fp16").train_state
    snapshot = strategy.train_state.snapshot()
    other.restore(snapshot.header, {name: snapshot.take(name) for name in snapshot.shapes})
    assert other.loss_scale == strategy.train_state.loss_scale != LossScale()


def test_parameters_and_optimizer_state_stay_single_precision():
    strategy = after(1, precision="bf16")
    assert {p.dtype for p in strategy.train_state.model.parameters()} == {torch.float32}
    moments = [s["exp_avg"].dtype for s in strategy.train_state.optimizer.state.values()]
    assert set(moments) == {torch.float32}


class Seen(Work):
    """What a forward meets."""

    def build_model(self):
        model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.dtypes = dtypes = {}

        def look(module, args, result):
            own = {n: p.dtype for n, p in module.named_parameters(recurse=False)}
            name = type(module).__name__.removeprefix("FSDP")
            dtypes[name] = (args[0].dtype, own.get("weight"), result.dtype)

        for module in (*model, model):
            module.register_forward_hook(look)
        return model


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_forward_computes_in_half_precision_but_for_running_statistics(parallel):
    work, half = Seen(), torch.bfloat16
    strategy = build(parallel, workload=work, precision="bf16")
    enter(strategy, Alone(), 0)
    with strategy.train_state.casting.applied():
        result = strategy.train_state.model(torch.ones(3, 5, device=where.HERE))
    assert result.dtype == torch.float32
    assert work.dtypes == {
        "Linear": (half, half, half),
        "BatchNorm1d": (half, torch.float32, half),
        "Sequential": (half, None, half),
    }


def test_a_replica_outside_of_steps_computes_in_single_precision():
    strategy = build("ddp", workload=Counted(), precision="bf16")
    plain = build("ddp", workload=Counted())
    inputs = torch.rand(4, 5).to(where.HERE)
    results = [each.train_state.model(inputs, 0) for each in (strategy, plain)]
    assert torch.equal(*results)
    with strategy.train_state.casting.applied():
        assert not torch.equal(strategy.train_state.model(inputs, 0), results[0])


def test_recurrent_layers_compute_with_the_casts():
    class Recurrent(Work):
        def build_model(self):
            return nn.GRU(3, 4)

    train_state = build_replica(Recurrent(), spec("ddp", precision="bf16"), CPU)
    with train_state.casting.applied():
        result, _ = train_state.model(torch.ones(2, 1, 3))
    result.sum().backward()
    trained = train_state.parameters.values()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in trained)


class Counted(Work):
    """Blocks with running statistics; counts how often one runs."""

    def build_model(self):
        self.counter = counter = torch.zeros(())

        class Counting(nn.Sequential):
            def forward(self, x):
                counter.add_(1)
                return super().forward(x)

        return Microbatched(
            nn.Linear(5, 5), *(Counting(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2))
        )

    def batch(self, step, microbatch_id):
        generator = torch.Generator().manual_seed(100 * step + microbatch_id)
        return torch.rand(4, 5, generator=generator)


def test_a_recomputed_block_runs_twice_and_counts_once():
    plain, twice = Counted(), Counted()
    hashes = [
        sha256(after(2, work=plain)),
        sha256(after(2, work=twice, activation_checkpointing=True)),
    ]
    assert hashes[0] == hashes[1]
    assert twice.counter == 2 * plain.counter


def test_gradients_of_these_tests_are_clipped():
    norm = after(1, precision="bf16").train_state.gradient_norm
    assert norm is not None
    assert norm > 0.5


def test_activation_checkpointing_without_blocks_is_refused():
    class Flat(Work):
        def build_model(self):
            return nn.Linear(2, 2)

    with pytest.raises(WrongInput, match="recomputes the members"):
        build_replica(Flat(), spec("ddp", activation_checkpointing=True), CPU)
