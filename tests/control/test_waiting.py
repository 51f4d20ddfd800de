"""What a run says that has too few places for its workers; without Ray."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.on_ray import waiting
from elastic.on_ray.machines import Machine, Need
from elastic.on_ray.slots import Slot
from elastic.on_ray.waiting import Offer, waits_for, watch_waiting

NOTHING: Any = None
ONE_CPU, ONE_GPU = Need(1, 0), Need(2, 1)


def machine(**resources: float) -> Machine:
    return Machine("n", "10.0.0.1", resources)


BUSY = Offer((machine(CPU=4), machine(CPU=0)), {})
EMPTY = Offer((machine(CPU=4),), {"CPU": 4})


def test_the_line_says_how_many_wait_for_what_and_what_there_is():
    offer = Offer((machine(CPU=8), machine(CPU=4, GPU=1)), {"CPU": 3, "GPU": 0})
    assert waits_for(2, ONE_GPU, offer) == (
        "waiting for a place for 2 workers of 2 CPUs and 1 GPU; the cluster has 2 nodes with "
        "12 CPUs (3 free) and 1 GPUs (0 free)"
    )
    assert waits_for(1, ONE_CPU, EMPTY) == (
        "waiting for a place for 1 worker of 1 CPU; the cluster has 1 node with 4 CPUs (4 free)"
    )


def test_a_place_is_lacking_where_no_machine_is_large_enough_whatever_is_free():
    assert not EMPTY.lacks(ONE_CPU)
    assert BUSY.lacks(ONE_CPU)
    assert EMPTY.lacks(ONE_GPU)
    assert Offer((machine(CPU=4),) * 2, {"CPU": 8}).lacks(Need(8, 0))


def watched(*steps: tuple[dict[int, Slot], Offer]) -> list[str]:
    """What is told while the workers and the offer become these, a look after the other."""
    workers, told, left = dict[int, Slot](), list[str](), list(steps)

    def begin_look() -> None:
        changed, head.offer = left.pop(0)
        workers.clear()
        workers.update(changed)

    def start(ask: Any) -> Future[Offer]:
        answer: Future[Offer] = Future()
        answer.set_result(ask())
        return answer

    head: Any = SimpleNamespace(start=start, offer=None)
    begin_look()

    async def run() -> None:
        watch = watch_waiting(workers, head, 2, ONE_CPU, told.append, lambda: head.offer)
        task = asyncio.create_task(watch)
        while left:
            for _ in range(20):  # what can happen happens
                await asyncio.sleep(0)
            begin_look()
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(run())
    return told


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(waiting, "PLACED_S", 0)


def slot(state: str = "pending", *, is_placed: bool = False) -> Slot:
    return Slot(NOTHING, state=state, is_placed=is_placed)


def test_a_run_waits_until_its_minimum_has_places():
    one, two = {0: slot(is_placed=True), 1: slot()}, {0: slot("training"), 1: slot(is_placed=True)}
    assert watched((one, BUSY), (two, BUSY), (one, BUSY)) == [
        waits_for(1, ONE_CPU, BUSY),
        "",
        waits_for(1, ONE_CPU, BUSY),
    ]


def test_where_there_is_a_place_it_is_given_time_to_make_a_process():
    assert watched(({0: slot()}, EMPTY)) == []
