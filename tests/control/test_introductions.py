"""How long a successor controller waits for whom to introduce himself."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from elastic.control.state import Ledger, Running
from elastic.on_ray import failover as on_ray
from elastic.on_ray.failover import Failover
from elastic.protocol.membership import Membership
from elastic.protocol.messages.pulse import Heartbeat
from elastic.protocol.messages.to_controller import Introduction, Process
from tests.control import virtual_time
from tests.control.transitions import LIMITS

TWO = Running(Membership(3, (0, 1)))
BEAT = Heartbeat(1, 3, 9, "reduce", 0.2, 0.1, True, "S")
FROZEN = replace(BEAT, process_state="T", stopped_s=0.3)
SHARDED = replace(LIMITS, is_whole=False, has_copies=True)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(on_ray, "time", virtual_time.CLOCK)


class Actor:
    """A worker's actor as Ray shows it: alive, and busy with its run, or dead, or out of reach."""

    def __init__(self, *, is_dead: bool = False, is_out_of_reach: bool = False):
        self.is_free, self.is_dead, self.is_out_of_reach = self, is_dead, is_out_of_reach

    async def remote(self):
        if self.is_dead:
            raise RayActorError
        if self.is_out_of_reach:
            raise ActorUnavailableError("Socket closed", None)
        await asyncio.Event().wait()


def take_over(candidates, *said, beats=(), phase=TWO, recorded_step=9, limits=LIMITS, port=1):
    """said: (seconds, worker) of introductions. beats: (seconds, heartbeat). port: where workers
    have heard the controller before; only 1 can be had. -> who was found, who was ended, seconds.

    detect_s is 0.5, the lease 5 s."""
    ended, words = [], []

    async def run():
        loop, tasks = asyncio.get_running_loop(), []

        async def open_also(address):
            return address == ("i", 1)

        cluster = SimpleNamespace(
            detect_s=0.5, workers={}, holders=SimpleNamespace(on_node=lambda node: None),
            now=loop.time, recorded_step=recorded_step, links=SimpleNamespace(open_also=open_also),
            in_background=lambda task: tasks.append(loop.create_task(task)),
            send_word=words.append,
        )  # fmt: skip
        actors = dict(candidates)
        failover = Failover(cluster, actors, ended.append)  # pyright: ignore[reportArgumentType]
        for at, worker in said:
            size, process = phase.membership.world_size, Process("n", "i", 1, "cpu", ("i", 1))
            introduced = Introduction("working", ("i", port), 3, worker, size, 9, process)
            loop.call_later(at, failover.hear, worker, introduced)
        for at, beat in beats:
            loop.call_later(at, failover.hear_pulse, beat.worker, beat)
        began = loop.time()
        adopted = await failover.collect(Ledger(3, 9), phase, limits)
        seconds = round(loop.time() - began, 6)
        # The lease of whoever introduced itself begins anew: this controller may die at once.
        assert sorted(words) == [s.worker for s in adopted.standings]
        return [s.worker for s in adopted.standings], ended, seconds

    return virtual_time.run(run())


def test_a_member_that_cannot_speak_at_once_is_waited_for():
    pending = Actor()
    moving = [(at / 10, replace(BEAT, phase="compute", p95_s=None)) for at in range(13)]
    found, ended, seconds = take_over(
        {0: Actor(), 1: Actor(), 2: pending}, (0.01, 0), (1.3, 1), beats=moving
    )
    assert (found, ended) == ([0, 1], [pending]), "a whole generation is at work"
    assert 1.3 <= seconds < 2


def test_a_member_that_ray_knows_to_be_dead_is_not():
    pending = Actor()
    found, ended, seconds = take_over({0: Actor(), 1: Actor(is_dead=True), 2: pending}, (0.01, 0))
    assert (found, ended) == ([0], [pending])
    assert seconds < 2


def test_a_member_that_ray_cannot_reach_is_not_dead():
    actors = {0: Actor(), 1: Actor(is_out_of_reach=True)}
    found, ended, _ = take_over(actors, (0.1, 0), (0.3, 1))
    assert (found, ended) == ([0, 1], [])


def test_a_member_whose_pulse_says_that_it_is_stopped_is_given_up():
    """It had been stopped before its pulse could be heard."""
    frozen = Actor()
    beats = [(at / 10, replace(FROZEN, stopped_s=0.3 + at / 10)) for at in range(1, 9)]
    found, ended, seconds = take_over({0: Actor(), 1: frozen}, (0.01, 0), beats=beats)
    assert (found, ended) == ([0], [frozen])
    assert 0.2 <= seconds < 0.5


def test_a_member_that_nobody_hears_is_given_up():
    cut_off = Actor()
    found, ended, seconds = take_over({0: Actor(), 1: cut_off}, (0.1, 0))
    assert (found, ended) == ([0], [cut_off])
    assert 0.6 <= seconds < 1.2


def test_a_member_that_could_not_be_heard_has_its_lease():
    """The successor is elsewhere: the pulses look for it in vain."""
    found, _, seconds = take_over({0: Actor(), 1: Actor()}, (0.1, 0), (1.5, 1), port=2)
    assert found == [0, 1]
    assert 1.5 <= seconds < 2


def test_a_member_that_may_hold_the_last_step_alone_has_its_lease():
    for frozen in ([], [(at / 10, FROZEN) for at in range(14)]):
        found, _, seconds = take_over(
            {0: Actor(), 1: Actor()}, (0.1, 0), (1.5, 1), beats=frozen, recorded_step=10
        )
        assert found == [0, 1]
        assert 1.5 <= seconds < 2


def test_of_a_sharded_state_one_member_is_given_up_and_no_second_one():
    three = Running(Membership(3, (0, 1, 2)))
    actors = {0: Actor(), 1: Actor(), 2: Actor()}
    found, ended, seconds = take_over(actors, (0.1, 0), (0.2, 2), phase=three, limits=SHARDED)
    assert (found, ended) == ([0, 2], [actors[1]])
    assert seconds < 1.2
    found, _, seconds = take_over(actors, (0.1, 0), (1.5, 1), phase=three, limits=SHARDED)
    assert found == [0, 1]
    assert 1.4 <= seconds < 2, "the second one was given up once the third was there"
    sparse = replace(SHARDED, has_copies=False)
    found, _, _ = take_over(actors, (0.1, 0), (0.2, 2), (1.5, 1), phase=three, limits=sparse)
    assert found == [0, 1, 2]
