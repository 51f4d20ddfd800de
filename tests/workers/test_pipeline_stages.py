"""Stages of all kinds of models, on ranks of their own: the bits are those of the whole model.

Those of several ranks send by tags, which is the CPU's way. Stages on devices are in
test_stages_on_device.py, test_staged_strategy.py and test_device_hash.py.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic.protocol.schedule import INTERLEAVED, ZERO_BUBBLE
from tests.workers import where
from tests.workers.pipeline_models import CASES, HOST_ONLY, WIDTH, Gate, Residual, square
from tests.workers.pipeline_ranks import Trained, groups_in, plain
from tests.workers.ranks import Ranks, run_ranks
from workers.distributed.process_group import Alone
from workers.parallel.pipeline.chain import find_chain
from workers.parallel.pipeline.reducer import PipelineReducer
from workers.parallel.pipeline.stage import StageModel
from workers.train_state.digest import weights_sha256

STEPS = 2
BOTH = [name for name in CASES if name not in HOST_ONLY]


@pytest.fixture(autouse=True)
def one_thread():
    """As ranks have: bits of the CPU's kernels follow the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.usefixtures("place_slowly")
@pytest.mark.parametrize("name", BOTH)
def test_one_stage_of_all_blocks_computes_what_no_stages_do(name: str):
    compare_with_plain(name)


@pytest.mark.parametrize("name", HOST_ONLY)
def test_one_stage_of_layers_that_the_host_alone_has_computes_what_no_stages_do(name: str):
    compare_with_plain(name)


def compare_with_plain(name: str) -> None:
    trained = Trained(CASES[name])
    trained.train(groups_in(Alone()), 1, STEPS)
    assert weights_sha256(trained.state()) == hash_of_plain(name)
    # Between forwards the model is the user's.
    assert not any("forward" in m.__dict__ for m in trained.model.modules())


def hash_of_plain(name: str) -> str:
    """Of the whole model, where it is now; the simulated device has the CPU's kernels."""
    return _hash_of_plain(name, where.HERE if where.HERE.type == "cuda" else where.CPU)


@cache
def _hash_of_plain(name: str, place: torch.device) -> str:
    with where.at(place):
        return weights_sha256(plain(CASES[name], STEPS).state())


def bits_of(
    ranks: Ranks, worlds: list[tuple[int, int, str]], names: list[str], first: int = 0
) -> dict[str, str]:
    """worlds: ranks, wanted depth, schedule. By case: the hash. first: generation."""
    found: dict[str, str] = {}
    for generation, (world_size, depth, schedule) in enumerate(worlds, first):
        if ranks.index >= world_size:
            continue
        groups = groups_in(ranks.form(generation, list(range(world_size))))
        for name in names:
            trained = Trained(CASES[name])
            depths = [p.depth for p in trained.plan(depth, world_size, schedule).pipelines]
            trained.train(groups, depth, STEPS, schedule)
            found[f"{name}/{world_size} as {depths}/{schedule}"] = weights_sha256(trained.state())
    return found


def check(results: list[dict[str, str]], num_cases: int) -> None:
    assert len(results[0]) == num_cases
    wrong = [
        f"rank {rank}: {key}"
        for rank, found in enumerate(results)
        for key, sha256 in found.items()
        if sha256 != hash_of_plain(key.partition("/")[0])
    ]
    assert wrong == []


