"""What the controller's hands make of a worker's report; without Ray."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorDiedErrorContext,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from elastic.control.commands import Abort, Checkpoint, Form
from elastic.control.events import (
    Cancelled,
    CollectiveFailed,
    Joined,
    UserFailed,
    WorkerLost,
    WorkerStarted,
)
from elastic.on_ray.cluster import RayCluster
from elastic.on_ray.head_calls import HeadCalls
from elastic.on_ray.slots import Slot
from elastic.protocol.membership import Membership
from elastic.protocol.messages import to_controller, to_worker
from elastic.protocol.messages.pulse import KILLED, Heartbeat
from elastic.protocol.step_record import NONE_APPLIED
from elastic.protocol.timeouts import timeouts_of
from tests.control import virtual_time

NOTHING: Any = None


class WithoutRay(RayCluster):
    def _fence(self, record: Slot) -> None:
        """There is no actor to end."""


def reported(
    report: to_controller.Report | str,
    *,
    state: str,
    recorded_step: int = 0,
    recorded_generation: int | None = None,
):
    """report: a string is what the user's code raised. -> the events, and the steps that the record
    went back to."""
    went_back: list[int] = []

    async def run() -> list[Any]:
        host: Any = SimpleNamespace(
            on_unprotected=NOTHING,
            record=SimpleNamespace(note=print, roll_back=went_back.append),
        )
        cluster = WithoutRay("t", 3.0, NOTHING, NOTHING, host, lambda: 5.0)
        cluster.has_formed, cluster.progress.recorded_step = True, recorded_step
        cluster.progress.recorded_generation = recorded_generation
        cluster.workers[4] = Slot(NOTHING, last_seen=4.0, state=state)
        if isinstance(report, str):
            cluster.user_failed(4, report)
        else:
            cluster._on_report(4, report)
            cluster._on_report(4, report)
        return [cluster.events.get_nowait() for _ in range(cluster.events.qsize())]

    return asyncio.run(run()), went_back


def test_a_generation_that_begins_behind_the_record_takes_the_record_back_once():
    joined = to_controller.Joined(3, 0, 0.1, 7)
    events, went_back = reported(joined, state="ready", recorded_step=9)
    assert went_back == [7]
    assert events == [Joined(3, 0, 0.1, 5.0, 7)] * 2
    assert reported(joined, state="ready", recorded_step=7)[1] == []


def test_what_a_generation_that_is_on_record_says_again_takes_nothing_back():
    joined = to_controller.Joined(3, 0, 0.1, 7)
    assert reported(joined, state="ready", recorded_step=9, recorded_generation=2)[1] == [7]
    assert reported(joined, state="ready", recorded_step=9, recorded_generation=3)[1] == []


def test_a_worker_that_comes_back_before_it_was_heard_to_be_ready_is_ready():
    async def run() -> list[Any]:
        scene = forming(record=SimpleNamespace(note=print, safe_step=0, safe_applied=NONE_APPLIED))
        scene.cluster.workers[4] = Slot(NOTHING, last_seen=4.0, state="pending")
        process = to_controller.Process("n", "ip", 9, "cpu", ("h", 1))
        seams: Any = scene.cluster
        seams.holders = SimpleNamespace(on_node=print, tell=print)
        scene.cluster.links.send = lambda worker, message: None
        for said in (None, process, process):
            scene.cluster._on_report(
                4, to_controller.Introduction("standby", ("h", 2), process=said)
            )
        return [scene.cluster.events.get_nowait() for _ in range(scene.cluster.events.qsize())]

    assert asyncio.run(run()) == [WorkerStarted(4, 5.0, "n")]


@pytest.mark.parametrize("state", [KILLED, "Z", "T"])
def test_a_beat_of_a_dead_or_stopped_process_is_no_sign_of_life(state: str):
    slot = Slot(NOTHING)
    alive = Heartbeat(4, 1, 7, "compute", 0.1, None, waits_for_peers=False, process_state="R")
    slot.beat(alive, 4.0)
    slot.beat(replace(alive, process_state=state), 5.0)
    assert (slot.last_seen, slot.step) == (4.0, 7)
    assert slot.watch is not None
    assert slot.watch.heard_at == 5.0


@pytest.mark.parametrize("state", ["pending", "standby"])
def test_what_fails_in_a_newcomer_is_its_node_s_fault(state: str):
    (event,), _ = reported("no such\n  file", state=state)
    assert event == WorkerLost(4, "start_failed", event.last_seen, 5.0, "no such file")


def test_what_fails_in_a_member_ends_the_run():
    (event,), _ = reported("ValueError: no", state="training")
    assert event == UserFailed(4, "ValueError: no", 5.0)


class Rendezvous:
    """Opens a store when it is told to."""

    def __init__(self) -> None:
        self.asked: dict[int, asyncio.Future[to_worker.StoreAddress]] = {}
        self.open = SimpleNamespace(remote=self._open)

    def _open(self, generation: int) -> "asyncio.Future[to_worker.StoreAddress]":
        self.asked[generation] = asyncio.get_running_loop().create_future()
        return self.asked[generation]

    def answer(self, generation: int) -> None:
        self.asked[generation].set_result(("host", generation, "secret"))


@dataclass
class Forming:
    """A cluster whose rendezvous has not answered; what it tells its workers is kept."""

    cluster: WithoutRay
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    told: list[tuple[int, type, int, Any]] = field(default_factory=list[tuple[int, type, int, Any]])
    """worker, kind, generation, store"""

    words: list[tuple[int, to_worker.Word]] = field(default_factory=list[Any])

    def tell(self, worker: int, message: to_worker.OfGeneration | to_worker.Word) -> None:
        if isinstance(message, to_worker.Word):
            self.words.append((worker, message))
            return
        store = message.store if isinstance(message, to_worker.Form) else None
        self.told.append((worker, type(message), message.generation, store))


def forming(**host: Any) -> Forming:
    record = SimpleNamespace(note=print, safe_step=0, safe_applied=NONE_APPLIED)
    told = {"record": record, "on_unprotected": NOTHING, **host}
    rendezvous: Any = Rendezvous()
    seams: Any = SimpleNamespace(**told)
    scene = Forming(WithoutRay("t", 3.0, rendezvous, NOTHING, seams, lambda: 5.0), rendezvous)
    scene.cluster.links.send = scene.tell
    return scene


def form_of(generation: int, step: int = 0) -> Form:
    return Form(Membership(generation, (4, 7)), step)


def told_of(generation: int) -> list[tuple[int, type, int, Any]]:
    return [(w, to_worker.Form, generation, ("host", generation, "secret")) for w in (4, 7)]


async def settled() -> None:
    for _ in range(20):  # what can happen happens, without time
        await asyncio.sleep(0)


def test_events_are_taken_while_the_rendezvous_opens_the_store():
    async def run() -> None:
        scene = forming()
        await asyncio.wait_for(scene.cluster.execute(form_of(1)), 60)
        scene.cluster.cancel("stopped", "the driver is gone")
        assert await scene.cluster.next_event() == Cancelled("stopped", "the driver is gone", 5.0)
        assert scene.told == []
        scene.rendezvous.answer(1)
        await settled()
        assert scene.told == told_of(1)

    asyncio.run(run())


def test_newcomers_alone_are_told_what_is_on_record_once_storage_has_it():
    """All members have left: of later steps nobody could report the ones before."""

    async def run() -> None:
        stored = asyncio.Event()
        record = SimpleNamespace(
            note=print, safe_step=7, safe_applied=NONE_APPLIED, settle=stored.wait
        )
        scene = forming(record=record)
        scene.cluster.progress.recorded_step = 9
        await scene.cluster.execute(form_of(1, 9))
        await settled()
        assert (scene.told, scene.words) == ([], [])
        record.safe_step = 9
        stored.set()
        await settled()
        scene.rendezvous.answer(1)
        await settled()
        assert scene.words == [(4, to_worker.Word(9, 0)), (7, to_worker.Word(9, 0))]
        assert scene.told == told_of(1)
        await scene.cluster.execute(form_of(2, 9))
        scene.rendezvous.answer(2)
        await settled()
        assert (len(scene.words), scene.told) == (2, [*told_of(1), *told_of(2)])

    asyncio.run(run())


def test_a_store_that_was_opened_ahead_costs_its_generation_no_pass_of_the_loop():
    async def run() -> None:
        scene = forming()
        await scene.cluster.execute(Abort(Membership(1, (4, 7))))
        scene.rendezvous.answer(2)
        await settled()
        scene.told.clear()
        with pytest.raises(StopIteration):  # it waits for nothing
            scene.cluster.execute(form_of(2)).send(None)
        assert scene.told == told_of(2)

    asyncio.run(run())


def test_members_that_were_told_of_no_form_are_recalled_from_it_and_never_told_of_it():
    """An abort of a generation that they do not know would get no answer."""

    async def run() -> None:
        scene = forming()
        await asyncio.wait_for(scene.cluster.execute(form_of(1)), 60)
        await scene.cluster.execute(Abort(Membership(1, (4, 7))))
        assert scene.told == [(4, to_worker.Recall, 1, None), (7, to_worker.Recall, 1, None)]
        scene.rendezvous.answer(1)
        await settled()
        scene.told.clear()
        await scene.cluster.execute(form_of(2))
        scene.rendezvous.answer(2)
        await settled()
        await scene.cluster.execute(Abort(Membership(2, (4, 7))))
        aborted = [(w, to_worker.Abort, 2, None) for w in (4, 7)]
        assert scene.told == [*told_of(2), *aborted]

    asyncio.run(run())


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_rendezvous_that_opens_no_store_costs_a_try_and_not_the_run(is_given_up: bool):
    async def run() -> list[Any]:
        scene = forming()
        timeouts = timeouts_of(0.5)
        scene.cluster._timeouts = replace(timeouts, join_s=timeouts.confirm_s + 0.05)
        await asyncio.wait_for(scene.cluster.execute(form_of(1)), 60)
        if is_given_up:
            await scene.cluster.execute(Abort(Membership(1, (4, 7))))
        await asyncio.sleep(0.2)
        events = [scene.cluster.events.get_nowait() for _ in range(scene.cluster.events.qsize())]
        await scene.cluster.execute(Abort(Membership(1, (4, 7))))
        assert [kind for _, kind, _, _ in scene.told[:2]] == [to_worker.Recall] * 2
        return events

    why = "generation 1: the rendezvous opened no store within 0.05 s; its node may be out of CPU "
    why += "or memory, a larger detect_s gives it longer"
    failed = CollectiveFailed(1, 0, why, 5.0, is_stall=True)
    assert virtual_time.run(run()) == ([] if is_given_up else [failed])


def test_a_rendezvous_that_cannot_open_a_store_costs_a_try_and_not_the_run():
    async def run() -> Any:
        scene = forming()
        await scene.cluster.execute(form_of(1))
        scene.rendezvous.asked[1].set_exception(RayError("no port is free"))
        return await asyncio.wait_for(scene.cluster.events.get(), 60)

    why = "generation 1: no port is free"
    assert asyncio.run(run()) == CollectiveFailed(1, 0, why, 5.0, is_stall=True)


def never_made(error: Exception) -> ActorDiedError:
    """As Ray says of an actor whose constructor raised."""
    trace = f"ray::Actor.__init__() (pid=7)\n  File ...\n{type(error).__name__}: {error}"
    return ActorDiedError(RayTaskError("__init__", trace, error))


def test_a_rendezvous_whose_constructor_raises_costs_a_try_and_the_next_asks_another_one():
    """Ray does not start such an actor again."""
    second: Any = Rendezvous()

    async def run() -> Any:
        scene = forming(begin_rendezvous=lambda: second)
        scene.cluster.head = HeadCalls()
        await scene.cluster.execute(form_of(1))
        scene.rendezvous.asked[1].set_exception(never_made(OSError("no port is left")))
        event = await asyncio.wait_for(scene.cluster.events.get(), 10)
        await scene.cluster.execute(Abort(Membership(1, (4, 7))))
        second.answer(2)
        await settled()
        scene.told.clear()
        await scene.cluster.execute(form_of(2))
        assert scene.told == told_of(2)
        scene.cluster.head.close()
        return event

    why = "generation 1: the rendezvous did not start: OSError: no port is left"
    assert asyncio.run(run()) == CollectiveFailed(1, 0, why, 5.0, is_stall=True)


def died(why: str) -> ActorDiedError:
    return ActorDiedError(ActorDiedErrorContext(error_message=why, actor_id=16 * b"a"))


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (never_made(OSError("no disk is left")), "OSError: no disk is left"),
        (
            died("The actor is dead because its node has died. Node Id: 7"),
            "The actor is dead because its node has died",
        ),
        (RuntimeEnvSetupError("no wheel"), "Failed to set up runtime environment. no wheel"),
        (RayError(), "RayError"),
        (None, "it ended before its model was built"),
    ],
)
def test_a_worker_that_does_not_start_says_what_failed(end: RayError | None, why: str):
    async def call(_spec: Any) -> None:
        if end is not None:
            raise end

    async def run() -> Any:
        cluster = forming(spec_of=str).cluster
        actor: Any = Future()
        placed = SimpleNamespace(future=Future)
        is_free = SimpleNamespace(remote=lambda: placed)
        actor.set_result(SimpleNamespace(run=SimpleNamespace(remote=call), is_free=is_free))
        cluster.workers[4] = record = Slot(actor, last_seen=4.0)
        await cluster._watch(4, record)
        return await asyncio.wait_for(cluster.events.get(), 10)

    assert asyncio.run(run()) == WorkerLost(4, "start_failed", 4.0, 5.0, why)


def test_all_members_are_told_to_save_and_from_which_step_on():
    async def run() -> list[Any]:
        scene = forming()
        told: list[Any] = []
        scene.cluster.links.send = lambda worker, message: told.append((worker, message))
        await scene.cluster.execute(Checkpoint(Membership(1, (4, 7)), 41))
        return told

    told = [(4, to_worker.Checkpoint(1, 0, 2, 41)), (7, to_worker.Checkpoint(1, 1, 2, 41))]
    assert asyncio.run(run()) == told


def test_a_form_that_waits_for_storage_is_told_after_it_and_one_at_a_time():
    """The generation stands behind the record: the last with the state is lost."""
    goes_on, went_back = asyncio.Event(), []

    async def on_loaded(step: int, _damaged: Any) -> None:
        went_back.append(step)
        await goes_on.wait()

    async def run() -> None:
        scene = forming(open_at=on_loaded)
        scene.cluster.progress.recorded_step = 9
        await asyncio.wait_for(scene.cluster.execute(form_of(1, step=8)), 60)
        scene.rendezvous.answer(1)
        await settled()
        assert (scene.told, went_back) == ([], [8])
        await scene.cluster.execute(Abort(Membership(1, (4, 7))))
        await scene.cluster.execute(form_of(2, step=7))
        scene.rendezvous.answer(2)
        await settled()
        assert (went_back, list(scene.rendezvous.asked)) == ([8], [1, 2])
        scene.told.clear()
        goes_on.set()
        await settled()
        assert (scene.told, went_back) == (told_of(2), [8, 7])
        assert scene.cluster.progress.recorded_step == 7

    asyncio.run(run())
