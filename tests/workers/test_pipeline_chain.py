"""The probe: of all kinds of models it finds the chain of blocks, and what is none is told."""

import copy
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.protocol.errors import UserError, WrongInput
from elastic.protocol.pipeline import Stages
from tests.workers.pipeline_models import CASES, WIDTH, Gate, Residual, square
from workers.parallel.pipeline.absent import (
    Absent,
)
from workers.parallel.pipeline.chain import Chain, block_names, find_chain
from workers.parallel.pipeline.passes import StagePasses
from workers.parallel.pipeline.stage import StageModel
from workers.train_state.train_state import TrackedBuffers

CPU = torch.device("cpu")


def probe(model: nn.Module, loss: Any = square, workload: Any = None, batch: Any = None) -> Chain:
    batch = torch.ones(4, WIDTH) if batch is None else batch
    return find_chain(model, workload, lambda: loss(model, batch))


@pytest.mark.parametrize("name", CASES)
def test_a_chain_is_found_and_the_model_is_as_before(name: str):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    batches = case.batches()
    chains = [
        find_chain(model, None, lambda batch=batch: case.loss(model, batch)) for batch in batches
    ]
    first = chains[0]
    assert len(first.names) >= 3
    assert all(chain.uses == first.uses for chain in chains)
    assert all(chain.arguments == first.arguments for chain in chains)
    assert all(cost > 0 for cost in first.costs)
    assert first.uses.keys() == dict(model.named_parameters()).keys()
    inside = [n for n in first.uses if any(n.startswith(f"{b}.") for b in first.names)]
    for parameter in inside:
        (block,) = first.uses[parameter]
        assert parameter.startswith(f"{first.names[block]}.")
    stages = [range(0, 1), range(1, len(first.names))]
    held = [first.parameters_of(stage) for stage in stages]
    assert set(held[0]) | set(held[1]) == set(first.uses)
    assert set(held[0]) & set(held[1]) == set(first.shared)
    # Nothing of the model has changed, and it runs.
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    loss = case.loss(model, batches[0])
    assert torch.isfinite(loss[0] if isinstance(loss, tuple) else loss)


def test_costs_are_those_of_the_kernels():
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    chain = probe(nn.Sequential(*blocks))
    flops, written = 2 * 4 * WIDTH * WIDTH, 4 * WIDTH
    # Behind the last one: a square, and a mean.
    assert chain.costs == (flops + written + 1,) * 2 + (flops + 2 * written + 1 + 1,)


def test_a_tied_table_is_used_at_both_ends():
    case = CASES["llama, tied"]
    model = case.build()
    chain = find_chain(model, None, lambda: case.loss(model, case.batches()[0]))
    assert chain.shared == {"embed_tokens.weight": (0, 3)}


def test_what_a_block_modifies_of_its_input_is_known():
    model = CASES["in place"].build()
    (argument,) = probe(model).arguments[1]
    assert argument.is_modified
    (argument,) = probe(CASES["gates"].build()).arguments[1]
    assert not argument.is_modified


def test_a_workload_may_name_its_parts_and_their_costs():
    class Workload:
        def pipeline_blocks(self, model):
            return ["blocks.1", "blocks.3"]

        def pipeline_costs(self, model):
            return [2, 3.5]

    # What lies before, between and behind the named ones belongs to them.
    model = Residual(Gate)
    chain = probe(model, workload=Workload())
    assert (chain.names, chain.costs) == (("blocks.1", "blocks.3"), (2.0, 3.5))
    assert chain.uses["blocks.0.gate"] == chain.uses["blocks.2.gate"] == (0,)
    assert chain.uses["blocks.3.gate"] == chain.uses["last.weight"] == (1,)


@pytest.mark.parametrize(
    ("names", "costs", "says"),
    [
        (["blocks.9"], [1], "pipeline_blocks() names 'blocks.9', and the model has no such part"),
        (["blocks"], [1], "blocks does not run in a micro-batch"),
        (["blocks.0", "blocks.0"], [1], "pipeline_blocks() names 'blocks.0', which is named by"),
        (["blocks.0", "blocks.0.linear"], [1], "pipeline_blocks() names 'blocks.0.linear', which"),
        (
            ["blocks.1", "blocks.0"],
            [1],
            "the blocks run in the order blocks.0, blocks.1; name them",
        ),
        (
            [],
            [1],
            "the model has no nn.ModuleList or nn.Sequential with parameters; name its parts",
        ),
        (
            ["blocks.0", "blocks.1"],
            [1],
            "pipeline_costs() must give a number above 0 for each of 2",
        ),
        (["blocks.0", "blocks.1"], [1, 0], "pipeline_costs() must give a number above 0 for each"),
    ],
)
def test_names_and_costs_that_are_none_are_refused(names, costs, says):
    class Workload:
        def pipeline_blocks(self, model):
            return names

        def pipeline_costs(self, model):
            return costs

    with pytest.raises(WrongInput) as caught:
        probe(Residual(Gate), workload=Workload())
    assert str(caught.value).startswith(says)


