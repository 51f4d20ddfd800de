"""What lives on two nodes goes to no holder: whoever is left of them has it, and what has one node
left is held again.

Ranks are processes, the holder lives in the test's process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from elastic.protocol.backup_assignment import BackupAddress
from elastic.protocol.layout import Position, TensorLayout, whole
from elastic.protocol.mesh import Mesh, Parallel
from tests.workers import where
from tests.workers.places import Place
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.sharded_rig import enter, sha256, spec
from tests.workers.test_staged_strategy import Work, build, train
from workers.backup import client
from workers.backup.client import BackupClient
from workers.backup.server import BackupServer
from workers.data.placement import to_device
from workers.distributed.process_group import Alone
from workers.parallel.pipeline.strategy import build_staged
from workers.parallel.shards import Ownership
from workers.resharding import assemble
from workers.resharding.assemble import ShardLost, newest_whole

pytestmark = pytest.mark.usefixtures("place_slowly")
CASE, STEPS = "llama, tied", 2
PATIENCE_S = 100.0
"""With the holder, which is in the test's process: on a busy machine it may not run for seconds."""
NEVER = lambda: False  # noqa: E731
TWO_PIPELINES = ("a", "a", "b", "b")
"""By rank its node."""


@pytest.fixture
def holder():
    server = BackupServer("127.0.0.1", "t")
    yield server
    server.close()


def address(holder: BackupServer) -> BackupAddress:
    return BackupAddress("c", *holder.address)


def plain(num_steps: int) -> str:
    """Of one undisturbed rank."""
    return _plain(num_steps, where.HERE.type)


@cache
def _plain(num_steps: int, place: str) -> str:
    strategy = build(CASE)
    enter(strategy, Alone(), 0)
    train(strategy, Alone(), CASE, num_steps)
    return sha256(strategy)


@dataclass
class StagePlace(Place):
    layout: Any = None


class Rank:
    """One process: its stage, whose copies go to the holder."""

    def __init__(self, ranks: Ranks, nodes: Sequence[str], at: BackupAddress) -> None:
        assemble.HOLDER_S = assemble.ANSWER_S = PATIENCE_S
        client.CONNECT_S = client.MIN_SILENCE_S = PATIENCE_S
        torch.set_num_threads(1)
        self.ranks, work = ranks, Work(CASE)
        config = spec("pp:2", global_batch=16, micro_batch=4, node=nodes[ranks.index])
        self.backup = BackupClient(config, lambda said: None)
        self.backup.hear([at])
        self.strategy = build_staged(work, config, where.HERE, self.backup, 2)
        batch = to_device(work.case.batches()[0], where.HERE)
        model = self.strategy.train_state.model
        self.strategy.examine(lambda b: work.loss(model, b), lambda: batch)
        self.strategy.shards.holding = Ownership("initial")

    def enter(self, generation: int, members: list[int], step: int) -> None:
        self.group = self.ranks.form(generation, members)
        rank, strategy = members.index(self.ranks.index), self.strategy
        self.place = StagePlace(generation, rank, len(members), strategy.position, strategy.layout)
        entered = enter(strategy, self.group, step, generation=generation)
        self.backup.begin(
            strategy.train_state,
            entered.origin,
            self.place,
            is_held=entered.is_held,
            doubled=entered.doubled,
        )

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.backup.wait(NEVER)  # as a session does before its vote
            keep = lambda state: self.backup.after_step(state, self.place)  # noqa: E731
            train(self.strategy, self.group, CASE, 1, keep)
        self.backup.wait(NEVER)
        self.group.control.all_reduce(torch.zeros(1)).wait()  # the others' copies are held, too

    def pause(self) -> None:
        self.backup.before_pause(self.strategy.train_state, self.place)
        self.backup.wait(NEVER)
        self.group.control.all_reduce(torch.zeros(1)).wait()


def blocks_held(holder: BackupServer) -> dict[int, set[int]]:
    """By rank the blocks of which the holder has more than nothing, in the newest copies."""
    copies = holder.store.copies()
    newest = max((c.key.generation, c.key.step) for c in copies)
    found: dict[int, set[int]] = {}
    for copy in copies:
        if (copy.key.generation, copy.key.step) == newest:
            pieces = [p.layout.blocks for p in copy.slices if p.size_bytes]
            found[copy.key.rank] = {block for blocks in pieces for block in blocks}
    return found


def run_and_look(body: Callable[[Ranks], Any], holder: BackupServer) -> tuple[list[Any], Any]:
    """What the ranks give, and what the holder has while they pause."""
    seen: list[Any] = []
    return run_ranks(4, body, on_pause=lambda: seen.append(blocks_held(holder))), seen[0]


