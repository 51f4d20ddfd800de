"""What the controller does about holders: it notices that one is frozen, and says so."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from elastic.on_ray.backup import servers as on_ray
from elastic.on_ray.backup.servers import BackupServers, dial, listen, ping
from elastic.on_ray.backup.status import Protection
from elastic.protocol.messages.to_controller import Protected
from elastic.protocol.timeouts import timeouts_of
from tests.workers.frozen import FrozenHolder
from workers.backup.server import BackupServer

DETECT_S = 0.5
PATIENT = replace(timeouts_of(3000.0), diagnosis_s=1000.0)
"""For holders that answer: they are threads of this process, on a machine that may be busy."""
SILENCE = TimeoutError("it has not answered for 0.5 s")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(on_ray, "CONNECT_S", 60.0)


class Told:
    """A Protection, and what it has put into the journal."""

    def __init__(self):
        self.notes, self.time = [], 10.0
        self.protection = Protection(self.notes.append, lambda: self.time)

    def say(self, worker, step, why=""):
        self.protection.hear(worker, Protected(step, why))


def test_a_run_without_copies_says_so_once_and_when_it_is_over():
    told = Told()
    told.protection.hear_lost("node0", "why")
    told.say(3, 7, "h:1: timed out")
    told.say(4, 7, "h:1: timed out")
    told.say(3, 8, "h:1: timed out")
    assert told.protection.reason == (
        "not protected by peer memory since step 7: no holder has the rows of w3, w4 "
        "(h:1: timed out); a loss now would cost all steps since the newest checkpoint"
    )
    told.time = 11.5
    told.say(3, 9)
    assert told.protection.reason
    told.say(4, 9)
    assert told.protection.reason == ""
    assert told.notes == [
        {"lost_holder": "node0", "reason": "why"},
        {"step": 7, "worker": "w3", "reason": "h:1: timed out"},
        {"step": 9, "since_step": 7, "unprotected_s": 1.5},
    ]


def test_only_members_need_copies():
    told = Told()
    told.say(3, 7, "there is no holder")
    told.say(4, 7, "there is no holder")
    told.protection.form([4, 5], 7)
    assert "the rows of w4 (" in told.protection.reason
    told.protection.form([5, 6], 7)
    assert told.protection.reason == ""
    assert told.notes[-1] == {"step": 7, "since_step": 7, "unprotected_s": 0.0}


async def listened(address):
    reader, writer = await dial(address, "t")
    try:
        await listen(reader, writer, DETECT_S, timeouts_of(DETECT_S))
    finally:
        writer.close()


def test_a_holder_that_answers_is_listened_to_and_its_death_is_news_at_once(monkeypatch):
    holder, answered, ping = BackupServer("127.0.0.1", "t"), asyncio.Semaphore(0), on_ray.ping

    async def ping_and_tell(*arguments):
        await ping(*arguments)
        answered.release()

    monkeypatch.setattr(on_ray, "ping", ping_and_tell)

    async def run():
        reader, writer = await dial(holder.address, "t")
        long_s = 24 * 3600.0
        listening = asyncio.ensure_future(listen(reader, writer, long_s, timeouts_of(DETECT_S)))
        for _ in range(3):
            await answered.acquire()
        assert not listening.done()
        holder.close()
        with pytest.raises((EOFError, OSError)) as told:
            await asyncio.wait_for(listening, 60)
        assert not isinstance(told.value, TimeoutError)
        writer.close()

    asyncio.run(run())


def test_a_frozen_holder_is_noticed_after_detect_s():
    frozen = FrozenHolder()
    with pytest.raises(TimeoutError, match=r"it has not answered for 0\.5 s"):
        asyncio.run(listened(frozen.at[1:]))
    frozen.close()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_a_rank_says_of_a_holder_is_looked_into_before_it_goes(is_frozen, monkeypatch):
    holder, frozen = BackupServer("127.0.0.1", "t"), FrozenHolder()
    address = frozen.at[1:] if is_frozen else holder.address
    ended, work = [], []
    monkeypatch.setattr(on_ray.ray, "get_runtime_context", here("node0"))
    monkeypatch.setattr(on_ray, "end_process", ended.append)
    monkeypatch.setattr(on_ray, "end", ended.append)

    async def run():
        start = lambda coroutine: work.append(asyncio.ensure_future(coroutine))  # noqa: E731
        heard = {1: SimpleNamespace(node_id="node0", watch=SimpleNamespace(heard_at=99.9))}
        holders = BackupServers(
            "t",
            DETECT_S,
            in_background=start,
            head=None,
            slots=heard,
            links=None,
            on_lost=None,
            now=lambda: 100.0,
        )
        if not is_frozen:
            holders._timeouts = PATIENT
        holders._addresses["node0"] = address
        holders._started["node0"] = on_ray.Started("actor", 123)
        said = ("node0", *address)
        for holder in (said, said, ("node0", "127.0.0.1", 1)):
            holders.hear_silent(holder)
        assert len(work) == 1, "one look at a time, and only at those there are"
        await work[0]

    asyncio.run(run())
    assert ended == ([123, "actor"] if is_frozen else [])
    holder.close()
    frozen.close()


def test_a_silent_holder_is_spared_while_its_nodes_workers_are_silent_too(monkeypatch):
    """The controller's own link may be cut: whoever is on that node cannot be reached now."""
    frozen = FrozenHolder()
    slot = SimpleNamespace(node_id="node0", watch=SimpleNamespace(heard_at=0.0))
    slots = {1: slot}
    holders = BackupServers(
        "t",
        DETECT_S,
        in_background=None,
        head=None,
        slots=slots,
        links=None,
        on_lost=None,
        now=lambda: 100.0,
    )

    async def run():
        looking = asyncio.ensure_future(holders._look_again("node0", frozen.at[1:], SILENCE))
        done, _ = await asyncio.wait({looking}, timeout=1.0)
        assert not done
        slot.watch.heard_at = 100.0
        with pytest.raises(TimeoutError, match=str(SILENCE)):
            await asyncio.wait_for(looking, 10)
        slot.watch.heard_at = 0.0
        looking = asyncio.ensure_future(holders._look_again("node0", frozen.at[1:], SILENCE))
        slots.clear()
        with pytest.raises(OSError, match="its node is gone"):
            await asyncio.wait_for(looking, 10)

    asyncio.run(run())
    frozen.close()


