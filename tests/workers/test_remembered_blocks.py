"""A block of another stage, or one like it, runs once for each kind of arguments, and each time
where it may do something else of the same."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.workers.pipeline_models import WIDTH, Counting, Gate, Residual, square
from workers.parallel.pipeline.absent import Absent, NotHere, absent_like, absent_parameter
from workers.parallel.pipeline.chain import find_chain
from workers.parallel.pipeline.remembered import Looks, RememberedBlock
from workers.parallel.pipeline.stage import StageModel

TIMES = 4


class Seen(nn.Module):
    """A block that says how often its code has run."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(WIDTH, WIDTH), 0.5

    def forward(self, x: Tensor) -> Any:
        Seen.runs += 1
        return x + self.compute(self.linear(x))

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Drops(Seen):
    def compute(self, x):
        return F.dropout(x, self.rate, self.training)


class DropsRows(Seen):
    """What is drawn is here, and read by nobody."""

    def compute(self, x):
        return x * (torch.rand(x.shape[0], 1) > 0.5)


class Counts(Seen):
    count = 0

    def compute(self, x):
        self.count += 1
        return x


class DropsLayers(Seen):
    def compute(self, x):
        return x if torch.rand(()) < 0.5 else x * 2


class DropsLayersByPython(Seen):
    def compute(self, x):
        return x if random.random() < 0.5 else x * 2


class Lists(Seen):
    """Of a tensor that is here, and whose values it reads."""

    def compute(self, x):
        return x * sum(torch.arange(3.0).tolist())


class Writes(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.zeros(())]

    def compute(self, x):
        self.seen[0].add_(1)
        return x


class Hooked(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, args, result: None)


def stage_of(model: nn.Module, blocks: range, looks: Looks | None = None) -> StageModel:
    batch = torch.ones(4, WIDTH)
    chain = find_chain(model, None, lambda: square(model, batch))
    return StageModel(model, chain, blocks, looks=looks)


def run(model: nn.Module, stage: StageModel, rows: int = 4) -> Tensor:
    """Where the next random number is the mean of what was drawn before it."""
    torch.manual_seed(rows)
    stage.begin(lambda like: [torch.ones(tuple(t.shape)) for t in like], lambda sent: None)
    try:
        square(model, torch.ones(rows, WIDTH))
    finally:
        stage.give_up()
    return torch.rand(3)


def runs_of(kind: Callable[[], nn.Module], blocks: range = range(2, 4), times: int = TIMES) -> int:
    """Of the blocks' code on a stage of these."""
    model = Residual(kind)
    stage = stage_of(model, blocks)
    Seen.runs = 0
    for _ in range(times):
        run(model, stage)
    return Seen.runs


@pytest.mark.parametrize("kind", [Seen, Drops, DropsRows])
def test_the_code_of_other_stages_blocks_runs_once_in_one_of_those_that_are_alike(kind: type[Seen]):
    """And that of its own each time."""
    assert runs_of(kind, range(2, 4)) == 2 * TIMES + 1
    assert runs_of(kind, range(0, 2)) == 2 * TIMES + 1


def test_stages_of_a_rank_look_at_a_block_once():
    model, looks = Residual(Drops), Looks()
    stages = [stage_of(model, range(i, i + 1), looks) for i in (1, 3)]
    Seen.runs = 0
    for stage in stages * TIMES:
        run(model, stage)
    assert Seen.runs == 2 * TIMES + 1