def test_the_other_node_has_what_is_lost_and_what_has_one_node_left_is_held(holder):
    """Two pipelines on two nodes, of which one is lost with both of its ranks; of the two that are
    left one is lost, too."""
    at = address(holder)

    def body(ranks: Ranks) -> Any:
        rank = Rank(ranks, TWO_PIPELINES, at)
        rank.enter(1, [0, 1, 2, 3], 0)
        rank.train(STEPS)
        ranks.pause()
        if ranks.index > 1:
            return "lost"
        rank.enter(2, [0, 1], STEPS)
        rank.train(1)
        if ranks.index == 1:
            return "lost"
        rank.enter(3, [0], STEPS + 1)
        rank.train(1)
        return rank.strategy.train_state.step, sha256(rank.strategy)

    found, in_pause = run_and_look(body, holder)
    assert in_pause == {0: set(), 1: set(), 2: set(), 3: set()}
    assert found == [(STEPS + 2, plain(STEPS + 2)), "lost", "lost", "lost"]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_copy_has_what_lives_on_one_node_and_the_rest_comes_from_the_other(holder, lost: int):
    """A tied matrix is held by both ends of a pipeline of three, on two nodes; the fourth process
    takes no part."""
    at, left = address(holder), [rank for rank in range(3) if rank != lost]

    def body(ranks: Ranks) -> Any:
        if ranks.index == 3:
            return None
        rank = Rank(ranks, ("a", "a", "b"), at)
        rank.enter(1, [0, 1, 2], 0)
        rank.train(STEPS)
        (tied,) = [blocks for blocks in rank.strategy._parts.uses.values() if len(blocks) > 1]
        ranks.pause()
        if ranks.index == lost:
            return "lost"
        assert rank.backup.own_copies[-1].lacks == (tied,)
        rank.enter(2, left, STEPS)
        rank.train(1)
        return sha256(rank.strategy)

    found, in_pause = run_and_look(body, holder)
    assert in_pause == {0: {0}, 1: {1, 2}, 2: {3}}
    assert [found[rank] for rank in left] == [plain(STEPS + 1)] * 2


def test_who_pauses_has_all_of_it_held_so_that_both_nodes_may_leave_it(holder):
    at = address(holder)

    def body(ranks: Ranks) -> Any:
        rank = Rank(ranks, TWO_PIPELINES, at)
        rank.enter(1, [0, 1, 2, 3], 0)
        rank.train(STEPS)
        rank.pause()
        ranks.pause()
        if ranks.index in (1, 3):
            return "left"
        rank.enter(2, [0, 2], STEPS)
        rank.train(1)
        return sha256(rank.strategy)

    found, in_pause = run_and_look(body, holder)
    assert in_pause == {0: {0, 1, 3}, 1: {0, 2, 3}, 2: {0, 1, 3}, 3: {0, 2, 3}}, "0 and 3 are tied"
    assert found == [plain(STEPS + 1), "left"] * 2


def test_both_nodes_lost_at_once_are_told_by_all_and_no_holder_stands_for_them(holder):
    at = address(holder)

    def body(ranks: Ranks) -> Any:
        rank = Rank(ranks, TWO_PIPELINES, at)
        rank.enter(1, [0, 1, 2, 3], 0)
        rank.train(STEPS)
        ranks.pause()
        if ranks.index in (1, 3):
            return "lost"
        with pytest.raises(ShardLost, match=r"nobody holds \[.*\] of .* no holder either"):
            rank.enter(2, [0, 2], STEPS)
        return "told"

    found, _ = run_and_look(body, holder)
    assert found == ["told", "lost"] * 2
    assert newest_whole([at], "t", Parallel.of("pp:2"), STEPS) is None


def test_a_position_lacks_the_tensors_of_the_blocks_that_it_names():
    mesh = Mesh(Parallel.of("pp:2"), 2, (), ((0, 2, 4),))
    at = Position(mesh, 0, ((1,), (0, 3)))
    boxes = {
        blocks: TensorLayout("w", "float32", (4, 2), (), blocks).box(at)
        for blocks in [(0,), (1,), (0, 3), (3,), ()]
    }
    empty = whole((0, 2))
    assert boxes == {
        (0,): whole((4, 2)), (1,): empty, (0, 3): empty, (3,): empty, (): whole((4, 2))
    }  # fmt: skip
    assert replace(at, lacks=()) == Position(mesh, 0)