@pytest.mark.parametrize("end", [EOFError("closed"), ConnectionResetError("reset")])
def test_a_holder_whose_connection_has_ended_is_dialled_again(end):
    holder = BackupServer("127.0.0.1", "t")
    holders = BackupServers(
        "t",
        DETECT_S,
        in_background=None,
        head=None,
        slots={},
        links=None,
        on_lost=None,
        now=lambda: 100.0,
    )

    async def run():
        reader, writer = await holders._dial_again(holder.address, end)
        await ping(reader, writer, 10.0, 0.0)
        writer.close()

    asyncio.run(run())
    holder.close()


@pytest.mark.parametrize(
    ("end", "after_s"), [(EOFError("closed"), 0.0), (ConnectionResetError("reset"), DETECT_S)]
)
def test_a_holder_that_closed_and_refuses_is_gone_and_one_that_was_reset_has_time(end, after_s):
    holder = BackupServer("127.0.0.1", "t")
    holder.close()
    holders = BackupServers(
        "t",
        DETECT_S,
        in_background=None,
        head=None,
        slots={},
        links=None,
        on_lost=None,
        now=lambda: 100.0,
    )
    began = time.monotonic()
    with pytest.raises(type(end), match=str(end)):
        asyncio.run(holders._dial_again(holder.address, end))
    assert time.monotonic() - began >= after_s


def here(node):
    return lambda: SimpleNamespace(get_node_id=lambda: node)
