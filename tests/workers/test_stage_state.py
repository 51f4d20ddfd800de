"""The state of a model in stages: a rank has its blocks' and no more, and checkpoints go to every
other strategy and back."""

from collections.abc import Sequence
from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.protocol.errors import WrongInput
from elastic.protocol.layout import Position
from elastic.protocol.mesh import Mesh, Parallel
from tests.workers import where
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.sharded_rig import catalogue_in, enter, save_part, sha256
from tests.workers.test_staged_strategy import STEPS, Work, build, train
from tests.workers.test_staged_strategy import spec as spec_of
from workers.backup.backup import NoBackup
from workers.data.placement import to_device
from workers.distributed.process_group import Alone
from workers.parallel.build import build_strategy
from workers.parallel.pipeline.strategy import Staged, build_staged
from workers.parallel.shards import Ownership

pytestmark = pytest.mark.usefixtures("place_slowly")
CASE = "llama, tied"


def bytes_held(strategy: Staged) -> int:
    """Of parameters and optimizer state that are a stage's own."""
    _, tensors = strategy.train_state.header_and_tensors()
    cut = (t for n, t in tensors.items() if strategy.layout(n, t).is_cut)
    return sum(t.nbytes for t in cut)


def bytes_of_blocks(strategy: Staged, blocks: range) -> int:
    """What these need: parameters, and two moments of each."""
    assert strategy.chain is not None
    whole = strategy._parts.whole
    return 3 * sum(whole[n].nbytes for n in strategy.chain.parameters_of(blocks))


@pytest.mark.parametrize(
    ("name", "parallel"), [(CASE, "pp:2"), ("resnet", "pp:2"), ("resnet", "pp:2/Interleaved1F1B")]
)
def test_a_rank_holds_the_state_of_its_stage_and_no_more(name: str, parallel: str):
    def body(ranks: Ranks) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        strategy = build(name, parallel=parallel)
        everything = bytes_of_blocks(strategy, range(4))
        worlds = ([0, 1], [0, 1, 2, 3], [0, 1, 3])
        for generation, members in enumerate(worlds, 1):
            if ranks.index not in members:
                continue
            group = ranks.form(generation, members)
            enter(strategy, group, generation - 1, generation=generation)
            train(strategy, group, name, 1)
            blocks = strategy.mesh.blocks(group.rank())
            allocated = sum(
                p.untyped_storage().nbytes() for p in strategy.train_state.model.parameters()
            )
            assert allocated <= bytes_held(strategy), "parameters share no larger memory"
            if blocks:  # else it is inactive
                found.append((bytes_held(strategy), bytes_of_blocks(strategy, blocks), everything))
        return found

    for of_rank in run_ranks(4, body):
        for held, wanted, everything in of_rank:
            assert held == wanted
            assert held < 0.7 * everything


@pytest.mark.parametrize("lost", [0, 2])
def test_what_nobody_has_moves_and_the_rest_stays(lost: int):
    """Of four ranks in two pipelines one is gone: a pipeline of three, each where least moves."""
    left = [rank for rank in range(4) if rank != lost]

    def body(ranks: Ranks) -> tuple[int, list[int]]:
        strategy, group = build(CASE), ranks.form(1, [0, 1, 2, 3])
        enter(strategy, group, 0)
        train(strategy, group, CASE, 1)
        assert strategy.shards.moved_bytes == 0
        if ranks.index == lost:
            return 0, []
        before = strategy.mesh.blocks(group.rank())
        group = ranks.form(2, left)
        enter(strategy, group, 1, generation=2)
        after = strategy.mesh.blocks(group.rank())
        chain, whole = strategy.chain, strategy._parts.whole
        assert chain is not None

        def lacking(after: Sequence[int]) -> int:
            new = set(chain.parameters_of(after)) - set(chain.parameters_of(before))
            return 3 * sum(whole[n].nbytes for n in new)

        mine = torch.tensor([lacking(after)])
        group.control.all_reduce(mine).wait()
        assert strategy.shards.moved_bytes == mine.item()
        return int(mine), [lacking(strategy.plan.blocks(position)) for position in range(3)]

    results = [of_rank for rank, of_rank in enumerate(run_ranks(4, body)) if rank != lost]
    (moved,) = {moved for moved, _ in results}
    by_rank = [by_position for _, by_position in results]
    orders = permutations(range(3))
    assert moved == min(sum(by_rank[r][at] for r, at in enumerate(o)) for o in orders) > 0


