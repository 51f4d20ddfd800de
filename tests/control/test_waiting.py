"""What a run says that has too few places for its workers; without Ray."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from elastic.on_ray.placement import waiting
from elastic.on_ray.placement.autoscaling import Demand
from elastic.on_ray.placement.waiting import Offer, start_line, waits_for, watch_waiting
from elastic.on_ray.slots import Slot
from elastic.protocol.placing import Machine, Need, parse_labels

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


def test_the_line_says_so_if_nothing_can_fill_the_wish_any_more():
    """The large node has left, and all that is there was started by hand."""
    report = json.dumps({"autoscaler_report": {"active_nodes": {"node_1": 1}}}).encode()
    small = machine(CPU=4)
    before = Offer((small, machine(CPU=16)), {"CPU": 0}, report)
    after = Offer((small,), {"CPU": 0}, report)
    assert "nothing adds nodes" not in waits_for(1, Need(8, 0), before)
    assert waits_for(1, Need(8, 0), after).endswith(
        "(0 free); a worker needs 8 CPUs, and none of the cluster's 1 nodes is that large: the "
        "largest has 4 CPUs, and nothing adds nodes: start a larger one"
    )
    assert "nothing adds nodes" not in waits_for(1, Need(8, 0), replace(after, report=None))


def test_the_line_says_so_if_the_autoscaler_has_no_such_node():
    """What else waits, and could be had, says nothing of ours."""
    wish = Need(2, 1)
    offer = Offer((machine(CPU=4),), {"CPU": 4}, infeasible=(Demand({"CPU": 2.0, "GPU": 1.0}),))
    assert waits_for(3, wish, offer) == (
        "waiting for a place for 3 workers of 2 CPUs and 1 GPU; the cluster has 1 node with "
        "4 CPUs (4 free) and 0 GPUs (0 free); Ray's autoscaler has no kind of node for that and "
        "adds none: start one"
    )
    for other in ({"CPU": 2.0}, {"CPU": 2.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 1.0}):
        assert "autoscaler" not in waits_for(3, wish, replace(offer, infeasible=(Demand(other),)))


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (b'{"autoscaler_report": {"active_nodes": {"gpus": 1}}}', True),
        (b'{"autoscaler_report": {"active_nodes": {"node_1": 1}}}', False),
        (None, False),
    ],
    ids=["version 1", "by hand", "none, or version 2"],
)
def test_what_no_node_has_is_told_whatever_adds_nodes(nodes, says):
    """Version 1 tells nobody which kinds of nodes it has."""
    offer = Offer((machine(CPU=4),), {"CPU": 4}, nodes)
    assert waits_for(2, Need(2, 1), offer) == (
        "waiting for a place for 2 workers of 2 CPUs and 1 GPU; the cluster has 1 node with "
        "4 CPUs (4 free) and 0 GPUs (0 free)"
        + says
        * "; whether Ray's autoscaler (version 1) has a kind for it, it does not tell"
    )
    assert "version 1" not in waits_for(2, Need(2, 0), offer), "a node has a place for that"


SPOT_FIRST = parse_labels("ray.io/market-type=spot; ray.io/market-type=on-demand")


def test_the_line_says_which_labels_are_asked_for_and_which_there_are():
    reserved = replace(machine(CPU=4), labels={"ray.io/market-type": "reserved", "other": "x"})
    need = Need(1, 0, SPOT_FIRST, "A100", {"disk": 2.0})
    offer = Offer((reserved, machine(CPU=1, **{"accelerator_type:T4": 1})), {"CPU": 5})
    assert offer.lacks(need)
    assert waits_for(2, need, offer) == (
        "waiting for a place for 2 workers of 1 CPU and 2 disk and accelerator_type A100 on a node "
        "with ray.io/market-type=spot or else ray.io/market-type=on-demand; the cluster has 2 "
        "nodes with 5 CPUs (5 free) and 0 disks (0 free), accelerator types: T4, 0 of them with "
        "these labels (there are: ray.io/market-type=reserved)"
    )


def test_any_of_the_choices_is_a_place():
    need, free = Need(1, 0, SPOT_FIRST), {"CPU": 4.0}
    for market, lacks in (("spot", False), ("on-demand", False), ("reserved", True)):
        there = replace(machine(CPU=4), labels={"ray.io/market-type": market})
        assert Offer((there,), free).lacks(need) is lacks
    assert not Offer((machine(CPU=4),), free).lacks(Need(1, 0, (*SPOT_FIRST, {})))


def test_a_demand_with_other_labels_is_not_ours():
    need, offer = Need(1, 0, SPOT_FIRST), Offer((machine(CPU=4),), {"CPU": 4})
    for labels, is_ours in (({"ray.io/market-type"}, True), (set(), False), ({"zone"}, False)):
        demand = Demand({"CPU": 1.0}, frozenset(labels))
        assert replace(offer, infeasible=(demand,)).adds_none(need) is is_ours


def test_the_start_line_says_how_far_the_workers_are():
    assert start_line({}, 1, NOTHING) == "waiting for 1 worker to start: none is asked for yet"
    states = [("pending", False), ("pending", True), ("pending", True), ("ready", True)]
    slots = {n: Slot(NOTHING, state=state, is_placed=p) for n, (state, p) in enumerate(states)}
    assert start_line(slots, 2, {2, 3}.__contains__) == (
        "waiting for 2 workers to start: 1 started, 1 loading TARGET and its model, "
        "1 importing torch, 1 without a process yet"
    )
    assert start_line(slots, 1, {2, 3}.__contains__) == ""


def watched(*looks: tuple[dict[int, Slot], Offer | Exception]) -> list[str]:
    """What is told while the workers, and what Ray says, become these, a look after the other."""
    workers, told, left = dict[int, Slot](), list[str](), iter(looks)
    found: list[Offer | Exception] = []
    is_over = asyncio.Event()

    def next_look() -> None:
        changed, offer = next(left, (None, None))
        if changed is None or offer is None:
            is_over.set()
            return
        workers.clear()
        workers.update(changed)
        found[:] = [offer]

    def ask() -> Offer:
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    async def pause(_: float) -> None:
        next_look()
        await asyncio.Event().wait() if is_over.is_set() else None

    async def run() -> None:
        next_look()
        watch = watch_waiting(workers, lambda: (2, 2), ONE_CPU, told.append, ask, pause)
        task = asyncio.create_task(watch)
        await asyncio.wait_for(is_over.wait(), 30)
        task.cancel()

    asyncio.run(run())
    return told


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "ASKED_S", 0)
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


@pytest.mark.parametrize("error", [OSError("away"), RuntimeError("away"), KeyError("NodeID")])
def test_a_head_that_is_away_or_tells_half_changes_nothing_and_says_so(error, caplog):
    lacking = {0: slot(), 1: slot()}
    assert watched((lacking, error), (lacking, BUSY), (lacking, error)) == [
        waits_for(2, ONE_CPU, BUSY)
    ]
    assert type(error).__name__ in caplog.text


def test_only_where_no_machine_could_have_a_worker_is_it_told_before_ray_has_had_its_time(
    monkeypatch,
):
    """What is taken may be the run's own, whose processes have not answered yet."""
    monkeypatch.setattr(waiting, "PLACED_S", 60)
    lacking, bare = {0: slot(), 1: slot()}, Offer((machine(CPU=0),), {})
    taken = Offer((machine(CPU=2),), {"CPU": 0.0})
    assert watched((lacking, taken)) == []
    assert watched((lacking, bare)) == [waits_for(2, ONE_CPU, bare)]


def test_where_there_is_a_place_it_is_given_time_to_make_a_process():
    assert watched(({0: slot()}, EMPTY)) == []