class Twice(nn.Module):
    """Its layer is used in two pieces, each with a backward of its own: two additions to a
    gradient, between which nothing else may be added."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.linear, self.use_reentrant = nn.Linear(WIDTH, WIDTH), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.linear, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_adds_to_the_sum_before_it_where_that_is_the_trees_addition(use_reentrant: bool):
    case = replace(CASES["gates"], build=lambda: Residual(lambda: Twice(use_reentrant)))
    trained, lent = Trained(case), list[int]()
    lend = PipelineReducer.lend

    def lending(reducer: PipelineReducer, blocks: range) -> None:
        lend(reducer, blocks)
        gradients = [p.grad for p in trained.parameters.values()]
        lent.append(sum(gradient is not None for gradient in gradients))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineReducer, "lend", lending)
        trained.train(groups_in(Alone()), 1, 1)
    assert lent == ([] if use_reentrant else [0, len(trained.parameters)] * 2)
    whole = plain(case, 1)
    assert not differing(trained.state(), whole.state())


def test_a_parameter_whose_gradient_somebody_looks_at_has_it_alone():
    trained, seen = Trained(CASES["gates"]), dict[str, list[Tensor]]()
    for name, parameter in trained.parameters.items():
        look = lambda p, name=name: seen.setdefault(name, []).append(p.grad.clone())  # noqa: E731
        parameter.register_post_accumulate_grad_hook(look)
    trained.train(groups_in(Alone()), 1, 1)
    for found in seen.values():
        assert len(found) == len(trained.batches)
    looking = plain(CASES["gates"], 1)
    assert not differing(trained.state(), looking.state())


def test_two_stages_of_every_model_have_the_bits_of_the_whole_one():
    """Those that have four blocks also on ranks of two stages, with backwards in halves."""
    names = list(CASES)
    longer = [name for name in names if len(Trained(CASES[name]).chain.names) >= 4]
    assert len(longer) > 15

    def body(ranks: Ranks) -> dict[str, str]:
        found = bits_of(ranks, [(2, 2, "")], names)
        return found | bits_of(ranks, [(2, 2, ZERO_BUBBLE)], longer, first=1)

    check(run_ranks(2, body), len(names) + len(longer))


SOME = ["in place", "llama, tied", "llama, dropout", "resnet", "t5"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["llama, dropout", "resnet"], id="some"),
        pytest.param(SOME, id="all", marks=pytest.mark.slow),
    ],
)
def test_pipelines_side_by_side_and_of_mixed_depth_have_the_bits_of_none(names: list[str]):
    worlds = [(3, 3, "GPipe"), (4, 2, ""), (5, 0, ""), (4, 4, "")]
    results = run_ranks(5, lambda ranks: bits_of(ranks, worlds, names))
    check(results, len(worlds) * len(names))


@pytest.mark.parametrize("schedule", [INTERLEAVED, ZERO_BUBBLE])
def test_ranks_that_have_two_stages_each_have_the_bits_of_none(schedule: str):
    """Of two and of three ranks the first one has both blocks that use a matrix."""
    worlds = [(2, 2, schedule), (4, 2, schedule)]
    names = ["deep", "in place", "llama, tied", "llama, dropout", "resnet"]

    def body(ranks: Ranks) -> dict[str, str]:
        found = bits_of(ranks, worlds, names)
        deeper = [(3, 3, schedule), (5, 0, schedule)]
        return found | bits_of(ranks, deeper, ["deep"], first=len(worlds))

    results = run_ranks(5, body)
    check(results, len(worlds) * len(names) + 2)
    assert f"deep/5 as [3, 2]/{schedule}" in results[0]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_a_stage_keeps_as_many_micro_batches_as_its_schedule_says(schedule: str):
    def body(ranks: Ranks) -> tuple[int, int, list[float]]:
        trained = Trained(CASES["gates"])
        losses = trained.train(groups_in(ranks.form(1, [0, 1])), 2, 1, schedule)
        activation = 4 * 8 * 4  # bytes of (4, 8) in float32
        return trained.passes.most_in_flight, trained.neighbours.sent_bytes // activation, losses

    first, last = run_ranks(2, body)
    num_microbatches = 4
    assert first[0] == (2 if schedule == "1F1B" else num_microbatches)
    assert last[0] == (1 if schedule == "1F1B" else num_microbatches)
    # An activation down and its gradient back, and nothing else.
    assert (first[1], last[1]) == (num_microbatches, num_microbatches)
    assert all(math.isnan(loss) for loss in first[2])
    assert not any(math.isnan(loss) for loss in last[2])


def test_half_precision_travels_as_such_and_changes_no_bit():
    def body(ranks: Ranks) -> list[str]:
        wanted = Trained(CASES["llama"], torch.bfloat16)
        wanted.train(groups_in(Alone()), 1, STEPS)
        found = Trained(CASES["llama"], torch.bfloat16)
        found.train(groups_in(ranks.form(1, [0, 1, 2])), 3, STEPS)
        return differing(found.state(), wanted.state())

    assert run_ranks(3, body) == [[]] * 3


def test_what_the_next_stage_takes_is_sent_before_this_ones_forward_ends():
    model, batch, happened = Residual(Gate), torch.ones(4, WIDTH), list[str]()
    chain = find_chain(model, None, lambda: square(model, batch))
    do = model.blocks[3].forward
    model.blocks[3].forward = lambda x: happened.append("went on") or do(x)
    stage = StageModel(model, chain, range(1, 3))

    def send(tensors: Sequence[Tensor]) -> None:
        happened.append(f"sent {[tuple(t.shape) for t in tensors]}")

    stage.begin(lambda like: [batch], send)
    square(model, batch)
    stage.end()
    assert happened == [f"sent {[(4, WIDTH)]}", "went on"]