class Tells(Seen):
    """Each has a number that no code reads, and its linear layer has one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Numbered()
        self.layer_idx = id(self)


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer_idx = nn.Linear(WIDTH, WIDTH), id(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Asks(Tells):
    """Odd ones draw."""

    @property
    def is_odd(self) -> bool:
        return self.layer_idx % 2 == 1

    def compute(self, x):
        return F.dropout(x, self.rate, self.training) if self.is_odd else x


class AsksInside(Tells):
    def compute(self, x):
        is_odd = getattr(self.linear, "layer_idx") % 2 == 1  # noqa: B009
        return F.dropout(x, self.rate, self.training) if is_odd else x


class AsksForAll(Tells):
    def compute(self, x):
        return F.dropout(x, self.rate, self.training) if vars(self)["layer_idx"] % 2 == 1 else x


def test_blocks_may_differ_in_a_number_that_their_code_does_not_read():
    assert runs_of(Tells, range(3, 4)) == TIMES + 1


@pytest.mark.parametrize("kind", [Asks, AsksInside, AsksForAll])
def test_blocks_whose_code_reads_their_numbers_are_alike_where_these_are_equal(kind: type[Tells]):
    """Of six blocks of other stages two are odd, and share a number; so do three that are not."""
    model, numbers = Residual(kind, count=7), (1, 2, 1, 4, 4, 4, 5)
    for block, number in zip(model.blocks, numbers, strict=True):
        block.layer_idx = block.linear.layer_idx = number
    stage = stage_of(model, range(6, 7))
    Seen.runs = 0
    for _ in range(TIMES):
        torch.manual_seed(4)
        square(model, torch.ones(4, WIDTH))
        wanted, Seen.runs = torch.rand(3), Seen.runs - 7
        assert torch.equal(run(model, stage), wanted)
    assert Seen.runs == TIMES + len({1, 2, 4})
    assert kind.__getattribute__ is object.__getattribute__, "its class is left as it was"


class Says(Tells):
    """How many rows it has seen, which no code of its own reads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows = 0

    def compute(self, x):
        self.num_rows = x.shape[0]
        return x


def test_a_number_that_a_block_writes_is_the_one_of_the_newest_micro_batch():
    model = Residual(Says)
    stage = stage_of(model, range(3, 4))
    for rows in (4, 4, 4, 8, 4, 8):
        run(model, stage, rows)
        others: list[Any] = list(model.blocks)[:3]
        assert [block.num_rows for block in others] == [rows] * 3


def rate(block: Seen) -> None:
    block.rate = 0.25


def evaluates(block: Seen) -> None:
    block.linear.eval()


def table(block: Seen) -> None:
    block.__dict__["table"] = {}


def kind_of_linear(block: Seen) -> None:
    block.linear.__class__ = type("Mine", (nn.Linear,), {})


def without_bias(block: Seen) -> None:
    block.linear.bias = None


def another_one_inside(block: Seen) -> None:
    block.linear.add_module("unused", nn.Identity())


def own_forward(block: Seen) -> None:
    block.forward = lambda x: type(block).forward(block, x)


DIFFERENCES = [
    rate,
    evaluates,
    table,
    kind_of_linear,
    without_bias,
    another_one_inside,
    own_forward,
]


@pytest.mark.parametrize("differ", DIFFERENCES, ids=lambda d: d.__name__)
def test_a_block_that_is_not_like_the_others_is_looked_at_itself(differ: Callable[[Seen], None]):
    model = Residual(Drops)
    differ(model.blocks[1])
    stage = stage_of(model, range(3, 4))
    Seen.runs = 0
    for _ in range(TIMES):
        torch.manual_seed(4)
        square(model, torch.ones(4, WIDTH))
        wanted, Seen.runs = torch.rand(3), Seen.runs - 4
        assert torch.equal(run(model, stage), wanted)
    assert Seen.runs == TIMES + 2


@pytest.mark.parametrize(
    "kind",
    [Counts, DropsLayers, DropsLayersByPython, Lists, Writes, Hooked],
    ids=lambda k: k.__name__,
)
def test_code_that_may_do_something_else_each_time_runs_each_time(kind: type[Seen]):
    assert runs_of(kind) == 4 * TIMES


