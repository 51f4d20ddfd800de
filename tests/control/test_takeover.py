"""How long a successor controller waits for whom to introduce himself."""

import asyncio
from types import SimpleNamespace

from ray.exceptions import RayActorError

from elastic.control.state import Ledger, Running
from elastic.on_ray.takeover import Takeover
from elastic.protocol.membership import Membership

TWO = Running(Membership(3, (0, 1)))


class Actor:
    """A worker's actor as Ray shows it: alive, and busy with its run, or dead."""

    def __init__(self, *, is_dead: bool = False):
        self.is_free, self.is_dead = self, is_dead

    async def remote(self):
        if self.is_dead:
            raise RayActorError
        await asyncio.Event().wait()


def take_over(candidates: dict, *said: tuple[float, int]):
    """(seconds, worker) of the introductions -> who was found, who was ended, seconds.

    detect_s is 0.5, the lease 5 s."""
    ended = []

    async def run():
        cluster = SimpleNamespace(
            detect_s=0.5, workers={}, holders=SimpleNamespace(on_node=lambda node: None),
            now=lambda: 1.0, in_background=lambda task: task.close(),
        )  # fmt: skip
        actors = dict(candidates)
        takeover = Takeover(cluster, actors, ended.append)  # pyright: ignore[reportArgumentType]
        loop = asyncio.get_running_loop()
        for at, worker in said:
            header = {
                "kind": "working", "generation": 3, "rank": worker, "world_size": 2, "step": 9,
                "node_id": "n", "node_ip": "i", "pid": 1, "device": "cpu", "peer_address": ["i", 1],
            }  # fmt: skip
            loop.call_later(at, takeover.hear, worker, header)
        began = loop.time()
        adopted = await takeover.collect(Ledger(3, 9), TWO)
        return [s.worker for s in adopted.standings], ended, loop.time() - began

    return asyncio.run(run())


def test_a_member_that_cannot_speak_at_once_is_waited_for():
    pending = Actor()
    found, ended, seconds = take_over({0: Actor(), 1: Actor(), 2: pending}, (0.01, 0), (0.9, 1))
    assert (found, ended) == ([0, 1], [pending]), "a whole generation is at work"
    assert 0.9 <= seconds < 2


def test_a_member_that_ray_knows_to_be_dead_is_not():
    pending = Actor()
    found, ended, seconds = take_over({0: Actor(), 1: Actor(is_dead=True), 2: pending}, (0.01, 0))
    assert (found, ended) == ([0], [pending])
    assert seconds < 2
