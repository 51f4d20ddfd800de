# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Servers of peer memory: one actor per node where a worker of a sharded run is.

What they do is workers/backup/server.py's; which worker uses which,
elastic/protocol/backup_assignment.py's.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from elastic.on_ray.head_calls import HeadCalls
from elastic.on_ray.links import LinkServer, receive
from elastic.on_ray.naming import NAMESPACE, end, this_host
from elastic.on_ray.slots import Slot, end_process
from elastic.protocol.backup_assignment import BackupAddress, holders_for
from elastic.protocol.messages.backup import Ping
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.to_worker import Holders
from elastic.protocol.timeouts import Timeouts, timeouts_of
from elastic.store.files import first_line

log = logging.getLogger(__name__)
RETRY_S = 0.5
"""After one that did not start."""
CONNECT_S = 2.0
"""For a holder to be reached; and how long a generation waits for one that starts."""
START_S = 60.0
"""For its process to start, on a node that is busy."""
PLACE_S = 10.0
"""The same for one that has started already."""

Background = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class BackupServerActor:
    """Keeps copies of shards; it ends with the run, or when no worker is left."""

    def __init__(self, token: str, lease_s: float) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides none of a node's GPUs from it
        from workers.backup.server import BackupServer

        self._server = BackupServer(this_host(), token)
        self._lease_s = lease_s

    def place(self) -> tuple[str, int, int]:
        """Address, process."""
        return *self._server.address, os.getpid()

    def run(self) -> None:
        """Until nobody has been connected for the lease."""
        self._server.wait_until_left(self._lease_s)
        end(ray.get_runtime_context().current_actor)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Started(NamedTuple):
    """A holder as the controller knows it."""

    actor: "ActorHandle[Any]"
    pid: int = 0
    """0: not known yet."""