def test_a_model_without_lists_has_no_blocks():
    with pytest.raises(WrongInput, match=r"no nn.ModuleList or nn.Sequential with parameters"):
        block_names(nn.Linear(2, 2), None)


class Skips(Residual):
    def forward(self, x):
        kept = x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x + kept if i == 2 else x)
        return self.last(self.norm(x))


class Unet(Residual):
    def forward(self, x):
        a = self.blocks[0](self.first(x))
        b = self.blocks[1](a)
        return self.last(self.norm(self.blocks[3](self.blocks[2](b) + a)))


class AtTheEnd(Residual):
    def forward(self, x):
        kept = x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x + kept))


class OfABlockAtTheEnd(Residual):
    def forward(self, x):
        x = self.first(x)
        results = [x := block(x) for block in self.blocks]
        return self.last(self.norm(x + results[1]))


class Twice(Residual):
    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x


class Never(Residual):
    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


class Parallel(Residual):
    def forward(self, x):
        return sum(block(x) for block in self.blocks)


class Hidden(Residual):
    """A block reads what another one has left behind."""

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        kept = [x * 2]
        self.blocks[2].register_forward_hook(lambda m, a, y: None)
        x = self.blocks[1](x)
        forward = self.blocks[2].linear.forward
        self.blocks[2].linear.forward = lambda t: forward(t) + kept[0]
        try:
            x = self.blocks[2](x)
        finally:
            del self.blocks[2].linear.forward
        return self.blocks[3](x)


class RootBias(Residual):
    """Computed once, of parameters of the root, and taken by every block."""

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, bias):
            return self.linear(x) + bias

    def __init__(self) -> None:
        super().__init__(RootBias.Taking)

    def forward(self, x):
        bias = self.first(x).mean(0)
        for block in self.blocks:
            x = block(x, bias)
        return x


class Deciding(Residual):
    def forward(self, x):
        x = self.blocks[0](self.first(x))
        if x.max() > 1:
            x = x * 2
        for block in self.blocks[1:]:
            x = block(x)
        return x


class Routing(Residual):
    """As many rows as the values say."""

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        x = x[x.sum(-1) > 0]
        for block in self.blocks[1:]:
            x = block(x)
        return x


class Writing(Residual):
    def forward(self, x):
        result = torch.zeros(4, WIDTH)
        result[:2] = self.first(x)[:2]
        for block in self.blocks:
            result = block(result)
        return result


