"""Models that the user compiles in place: the same names and bits, also on another mesh."""

import logging

import pytest
import torch

from tests.workers.ranks import run_ranks
from tests.workers.sharded_rig import Dense, build, enter, newcomer, sha256, train
from workers.distributed.process_group import Alone
from workers.health.compilation import Compilation
from workers.health.vitals import Vitals

SETTINGS = (
    {},
    pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
    {"activation_checkpointing": True},
)


class Compiler:
    """A backend that counts."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        return graph.forward


def trained(parallel: str, backend: str | None, **options) -> tuple[str, list[str]]:
    """(hash, names) after two steps."""
    torch._dynamo.reset()
    strategy = build(parallel, **options)
    enter(strategy, Alone(), 0)
    if backend is not None:
        strategy.train_state.model.compile(backend=backend)
    train(strategy, Alone(), parallel, 2)
    return sha256(strategy), [n for n, _ in strategy.train_state.model.named_parameters()]


@pytest.mark.usefixtures("place_slowly")
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_compiled_model_keeps_its_names_and_has_one_hash_for_all_strategies(options):
    """The backend "eager" runs what torch would: its bits are those of the plain model, too."""
    strategies = ("ddp", "fsdp", "fsdp-grad-op")
    assert {*[trained(p, "eager", **options)[0] for p in strategies]} == {
        trained("ddp", None, **options)[0]
    }
    found = [trained(p, "aot_eager", **options) for p in strategies]
    assert found == [(found[0][0], trained("ddp", None)[1])] * 3


@pytest.mark.usefixtures("place_slowly")
def test_a_reshard_keeps_the_bits_of_a_compiled_model_and_compiles_it_a_few_times_only():
    """Or torch would give up compiling after so many meshes."""

    def body(ranks):
        strategy, compiler = build("fsdp"), Compiler()
        if ranks.index:
            strategy = newcomer("fsdp")
        strategy.train_state.model.compile(backend=compiler)
        counts = []
        for generation, members in enumerate(([0], [0, 1], [0, 1])):
            if ranks.index in members:
                enter(strategy, ranks.form(generation, members), generation)
                group = strategy._group
                train(strategy, group, "fsdp", 1)
                counts.append(compiler.num_graphs)
        return sha256(strategy), counts[-1] - counts[-2]

    plain = build("ddp")
    train(plain, Alone(), "ddp", 3)
    assert run_ranks(2, body) == [(sha256(plain), 0)] * 2


@pytest.mark.usefixtures("place")
def test_a_single_parameter_per_block_is_one_slice():
    strategy, plain = build("fsdp", workload=Dense()), build("ddp", workload=Dense())
    for each, parallel in ((strategy, "fsdp"), (plain, "ddp")):
        enter(each, Alone(), 0)
        train(each, Alone(), parallel, 1, work=Dense())
    assert sha256(strategy) == sha256(plain)


def test_compiling_is_logged(caplog):
    torch._dynamo.reset()
    caplog.set_level(logging.INFO)
    strategy, compilation = build("ddp"), Compilation(Vitals())
    compilation.tell(1, 1)  # what other tests compiled in this process
    caplog.clear()
    strategy.train_state.model.compile(backend="eager")
    train(strategy, Alone(), "ddp", 1)
    compilation.tell(2, 5)
    compilation.tell(2, 6)
    (record,) = [r for r in caplog.records if r.name == "workers.health.compilation"]
    assert record.getMessage().startswith("generation=2 step=5 compiled graphs=")