def test_a_rank_whose_shards_were_given_up_has_its_newest_copy():
    """As where a generation failed while its members moved what they have."""
    mesh, copies = Mesh(Parallel.of("pp:2"), 2, (), ((0, 2, 4),)), list[Any]()
    backup: Any = SimpleNamespace(finished=lambda: copies)
    shards = build_staged(Work(CASE), spec_of("pp:2"), where.HERE, backup, 2).shards
    assert shards.at_hand is None
    copies += [SimpleNamespace(at=Position(mesh, 1)), SimpleNamespace(at=Position(mesh, 0))]
    assert shards.at_hand == Position(mesh, 1)
    shards.holding = Ownership("shards", 3, 0, 2, 1, mesh.cuts)
    assert shards.at_hand == Position(mesh, 0)


@pytest.mark.parametrize("name", [CASE, "resnet"])
def test_pipelines_that_share_their_rows_hold_a_part_of_a_stage_and_have_the_bits_of_ddp(name: str):
    """One pipeline, then two, then two of which one has other stages, or a rank is inactive."""
    worlds = ([0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4])
    undisturbed = made("ddp", name)
    train(undisturbed, Alone(), name, len(worlds))

    def body(ranks: Ranks) -> tuple[list[float], str]:
        found, sha = list[float](), ""
        strategy = build(name, parallel="pp:2,fsdp-grad-op")
        for generation, members in enumerate(worlds, 1):
            if ranks.index not in members:
                continue
            if generation > 1 and ranks.index not in worlds[generation - 2]:
                strategy.forget()
            group = ranks.form(generation, members)
            enter(strategy, group, generation - 1, generation=generation)
            blocks = strategy.mesh.blocks(group.rank())
            train(strategy, group, name, 1)
            found.append(bytes_held(strategy) / max(1, bytes_of_blocks(strategy, blocks)))
            sha = sha256(strategy)
        return found, sha

    results = run_ranks(5, body)
    alone, shared, _ = results[0][0]
    assert 0.8 < alone <= 1  # a tied matrix is shared by both of its stages
    assert shared == pytest.approx(alone / 2, abs=0.1)
    assert {sha for _, sha in results} == {sha256(undisturbed)}


def made(parallel: str, name: str, precision: str = "fp32") -> Any:
    """A strategy that stands for the initial state."""
    if parallel.startswith("pp"):
        return build(name, precision, parallel=parallel)
    torch.set_num_threads(1)
    config = spec_of(parallel, global_batch=16, micro_batch=4, precision=precision)
    strategy = build_strategy(Work(name), config, where.HERE, NoBackup)
    if hasattr(strategy, "shards"):
        strategy.shards.holding = Ownership("initial")
    return strategy


def saved_by(ranks: Ranks, strategy: Any, group: Any, place: str) -> Any:
    return save_part(strategy, group, place, 1), sha256(strategy)


@pytest.mark.parametrize("source", ["pp:2", "pp:2,fsdp-grad-op", "ddp", "fsdp"])
def test_a_checkpoint_goes_to_every_strategy_at_any_world_size(source: str, tmp_path):
    place = str(tmp_path)

    def save(ranks: Ranks) -> Any:
        strategy, group = made(source, CASE), ranks.form(1, [0, 1, 2, 3])
        enter(strategy, group, 0)
        if source.startswith("pp"):
            train(strategy, group, CASE, STEPS)
        saved = saved_by(ranks, strategy, group, place)
        ranks.meet([0, 1, 2, 3])  # who ends before another one has formed breaks its group
        return saved

    saved = run_ranks(4, save)
    step = STEPS if source.startswith("pp") else 0
    parts = [part for (part, _), _ in saved]
    catalogue_in(place).publish(step, 1, parts, saved[0][0][1], {})
    if source.startswith("pp"):
        sizes = [part.file.size_bytes for part in parts]
        assert min(sizes) > 0, "every stage writes its own"

    def load(ranks: Ranks, worlds: list[tuple[str, int]]) -> list[str]:
        found: list[str] = []
        for generation, (parallel, world_size) in enumerate(worlds, 1):
            if ranks.index < world_size:
                group, strategy = (
                    ranks.form(generation, list(range(world_size))),
                    made(parallel, CASE),
                )
                assert strategy.load(catalogue_in(place), 0, 0, lambda: None) == []
                enter(strategy, group, step, catalogue_in(place), generation)
                found.append(sha256(strategy))
        return found

    worlds = [
        ("pp:2", 1),
        ("pp:2", 2),
        ("pp:2", 4),
        ("pp:4", 4),
        ("pp:2,fsdp-grad-op", 4),
        ("ddp", 2),
        ("fsdp", 3),
        ("hsdp:2", 4),
    ]
    results = run_ranks(4, partial(load, worlds=worlds))
    assert results[0] == [saved[0][1]] * len(worlds)