class Forgetting(Residual):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Leaking(nn.Module):
    """Its activation draws a random number for each negative value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), nn.RReLU()

    def forward(self, x):
        return self.activation(self.linear(x))


class Leaks(Residual):
    def __init__(self, kind) -> None:
        super().__init__(kind)
        self.blocks[1] = Leaking()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Leaks, r"loss\(\) calls rrelu_with_noise on a tensor that is on another stage, and how "
                r"many random numbers it draws may depend on the values \(test_pipeline_chain.py:"
                r"\d+: return self.activation"),
        (Skips, r"blocks.2 takes a tensor of shape \[4, 8\] that depends on parameters but is not "
                r"what blocks.1 returns \(a skip connection\); return it from blocks.1 too"),
        (Unet, r"blocks.3 takes a tensor of shape \[4, 8\] that depends on parameters but is not "
               r"what blocks.2 returns \(a skip connection\)"),
        (AtTheEnd, r"loss\(\) depends on what is computed before blocks.0 otherwise than by what "
                   r"blocks.3 returns \(a skip connection\); return it from every block"),
        (OfABlockAtTheEnd, r"loss\(\) depends on what blocks.1 has computed otherwise than by what "
                           r"blocks.3 returns \(a skip connection\); return it from every block"),
        (Twice, r"blocks.0 runs 2 times in one micro-batch; a pipeline runs each block once"),
        (Never, r"blocks.2 does not run in a micro-batch"),
        (Parallel, r"blocks.1 takes nothing that blocks.0 returns; a pipeline's blocks are"),
        (Hidden, r"blocks.2 depends on blocks.0.\w+(.\w+)? of blocks.0 otherwise than by what "
                 r"blocks.0 returns"),
        (RootBias, r"blocks.1 takes a tensor of shape \[8\] that depends on parameters but is not "
                   r"what blocks.0 returns \(a skip connection\)"),
        (Deciding, r"loss\(\) asks for a value of a tensor that is on another stage "
                   r"\(test_pipeline_chain.py:\d+: if x.max\(\) > 1:\)"),
        (Routing, r"loss\(\) calls index.Tensor on a tensor that is on another stage, the shape of "
                  r"whose result depends on its values \(test_pipeline_chain.py:\d+: x = x\["),
        (Forgetting, r"blocks.0 is called by torch.utils.checkpoint, which would run it again .* "
                     r"use activation_checkpointing=True"),
        (Writing, r"loss\(\) writes a tensor that is on another stage into one that is not "
                  r"\(test_pipeline_chain.py:\d+: result\[:2\] = self.first"),
    ],
)  # fmt: skip
def test_what_is_no_chain_is_refused_with_what_to_do(kind: type[Residual], says: str):
    model = kind(Gate) if kind not in (RootBias,) else RootBias()
    with pytest.raises(WrongInput, match=says) as caught:
        probe(model)
    assert "\n" not in str(caught.value)
    assert not any(isinstance(p, Absent) for p in model.parameters())
    assert not any("forward" in m.__dict__ for m in model.modules())


class Sometimes(Residual):
    """A batch of three rows does not come through every block."""

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x if number == 2 and len(x) == 3 else block(x)
        return self.last(self.norm(x))


@pytest.mark.parametrize("blocks", [range(4), range(1, 4), range(2, 4)])
def test_a_block_that_a_later_micro_batch_skips_is_told_by_name(blocks: range):
    model = Sometimes(Gate)
    stage = StageModel(model, probe(model), blocks)
    says = "blocks.2 runs 0 times on this micro-batch, and once on the one that the pipeline"
    for rows in (4, 3):
        stage.begin(lambda like, rows=rows: [torch.ones(rows, WIDTH)], lambda sent: None)
        square(model, torch.ones(rows, WIDTH))
        with pytest.raises(UserError, match=says) if rows == 3 else nullcontext():
            stage.end()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -1] = True
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_that_an_evaluation_would_send_is_told_with_what_to_do():
    """torch makes one of a batch with padding, if nothing is to be trained."""
    model, batch = Encoder(), torch.ones(2, 3, WIDTH)
    stage = StageModel(model, probe(model, batch=batch), range(1))
    model.eval()
    stage.begin(lambda like: [], lambda sent: None)
    says = r"encoder.layers.1 takes a nested tensor, .* enable_nested_tensor=False"
    with torch.no_grad(), pytest.raises(UserError, match=says):
        model(batch)
    stage.give_up()


class Silent:
    """The neighbours of a stage that is asked for no more than a forward."""

    def begin(self) -> None:
        pass


def test_that_a_stage_skips_its_first_block_is_told_before_what_its_loss_is():
    model = Sometimes(Gate)
    chain, stages = probe(model), Stages((0, 2, 4), range(1), 1.0)
    passes = StagePasses(
        {1: StageModel(model, chain, range(2, 4))}, chain, stages, cast(Any, Silent()),
        parameters={}, buffers=TrackedBuffers(model), reducer=cast(Any, None),
    )  # fmt: skip
    passes.begin(0)
    passes.before_forward(0)
    with pytest.raises(UserError, match=r"blocks\.2 runs 0 times on this micro-batch"):
        passes.loss_of(square(model, torch.ones(3, WIDTH)))
    passes.reset()


def test_a_penalty_on_the_weights_is_refused_with_its_line():
    def loss(model, batch):
        return square(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(WrongInput, match=r"loss\(\) depends on parameters of other stages "
                       r"\(blocks.0.gate\) \(test_pipeline_chain.py:\d+: .*square"):  # fmt: skip
        probe(Residual(Gate), loss)


def test_a_loss_that_looks_at_a_value_is_refused_and_one_that_prints_it_is_not():
    printed = []

    def looks(model, batch):
        found = square(model, batch)
        return found * 2 if found.item() > 1 else found

    def prints(model, batch):
        found = square(model, batch)
        printed.append(f"{found:.2f} {found.item() / 2:.2f} {found.detach().item()}")
        return found

    with pytest.raises(WrongInput, match=r"asks for a value .* if found.item\(\) > 1 else found"):
        probe(Residual(Gate), looks)
    probe(Residual(Gate), prints)
    assert printed == ["nan nan nan"]


def test_a_number_of_another_block_is_refused_in_a_computation_and_one_of_the_same_is_not():
    """There it is nan: the step would be skipped, and nobody told why."""

    def scales(model, batch):
        scale = model.first(batch).std().item()
        return square(model, batch) * (1 + scale)

    def normalizes(model, batch):
        found = model(batch)
        return (found.std().item() * found / (found.norm().item() + 1)).square().mean()

    says = r"asks for a value .* \(test_pipeline_chain.py:\d+: return square\(model, batch\) \* \(1"
    with pytest.raises(WrongInput, match=says):
        probe(Residual(Gate), scales)
    probe(Residual(Gate), normalizes)


def test_a_loss_of_the_batch_alone_is_refused():
    with pytest.raises(WrongInput, match="does not depend on the model's parameters"):
        probe(Residual(Gate), lambda model, batch: (model(batch), batch.mean())[1])


def test_the_last_block_may_draw_by_the_values():
    model = Residual(Gate)
    model.blocks[3] = Leaking()
    assert len(probe(model).names) == 4
