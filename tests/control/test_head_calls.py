"""Ray's head is stopped: the controller's loop goes on, and what was asked for comes later."""

import asyncio
import threading
import time
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import GetTimeoutError

from elastic.control.commands import Spawn
from elastic.control.events import Tick
from elastic.on_ray import head_calls
from elastic.on_ray.cluster import RayCluster
from elastic.on_ray.head_calls import HeadCalls
from elastic.on_ray.slots import Slot

PATIENCE_S = 60.0


class Head:
    """Makes actors once it is there, in the order in which it is asked to."""

    def __init__(self) -> None:
        self.is_there, self.made, self.run, self.num_asked = threading.Event(), [], [], 0

    def make(self, worker: int):
        self.num_asked += 1
        assert self.is_there.wait(PATIENCE_S)
        self.made.append(worker)
        answered: Future[bool] = Future()
        answered.set_result(True)
        place = SimpleNamespace(future=lambda: answered)
        return SimpleNamespace(
            is_free=SimpleNamespace(remote=lambda: place),
            run=SimpleNamespace(remote=partial(self._run, worker)),
        )

    async def _run(self, worker: int, spec: object) -> None:
        self.run.append((worker, spec))
        await asyncio.Event().wait()


@pytest.fixture
def head():
    made = Head()
    yield made
    made.is_there.set()  # whatever has become of the test, its thread ends


def cluster_of(head: Head) -> RayCluster:
    told = {
        "spawn": head.make,
        "spec_of": str,
        "record": SimpleNamespace(note=print),
        "on_unprotected": None,
        "costly": tuple,
    }
    host, calls = SimpleNamespace(**told), HeadCalls()
    return RayCluster("t", 3.0, None, calls, host, lambda: 100.0)  # pyright: ignore


async def until(is_so) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not is_so():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)  # polling, bounded by the deadline


def test_the_loop_goes_on_while_actors_wait_for_the_head_and_they_come_in_order(head):
    async def run():
        cluster = cluster_of(head)
        await cluster.execute(Spawn((0, 1)))
        await cluster.execute(Spawn((2,)))
        assert sorted(cluster.workers) == [0, 1, 2]
        assert [await cluster.next_event() for _ in range(3)] == 3 * [Tick(100.0)]
        assert (head.made, head.run) == ([], [])
        head.is_there.set()
        await until(lambda: len(head.run) == 3)
        assert head.made == [0, 1, 2]
        assert sorted(head.run) == [(0, "0"), (1, "1"), (2, "2")]
        assert all(slot.is_placed for slot in cluster.workers.values())
        cluster.head.close()

    asyncio.run(run())


def test_a_worker_that_is_retired_while_it_is_made_is_ended_after_it(head, monkeypatch):
    ended = []
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: ended.append(actor))

    async def run():
        cluster = cluster_of(head)
        await cluster.execute(Spawn((0, 1)))
        await until(lambda: head.num_asked == 1)
        being_made = cluster.workers[0].actor
        for worker in (0, 1):
            cluster.retire(worker)
        assert (cluster.workers, ended) == ({}, [])
        head.is_there.set()
        await until(lambda: bool(ended))
        assert ended == [being_made.result()]
        cluster.head.close()
        assert head.made == [0], "the other one was never asked for"
        assert head.run == []

    asyncio.run(run())


def test_a_call_that_the_head_does_not_answer_is_made_again_before_the_next():
    answers, calls = [GetTimeoutError("away"), GetTimeoutError("away"), "first"], HeadCalls()

    def ask():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    first, second = calls.start(ask), calls.start(lambda: len(answers))
    assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == ("first", 0)
    calls.close()


def without_answer(made: list[str], *, comes_back: bool):
    """A call: the head registers the actor, but its answer comes too late."""

    def make():
        if comes_back and made:
            return made[0]
        made[:] = ["w3"]
        raise GetTimeoutError("away")

    return make


def test_a_worker_that_the_head_has_made_without_an_answer_is_ended_with_the_run(monkeypatch):
    ended, made = [], []
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: ended.append(actor))
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)

    async def run():
        cluster = cluster_of(Head())
        cluster.workers[3] = Slot(cluster.head.start(without_answer(made, comes_back=True)))
        await until(lambda: bool(made))
        await cluster.close()
        assert ended == ["w3"]

    asyncio.run(run())


def test_the_end_of_a_run_does_not_wait_for_a_head_that_stays_away(monkeypatch):
    monkeypatch.setattr(head_calls, "END_S", 0.1)
    monkeypatch.setattr(head_calls, "RETRY_S", 0.01)
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(head_calls, "time", clock)
    calls, made = HeadCalls(), []
    answer = calls.start(without_answer(made, comes_back=False))

    async def run():
        await until(lambda: bool(made))
        calls.close()
        await asyncio.wait_for(calls.rest(), PATIENCE_S)
        assert not answer.done()

    asyncio.run(run())
    now[0] += head_calls.AFTER_END_S + 1
    with pytest.raises(GetTimeoutError):
        answer.result(PATIENCE_S)


def test_what_the_head_refuses_is_told():
    calls = HeadCalls()

    def refused():
        raise ValueError("no such thing")

    slot = Slot(calls.start(refused))
    with pytest.raises(ValueError, match="no such thing"):
        slot.actor.result(PATIENCE_S)
    slot.end()
    calls.close()