def test_a_run_that_goes_on_under_other_strategies_has_the_bits_of_one_undisturbed_rank(tmp_path):
    """Each part of it resumes from the last one's checkpoint, trains on and saves."""
    name, place = "resnet", str(tmp_path)
    parts = [("pp:3", 3), ("fsdp", 2), ("ddp", 2), ("pp:2/ZBVZeroBubble", 3)]
    undisturbed = made("ddp", name)
    train(undisturbed, Alone(), name, len(parts))

    def body(ranks: Ranks, step: int, parallel: str) -> Any:
        world_size = dict(parts)[parallel]
        if ranks.index >= world_size:
            return None
        group, strategy = ranks.form(1, list(range(world_size))), made(parallel, name)
        if step:
            assert strategy.load(catalogue_in(place), 0, 0, lambda: None) == []
        enter(strategy, group, step, catalogue_in(place))
        train(strategy, group, name, 1)
        return saved_by(ranks, strategy, group, place)

    for step, (parallel, world_size) in enumerate(parts):
        saved = run_ranks(3, partial(body, step=step, parallel=parallel))[:world_size]
        files = [part for (part, _), _ in saved]
        catalogue_in(place).publish(step + 1, 1, files, saved[0][0][1], {})
    assert {weights for _, weights in saved} == {sha256(undisturbed)}


class Deferred(Work):
    """Built on the meta device."""

    def init_weights(self, module: Any, name: str) -> None:
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.2)


def test_a_model_on_the_meta_device_gets_memory_for_its_stage_alone_and_the_bits_of_ddp():
    from workers.parallel.ddp import build_replicated

    def staged() -> Staged:
        torch.set_num_threads(1)
        work = Deferred(CASE)
        strategy = build_staged(
            work, spec_of("pp:2", global_batch=16, micro_batch=4), where.HERE, NoBackup(), 2
        )
        batch = to_device(work.case.batches()[0], where.HERE)
        assert not strategy.is_runnable
        strategy.examine(partial(work.loss, strategy.train_state.model), lambda: batch)
        assert all(p.is_meta for p in strategy.train_state.model.parameters() if p.dim())
        strategy.shards.holding = Ownership("initial")
        return strategy

    def body(ranks: Ranks) -> str:
        group, strategy = ranks.form(1, [0, 1, 2]), staged()
        enter(strategy, group, 0)
        begin = sha256(strategy)
        blocks = strategy.mesh.blocks(group.rank())
        assert bytes_held(strategy) == bytes_of_blocks(strategy, blocks) // 3
        train(strategy, group, CASE, 1)
        return f"{begin} {sha256(strategy)}"

    alone = staged()
    enter(alone, Alone(), 0)
    whole = build_replicated(Deferred(CASE), spec_of("ddp"), where.HERE)
    assert sha256(alone) == sha256(whole)
    begin = sha256(alone)
    train(alone, Alone(), CASE, 1)
    assert run_ranks(3, body) == [f"{begin} {sha256(alone)}"] * 3


def test_an_optimizer_that_looks_at_all_parameters_together_is_refused():
    class Whole(Work):
        def build_optimizer(self, params: Any) -> Any:
            return torch.optim.Adafactor(params)

    with pytest.raises(WrongInput, match=r"Adafactor is not known to take its step of each"):
        build_staged(Whole("gates"), spec_of("pp:2"), where.HERE, NoBackup(), 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_dropout_draws_what_one_rank_with_the_whole_model_draws(num_ranks: int):
    """Whoever computes a block: what comes before it is drawn as well."""
    name = "llama, dropout"

    def body(ranks: Ranks) -> str:
        strategy, group = build(name), ranks.form(1, list(range(num_ranks)))
        enter(strategy, group, 0)
        train(strategy, group, name, 2)
        return sha256(strategy)

    whole = made("ddp", name)
    train(whole, Alone(), name, 2)
    assert run_ranks(num_ranks, body) == [sha256(whole)] * num_ranks


@pytest.mark.parametrize(
    ("name", "precision"), [("llama, tied", "fp16"), ("llama, tied", "bf16"), ("llama", "fp16")]
)
def test_half_precision_with_a_loss_scale_and_clipping_has_the_bits_of_ddp(
    name: str, precision: str
):
    """fp16's first scale is too high: a step that all stages skip, or none."""

    def body(ranks: Ranks) -> tuple[str, Any]:
        strategy, group = made("pp:2", name, precision), ranks.form(1, [0, 1])
        enter(strategy, group, 0)
        train(strategy, group, name, STEPS)
        return sha256(strategy), strategy.train_state.loss_scale

    whole = made("ddp", name, precision)
    train(whole, Alone(), name, STEPS)
    assert run_ranks(2, body) == [(sha256(whole), whole.train_state.loss_scale)] * 2
