"""A newcomer of a model in stages copies what it will have while the others train: it enters with
less to move, and with the same bits, whoever dies meanwhile.

Ranks are processes; the last one is the newcomer.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from elastic.protocol.errors import PeerLost, StepCancelled
from elastic.protocol.messages.to_controller import Stage
from elastic.protocol.messages.to_worker import Sync
from elastic.protocol.step_record import KnownSteps
from tests.workers import where
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.sharded_rig import enter, sha256, spec
from tests.workers.test_staged_strategy import build, train
from tests.workers.waits import waits
from workers.distributed.process_group import Alone
from workers.health.vitals import Vitals
from workers.membership import events as e
from workers.membership.ahead import CopyingAhead
from workers.membership.state_stream import Followers, PeerServer, Start
from workers.train_state.train_state import Update

CASE, STEPS, BEFORE = "llama, tied", 7, 4
NEWCOMER, MEMBERS = 3, [0, 1, 2]
"""Of one pipeline, and with the newcomer of two."""
STAGES = (Stage(0, 0, (0, 1)), Stage(0, 1, (1, 3)), Stage(0, 2, (3, 4)))
"""Theirs."""
DEADLINE_S = 120.0
NEVER = lambda: False  # noqa: E731


@cache
def plain(num_steps: int = STEPS) -> str:
    """Of one undisturbed rank."""
    strategy = build(CASE)
    enter(strategy, Alone(), 0)
    train(strategy, Alone(), CASE, num_steps)
    return sha256(strategy)


class Source:
    """A member of generation 1, which newcomers may follow."""

    def __init__(self, ranks: Ranks, members: list[int]) -> None:
        self.ranks, self.strategy = ranks, build(CASE)
        self.group = ranks.form(1, members)
        self.peers = PeerServer("127.0.0.1", "t", lambda: None, 3.0)
        state = self.strategy.train_state
        whole = lambda: Start(state.snapshot(), KnownSteps((), None))  # noqa: E731
        self.followers = Followers(self.peers, whole, self.strategy.ahead)
        enter(self.strategy, self.group, 0)
        apply = self.strategy.apply

        def offer_and_apply(update: Update) -> None:
            update = replace(update, origin=1)
            self.followers.offer(update, lambda: KnownSteps((), None))
            apply(update)

        self.strategy.apply = offer_and_apply
        ranks.say(f"address/{ranks.index}", str(self.peers.address[1]))

    def train(self, num_steps: int, begin: int, is_followed: bool, each: Any = None) -> None:
        """begin: after so many steps it takes the newcomer on."""
        for _ in range(num_steps):
            if self.strategy.train_state.step == begin and is_followed:
                self.ranks.hear("dialled")
                deadline = time.monotonic() + DEADLINE_S
                while not self.followers._all and time.monotonic() < deadline:
                    self.followers.take_on()
                    time.sleep(0.005)  # polling, bounded by the deadline
            train(self.strategy, self.group, CASE, 1, each)

    def join(self, members: list[int], step: int) -> tuple[str, int]:
        """The generation after it, to its end."""
        self.followers.end_parts()
        del self.strategy.apply
        return finish(self.strategy, self.ranks, members, step)


def finish(strategy: Any, ranks: Ranks, members: list[int], step: int) -> tuple[str, int]:
    """The hash at the end, and the bytes that moved for generation 2."""
    group = ranks.form(2, members)
    enter(strategy, group, step, generation=2)
    moved_bytes = strategy.shards.moved_bytes
    train(strategy, group, CASE, STEPS - strategy.train_state.step)
    return sha256(strategy), moved_bytes


def followed(strategy: Any) -> set[int]:
    """Ranks that a newcomer dials."""
    found = strategy.ahead.plan(sync_of({}))
    assert found is not None
    return set(found.blocks)


def sync_of(ports: dict[int, int]) -> Sync:
    addresses = tuple(("127.0.0.1", ports[r]) if r in ports else None for r in MEMBERS)
    ranks, nodes = (*MEMBERS, -1), ("",) * (len(MEMBERS) + 1)
    return Sync(0, None, addresses, STAGES, NEWCOMER, next_ranks=ranks, next_nodes=nodes)


class Newcomer:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.strategy = ranks, build(CASE)
        self.strategy.forget()
        self.told: list[e.Event] = []
        patience = waits(join_s=2 * DEADLINE_S, operation_s=DEADLINE_S)
        config = spec("pp:2", global_batch=16, micro_batch=4, timeouts=patience)
        self.copying = CopyingAhead(
            config, self.strategy.ahead, Vitals(), where.HERE, self.told.append
        )
        ports = {r: int(ranks.hear(f"address/{r}")) for r in MEMBERS}
        assert self.copying.start(sync_of(ports), lambda: None) is None
        ranks.say("dialled")

    def look(self, is_enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_enough():
            assert time.monotonic() < deadline, self.told
            self.copying.look_around()
            time.sleep(0.005)  # polling, bounded by the deadline

    @property
    def step(self) -> int:
        return self.strategy.train_state.step


@pytest.mark.parametrize("later", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_who_has_copied_ahead_gets_nothing_more_and_has_the_bits(later: int):
    """Its sources begin with the same step, or one of them `later`."""

    def body(ranks: Ranks, is_ahead: bool) -> Any:
        if ranks.index == NEWCOMER and is_ahead:
            newcomer = Newcomer(ranks)
            newcomer.look(lambda: e.CopyLevel() in newcomer.told)
            newcomer.copying.finish(BEFORE, NEVER)
            assert (newcomer.step, newcomer.strategy.held_step) == (BEFORE, BEFORE)
            return finish(newcomer.strategy, ranks, [*MEMBERS, NEWCOMER], BEFORE)
        if ranks.index == NEWCOMER:
            strategy = build(CASE)
            strategy.forget()
            return finish(strategy, ranks, [*MEMBERS, NEWCOMER], BEFORE)
        source = Source(ranks, MEMBERS)
        dialled = sorted(followed(source.strategy))
        begin = 1 + later * (ranks.index == dialled[-1])
        source.train(BEFORE, begin, is_ahead and ranks.index in dialled)
        return source.join([*MEMBERS, NEWCOMER], BEFORE)

    ahead = run_ranks(4, lambda ranks: body(ranks, True))
    assert {sha for sha, _ in ahead} == {plain()}
    late = run_ranks(4, lambda ranks: body(ranks, False))
    assert {sha for sha, _ in late} == {plain()}
    (moved,), (moved_late,) = {of for _, of in ahead}, {of for _, of in late}
    print(f"{moved} bytes moved when the generation formed, {moved_late} without")
    assert moved < 0.75 * moved_late


@pytest.mark.slow
def test_a_newcomer_that_is_killed_while_it_copies_costs_the_others_nothing():
    def body(ranks: Ranks) -> Any:
        if ranks.index == NEWCOMER:
            newcomer = Newcomer(ranks)
            newcomer.look(lambda: newcomer.step >= 1)
            ranks.tell("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        source = Source(ranks, MEMBERS)
        source.train(STEPS, 1, ranks.index in followed(source.strategy))
        return sha256(source.strategy)

    assert run_ranks(4, body) == [plain()] * 3 + ["killed"]


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 3])
def test_what_a_lost_source_alone_had_the_newcomer_has(at: int):
    """As of the step that it follows: no holder has it, and no checkpoint."""
    lost, left = 2, [0, 1, NEWCOMER]

    def body(ranks: Ranks) -> Any:
        if ranks.index == NEWCOMER:
            newcomer = Newcomer(ranks)
            newcomer.look(lambda: newcomer.step == at)
            ranks.say("stands")
            ranks.hear("lost")
            newcomer.look(lambda: newcomer.copying._why_ended != "")
            newcomer.copying.finish(at, NEVER)
            return finish(newcomer.strategy, ranks, left, at)[0]
        source = Source(ranks, MEMBERS)
        ranks.once_said("abort", source.group.abandon)

        def die(state: Any) -> None:
            if state.step == at:
                ranks.meet(MEMBERS)  # nobody is in that step any more
            if state.step == at and ranks.index == lost:
                ranks.hear("stands")
                ranks.say("lost")
                ranks.tell("killed")
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            source.train(STEPS, 1, ranks.index in followed(source.strategy), die)
        except (PeerLost, StepCancelled):
            ranks.say("abort")
            source.strategy.train_state.buffers.restore_all()
        return source.join(left, at)[0]

    assert run_ranks(4, body) == [plain(), plain(), "killed", plain()]
