"""Ranks that lose members go on from own and from holders' copies, with the bits of plain training.

Ranks are processes, holders live in the test's process, and nobody writes to storage.
"""

from dataclasses import replace

import pytest
import torch

from tests.workers.places import Place
from tests.workers.ranks import run_ranks
from tests.workers.sharded_rig import (
    Dense,
    Work,
    build,
    catalogue_in,
    enter,
    sha256,
    spec,
    train,
    undisturbed,
)
from workers.backup import client
from workers.backup.client import BackupClient
from workers.backup.server import BackupServer
from workers.backup.store import Key
from workers.distributed.process_group import Alone
from workers.resharding import assemble
from workers.resharding.assemble import ShardLost

pytestmark = pytest.mark.usefixtures("place_slowly")
STEPS = 3
PATIENCE_S = 100.0
"""With holders, which are in the test's process: on a busy machine it may not run for seconds."""
NEVER = lambda: False  # noqa: E731


@pytest.fixture(scope="module")
def plain(place_slowly):
    return undisturbed(2 * STEPS + 1)


@pytest.fixture
def holders():
    """Two of them; and where workers find them."""
    servers = [BackupServer("127.0.0.1", "t") for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


def where(servers):
    return [[f"node{i}", *server.address] for i, server in enumerate(servers)]


class Rank:
    """One process: a replica that is kept in peer memory."""

    def __init__(self, ranks, parallel, holders, every=1, node="elsewhere", work=None):
        assemble.HOLDER_S = assemble.ANSWER_S = PATIENCE_S
        client.CONNECT_S = client.MIN_SILENCE_S = PATIENCE_S
        self.ranks, self.parallel, self.holders = ranks, parallel, holders
        self.work = work or Work()
        self.said = []
        config = replace(spec(parallel), snapshot_every=every, node=node)
        self.backup_client = BackupClient(
            config, lambda kind, **fields: self.said.append((kind, fields))
        )
        self.strategy = build(parallel, workload=self.work, open_backup=lambda: self.backup_client)
        if ranks.index:
            self.strategy.forget()

    def enter(self, generation, members, step, is_kept=True):
        """The generation's newest whole state of at most `step`."""
        rank, position_of = members.index(self.ranks.index), self.strategy.position
        self.place = Place(generation, rank, len(members), position_of)
        self.group = self.ranks.form(generation, members)
        self.backup_client.hear(self.holders)
        entered = enter(self.strategy, self.group, step, generation=generation)
        if is_kept:
            begun = entered.origin, self.place
            self.backup_client.begin(self.strategy.train_state, *begun, is_held=entered.is_held)

    def train(self, num_steps, is_last_held=True):
        for i in range(num_steps):
            self.backup_client.wait(NEVER)  # as a session does before its vote
            is_last = i == num_steps - 1
            keep = is_last_held or not is_last
            keeping = {"after_step": self.keep(keep), "work": self.work}
            train(self.strategy, self.group, self.parallel, 1, **keeping)
        if is_last_held:
            self.backup_client.wait(NEVER)
        self.group.control.all_reduce(torch.zeros(1)).wait()  # the others' copies are held, too

    def keep(self, does_so):
        return lambda train_state: (
            does_so and self.backup_client.after_step(train_state, self.place)
        )


def survivors_of(num_ranks, lost):
    return [r for r in range(num_ranks) if r not in lost]


@pytest.mark.parametrize("node", ["elsewhere", "node0"])
def test_survivors_of_any_size_go_on_from_the_step_that_was_held(node, plain, holders):
    """Copies are sent to a holder elsewhere; one of the same node reads the trainer's memory."""
    at = where(holders)
    losses = [
        ("fsdp", 2, [1]),
        ("fsdp", 4, [2]),
        ("fsdp", 3, [0]),
        ("fsdp", 3, [1, 2]),
        ("fsdp-grad-op", 3, [1]),
    ]

    def body(ranks):
        found = []
        for number, (parallel, num_ranks, lost) in enumerate(losses):
            if ranks.index >= num_ranks:
                continue
            rank = Rank(ranks, parallel, at, node=node)
            rank.enter(2 * number, list(range(num_ranks)), 0)
            rank.train(STEPS)
            if ranks.index not in lost:
                rank.enter(2 * number + 1, survivors_of(num_ranks, lost), STEPS)
                found.append((number, rank.strategy.train_state.step, sha256(rank.strategy)))
                rank.train(2)
                found.append((number, rank.strategy.train_state.step, sha256(rank.strategy)))
        return found

    for index, found in enumerate(run_ranks(4, body)):
        took_part = [i for i, (_, n, lost) in enumerate(losses) if index in survivors_of(n, lost)]
        assert found == [(i, s, plain[s]) for i in took_part for s in (STEPS, STEPS + 2)]


def test_a_step_whose_copies_are_not_all_held_is_done_again(plain, holders):
    """The survivors stand at step 4; the lost rank's copy is of step 3: so are their own copies."""
    at = where(holders)

    def body(ranks):
        rank = Rank(ranks, "fsdp", at)
        rank.enter(1, [0, 1, 2], 0)
        rank.train(STEPS)
        rank.train(1, is_last_held=ranks.index != 1)
        if ranks.index == 1:
            return None
        rank.enter(2, [0, 2], STEPS + 1)
        found = rank.strategy.train_state.step, sha256(rank.strategy)
        rank.train(1)
        return *found, sha256(rank.strategy)

    expected = (STEPS, plain[STEPS], plain[STEPS + 1])
    assert run_ranks(3, body) == [expected, None, expected]


def test_two_losses_in_a_row_and_newcomers_end_with_the_same_bits(plain, holders):
    """4 ranks, then 3, then 1 with 2 new ones, which get their rows like anybody."""
    at = where(holders)

    def body(ranks):
        rank = Rank(ranks, "fsdp", at)
        seen = []
        for generation, members in enumerate(([0, 1, 2, 3], [0, 2, 3], [2, 4, 5]), start=1):
            if ranks.index in members:
                rank.enter(generation, members, generation - 1)
                rank.train(1)
                seen.append(sha256(rank.strategy))
        return seen

    found = run_ranks(6, body)
    assert found == [plain[1:3], plain[1:2], plain[1:4], plain[1:3], plain[3:4], plain[3:4]]


def test_a_second_loss_before_the_new_membership_s_copies_are_held_is_met_by_the_old_ones(
    plain, holders
):
    """They are all held, so no new ones are made of a state that will do as it is."""
    at = where(holders)

    def body(ranks):
        rank = Rank(ranks, "fsdp", at)
        rank.enter(1, [0, 1, 2], 0)
        rank.train(STEPS)
        if ranks.index == 0:
            return None
        rank.enter(2, [1, 2], STEPS)
        rank.backup_client.wait(NEVER)
        kept = [copy.key.generation for copy in rank.backup_client.own_copies]
        if ranks.index == 1:
            return kept
        rank.enter(3, [2], STEPS)
        rank.train(2)
        return kept, rank.strategy.train_state.step, sha256(rank.strategy)

    at_all = run_ranks(3, body)
    assert at_all == [None, [1], ([1], STEPS + 2, plain[STEPS + 2])]
    assert {c.key.generation for c in holders[0].store.copies()} == {3}, "nothing stays behind"


def test_at_a_longer_interval_the_run_returns_to_the_last_snapshot(plain, holders):
    at, every = where(holders), 3

    def body(ranks):
        rank = Rank(ranks, "fsdp", at, every)
        rank.enter(1, [0, 1, 2], 0)
        rank.train(every + 2)
        if ranks.index == 2:
            return None
        rank.enter(2, [0, 1], every + 2)
        found = rank.strategy.train_state.step, sha256(rank.strategy)
        rank.train(1)
        return *found, sha256(rank.strategy), rank.said

    expected = (every, plain[every], plain[every + 1], [])
    assert run_ranks(3, body) == [expected, expected, None]


def test_a_damaged_copy_is_never_used(plain, holders):
    """Of the lost rank's two copies the newer one is damaged: the older step it is."""
    at = where(holders)

    def body(ranks):
        rank = Rank(ranks, "fsdp", at)
        rank.enter(1, [0, 1], 0)
        rank.train(STEPS)
        if ranks.index == 1:
            return "lost"
        rank.ranks.pause()
        rank.enter(2, [0], STEPS)
        return rank.strategy.train_state.step, sha256(rank.strategy)

    def damage():
        holders[0].store.copy(Key(1, 1, STEPS)).content[100] ^= 1

    assert run_ranks(2, body, on_pause=damage) == [(STEPS - 1, plain[STEPS - 1]), "lost"]


def test_an_own_copy_that_changed_in_memory_is_never_used(plain, holders):
    """The survivor's own: its live rows are as good. Holders have copies of their own here."""
    at = where(holders)

    def body(ranks):
        rank = Rank(ranks, "fsdp", at)
        rank.enter(1, [0, 1], 0)
        rank.train(STEPS)
        if ranks.index == 1:
            return "lost"
        copy = rank.backup_client.own_copies[-1]
        next(t for t in copy.tensors.values() if t.numel() > 1).view(-1)[0] += 1
        assert not copy.is_intact()
        rank.enter(2, [0], STEPS)
        return rank.strategy.train_state.step, sha256(rank.strategy)

    assert run_ranks(2, body) == [(STEPS, plain[STEPS]), "lost"]


class Cached(Dense):
    """With a table that grows with its input: no state."""

    def build_model(self):
        model = super().build_model()
        model[1].register_buffer("table", torch.ones(2), persistent=False)
        return model


def test_caches_may_have_grown_differently_in_the_step_that_was_cut_off(holders):
    """A newcomer gets rows, too, and has a cache as long as it needs."""
    at = where(holders)
    alone = build("ddp", workload=Cached())
    train(alone, Alone(), "ddp", 2, work=Cached())

    def body(ranks):
        rank = Rank(ranks, "fsdp", at, work=Cached())
        if ranks.index < 3:
            rank.enter(1, [0, 1, 2], 0)
            rank.train(1)
        if ranks.index == 2:
            return None
        if ranks.index < 2:
            cached = rank.strategy.train_state.model[1]
            cached.table = torch.ones(5 + ranks.index, device=cached.table.device)
            rank.strategy.train_state.buffers.end_microbatch()
            rank.strategy.train_state.buffers.restore()
        rank.enter(2, [0, 1, 3], 1)
        rank.train(1)
        return sha256(rank.strategy), len(rank.strategy.train_state.model[1].table)

    expected = sha256(alone)
    found = run_ranks(4, body)
    assert found == [(expected, 5), (expected, 6), None, (expected, 2)]


def test_a_rank_and_its_holder_lost_at_once_are_told_by_all(holders):
    at = where(holders)

    def body(ranks):
        rank = Rank(ranks, "fsdp", at)
        rank.enter(1, [0, 1, 2], 0)
        rank.train(STEPS)
        if ranks.index == 1:
            return "lost"
        rank.ranks.pause()
        with pytest.raises(ShardLost, match=r"nobody holds \[.*\] of .* no holder either"):
            rank.enter(2, [0, 2], STEPS)
        return "told"

    def close():
        for holder in holders:
            holder.close()

    assert run_ranks(3, body, on_pause=close) == ["told", "lost", "told"]


def test_a_lost_holder_is_replaced_and_filled_again(plain, holders):
    first, second = where(holders)

    def body(ranks):
        rank = Rank(ranks, "fsdp", [first])
        rank.enter(1, [0, 1], 0)
        rank.train(STEPS)
        rank.ranks.pause()
        rank.train(1)  # the first one is gone
        is_held = rank.backup_client.own_copies[-1].is_held
        rank.backup_client.hear([first, second])
        rank.backup_client.wait(NEVER)
        rank.group.control.all_reduce(torch.zeros(1)).wait()  # the other's copy is held, too
        if ranks.index == 1:
            return is_held, rank.backup_client.own_copies[-1].is_held
        rank.holders = [first, second]
        rank.enter(2, [0], STEPS + 1)
        return rank.strategy.train_state.step, sha256(rank.strategy)

    found = run_ranks(2, body, on_pause=holders[0].close)
    assert found == [(STEPS + 1, plain[STEPS + 1]), (False, True)]


def test_a_newcomer_goes_on_when_all_ranks_are_lost_and_holders_are_not(plain, holders, tmp_path):
    at = where(holders)

    def body(ranks):
        rank = Rank(ranks, "fsdp", at)
        if ranks.index < 2:
            rank.enter(1, [0, 1], 0)
            rank.train(STEPS)
            return "lost"
        ranks.pause()
        rank.backup_client.hear(at)
        assert rank.strategy.load(catalogue_in(str(tmp_path)), STEPS) == []
        rank.enter(2, [2], rank.strategy.train_state.step)
        rank.train(1)
        return rank.strategy.train_state.step, sha256(rank.strategy)

    found = run_ranks(3, body, on_pause=lambda: None)
    assert found == ["lost", "lost", (STEPS + 1, plain[STEPS + 1])]