@pytest.mark.parametrize("kind", [Counting, DropsRows])
def test_what_is_drawn_is_what_the_whole_model_draws(kind: type[nn.Module]):
    """Also once it is remembered, with other rows, and in an evaluation."""
    model = Residual(kind)
    stages = [stage_of(model, range(i, i + 1)) for i in range(4)]
    for is_training in (True, True, False, False, True):
        model.train(is_training)
        for rows in (4, 3, 4):
            torch.manual_seed(rows)
            square(model, torch.ones(rows, WIDTH))
            wanted = torch.rand(3)
            assert torch.equal(run(model, stages[3], rows), wanted)
    held = stages[3]._remembered[0]
    assert len(held._seen) == 2


def test_an_attribute_that_changes_is_seen():
    model = Residual(Drops)
    stage = stage_of(model, range(3, 4))
    for rate in (0.5, 0.0, 0.5):  # where nothing is dropped, nothing is drawn
        for block in model.blocks:
            block.rate = rate
        torch.manual_seed(4)
        square(model, torch.ones(4, WIDTH))
        wanted = torch.rand(3)
        assert torch.equal(run(model, stage), wanted)
        assert torch.equal(run(model, stage), wanted)


def test_a_hook_that_comes_later_and_looks_at_a_value_is_refused_with_its_line():
    model = Residual(Seen)
    stage = stage_of(model, range(2, 4))
    run(model, stage)
    model.blocks[0].linear.register_forward_hook(lambda module, args, y: print(bool(y.max() > 1)))
    with pytest.raises(NotHere, match=r"asks for a value .*print\(bool\(y.max\(\) > 1\)\)"):
        run(model, stage)


@dataclass
class Held:
    """Nobody but the user's code knows what is in it."""

    x: Tensor


class Wraps(Seen):
    def forward(self, x):
        Seen.runs += 1
        return Held(x.x + self.linear(x.x)) if isinstance(x, Held) else Held(self.linear(x))


def test_what_is_returned_in_a_thing_of_its_own_is_made_each_time():
    block = Wraps()
    for layer in (block.linear,):
        for name, parameter in list(layer._parameters.items()):
            assert parameter is not None
            layer._parameters[name] = absent_parameter(parameter, name)
    Seen.runs, remembered = 0, RememberedBlock(block, Looks())
    with torch.no_grad():
        for _ in range(2):
            found = remembered.run(block.forward, (absent_like(torch.ones(4, WIDTH)),), {})
            assert isinstance(found.x, Absent)
            found = remembered.run(block.forward, (found,), {})
            assert found.x.shape == (4, WIDTH)
    assert Seen.runs == 4


def test_what_passes_through_is_the_argument_itself():
    class Passes(Gate):
        def forward(self, x, mask, note):
            return {"x": super().forward(x), "mask": mask, "note": note}

    block = Passes()
    remembered = RememberedBlock(block, Looks())
    with torch.no_grad():
        for mask in (torch.ones(4), torch.zeros(4)):
            x = absent_like(torch.ones(4, WIDTH))
            found = remembered.run(block.forward, (x, mask), {"note": "passed on"})
            assert found["mask"] is mask
            assert found["note"] == "passed on"
            assert (type(found["x"]), found["x"].shape) == (Absent, (4, WIDTH))
    assert len(remembered._seen) == 1


RATES = {"dropout": 0.5}


class DropsByTheTable(Seen):
    """By what no module has as an attribute."""

    def compute(self, x):
        return F.dropout(x, RATES["dropout"], self.training)


def test_what_changes_between_steps_is_seen_wherever_it_is(monkeypatch):
    """And the code runs once a step, in one of three blocks that are alike."""
    model = Residual(DropsByTheTable)
    stage = stage_of(model, range(3, 4))
    for rate in (0.5, 0.0, 0.5):  # where nothing is dropped, nothing is drawn
        monkeypatch.setitem(RATES, "dropout", rate)
        torch.manual_seed(4)
        square(model, torch.ones(4, WIDTH))
        wanted = torch.rand(3)
        stage.begin_step()
        Seen.runs = 0
        for _ in range(TIMES):
            assert torch.equal(run(model, stage), wanted)
        assert Seen.runs == 1 + TIMES