class BackupServers:
    """The controller's view: where holders are; a lost or frozen one is started again, empty."""

    def __init__(
        self,
        token: str,
        detect_s: float | None,
        *,
        in_background: Background,
        head: HeadCalls,
        slots: Mapping[int, Slot],
        links: LinkServer,
        on_lost: Callable[[str, str], None],
        now: Callable[[], float],
    ) -> None:
        """slots, links: the cluster's, of every live worker. on_lost: hears node and reason. now:
        the clock of the slots' heartbeats."""
        self._token, self._run_id = token, ""
        self._detect_s, self._timeouts = detect_s, timeouts_of(detect_s)
        self._in_background, self._head = in_background, head
        self._slots, self._links = slots, links
        self._on_lost, self._now = on_lost, now
        self._started: dict[str, Started] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._addresses: dict[str, tuple[str, int]] = {}
        self._doubted: set[str] = set()
        self._news = asyncio.Event()

    def turn_on(self, run_id: str) -> None:
        """The run's state is sharded; where every member holds all of it there are none."""
        self._run_id = run_id

    def on_node(self, node: str) -> None:
        """A worker is there."""
        if self._run_id and node and (node not in self._tasks or self._tasks[node].done()):
            self._tasks[node] = self._in_background(self._watch(node))

    def for_worker(self, worker: int) -> tuple[BackupAddress, ...]:
        """All holders as this worker is told of them, the best first."""
        slot = self._slots.get(worker)
        known = [BackupAddress(n, *address) for n, address in self._addresses.items()]
        return tuple(holders_for(slot.node_id if slot else "", known))

    def tell(self, worker: int) -> None:
        self._links.send(worker, Holders(self.for_worker(worker)))

    def _tell_all(self) -> None:
        for worker in tuple(self._slots):
            self.tell(worker)

    def _start(self, node: str) -> tuple[ActorHandle[Any], float]:
        """And how long it may take to say where it is."""
        name, start_s = f"{self._run_id}-holder-{node[:12]}", START_S
        with suppress(ValueError):
            ray.get_actor(name, namespace=NAMESPACE)
            start_s = max(PLACE_S, self._timeouts.confirm_s)  # for a controller before this one
        options: dict[str, Any] = {
            "label_selector": {"ray.io/node-id": node},
            "name": name,
            "get_if_exists": True,  # it outlives a controller
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 16,  # `run`, once for each controller that the run has had
        }
        actor = ray.remote(BackupServerActor).options(**options)
        return cast(Any, actor.remote(self._token, self._timeouts.lease_s)), start_s

    async def known(self) -> None:
        """Wait until all that were asked for are there, but not long."""
        deadline = time.monotonic() + CONNECT_S
        while time.monotonic() < deadline:
            asked = {node for node, task in self._tasks.items() if not task.done()}
            if asked <= self._addresses.keys():
                return
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())

    async def _watch(self, node: str) -> None:
        """As long as a worker is there."""
        while any(slot.node_id == node for slot in self._slots.values()):
            why = ""
            try:
                await self._attend(node)
            except (EOFError, ConnectionError):
                why = "its process is gone"
            except (RayError, ValueError, OSError) as error:  # ValueError: its name is not free yet
                why = first_line(error)
            self._fence(node)
            if self._addresses.pop(node, None) is not None:
                self._on_lost(node, why)
                self._tell_all()  # whoever waits for it goes on at once
            else:
                log.warning('holder on node=%s reason="it does not start: %s"', node[:12], why)
                await asyncio.sleep(RETRY_S)

    async def _attend(self, node: str) -> None:
        """Have a holder there until it is lost. Raises what tells so."""
        actor: Any
        actor, start_s = await asyncio.wrap_future(self._head.start(partial(self._start, node)))
        self._started[node] = Started(actor)
        host, port, pid = await asyncio.wait_for(actor.place.remote(), start_s)
        self._started[node] = Started(actor, pid)
        reader, writer = await dial((host, port), self._token)
        try:  # as long as there is a connection, a holder keeps what it has
            self._addresses[node] = (host, port)
            self._news.set()
            self._tell_all()
            actor.run.remote()
            while True:
                try:
                    await listen(reader, writer, self._detect_s, self._timeouts)
                except TimeoutError as silence:
                    former = writer
                    reader, writer = await self._look_again(node, (host, port), silence)
                    former.close()
                except (EOFError, ConnectionError) as end:
                    writer.close()
                    reader, writer = await self._dial_again((host, port), end)
        finally:
            writer.close()

    async def _look_again(
        self, node: str, address: tuple[str, int], silence: TimeoutError
    ) -> Connection:
        """It has not answered, which `silence` tells. Where its node's workers are not heard
        either, our own link may be cut, and hang.py tells whether they are lost; else it
        answers over a new connection, or `silence` is raised: it is frozen."""
        while not self._is_heard(node):
            if all(slot.node_id != node for slot in self._slots.values()):
                raise OSError("its node is gone")
            await asyncio.sleep(self._timeouts.heartbeat_s)
        try:
            reader, writer = await dial(address, self._token)
            try:
                await ping(reader, writer, self._timeouts.diagnosis_s, 0.0)
            except BaseException:
                writer.close()
                raise
        except TimeoutError:
            raise silence from None
        return reader, writer

    async def _dial_again(self, address: tuple[str, int], end: Exception) -> Connection:
        """The connection has ended, which `end` tells. Who closed it, and is not there for another
        one, has gone; a reset, and a refusal after it, may be a firewall's."""
        left_s = self._timeouts.silence_s
        while True:
            begun = time.monotonic()
            try:
                return await dial(address, self._token)
            except ConnectionRefusedError:
                if isinstance(end, EOFError) or left_s <= 0:
                    raise end from None
            except OSError:
                if left_s <= 0:
                    raise end from None
            await asyncio.sleep(self._timeouts.tick_s)
            awake_s = CONNECT_S + self._timeouts.tick_s + self._timeouts.late_s
            left_s -= min(awake_s, time.monotonic() - begun)  # the rest of it we were frozen

    def _is_heard(self, node: str) -> bool:
        watches = (slot.watch for slot in self._slots.values() if slot.node_id == node)
        newest = max((w.heard_at for w in watches if w is not None), default=0.0)
        return self._now() - newest < 2 * self._timeouts.heartbeat_s + self._timeouts.late_s

    def _fence(self, node: str) -> None:
        """A holder that counts as lost keeps nothing any more, even if it is only frozen."""
        started = self._started.pop(node, None)
        if started is not None:
            if started.pid and node == ray.get_runtime_context().get_node_id():
                end_process(started.pid)
            end(started.actor)

    def hear_silent(self, holder: tuple[str, str, int]) -> None:
        """A rank's copy was not answered. The path between the two may be cut, but if a new
        connection of ours is not answered either, the holder goes."""
        node, *address = holder
        is_known = self._addresses.get(node) == tuple(address)
        if is_known and node not in self._doubted and self._detect_s is not None:
            self._doubted.add(node)
            self._in_background(self._examine(node, self._addresses[node]))

    async def _examine(self, node: str, address: tuple[str, int]) -> None:
        try:
            unanswered = TimeoutError("a worker's copy was not answered, nor a new connection")
            _, writer = await self._look_again(node, address, unanswered)
            writer.close()
        except (OSError, EOFError, ValueError) as error:
            if self._addresses.get(node) == address:
                log.warning('holder on node=%s reason="%s"', node[:12], first_line(error))
                self._fence(node)  # `_attend` finds out
        finally:
            self._doubted.discard(node)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for node in tuple(self._started):
            self._fence(node)


async def dial(address: tuple[str, int], token: str) -> Connection:
    """A connection to a holder. Raises OSError."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), CONNECT_S)
    writer.write(pack(Hello(token)))
    return reader, writer


async def listen(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    detect_s: float | None,
    timeouts: Timeouts,
) -> None:
    """Ask a holder again and again whether it is there. Raises TimeoutError once it has not
    answered for detect_s (None: never), OSError and EOFError when it is gone."""
    while True:
        await ping(reader, writer, detect_s, timeouts.late_s)
        await asyncio.sleep(timeouts.heartbeat_s)


async def ping(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    detect_s: float | None,
    late_s: float,
) -> None:
    """late_s: if this process was frozen, the answer waits to be read."""
    writer.write(pack(Ping()))
    answer = asyncio.ensure_future(receive(reader))
    try:
        await asyncio.wait({answer}, timeout=detect_s)
        if not answer.done() and detect_s is not None:
            await asyncio.wait({answer}, timeout=late_s)
        if not answer.done():
            raise TimeoutError(f"it has not answered for {detect_s:g} s")
        answer.result()
    finally:
        answer.cancel()
