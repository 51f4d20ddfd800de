# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Holders of peer memory: one actor per node where a worker of a sharded run is.

What they do is workers/peer_memory/holder.py's; which worker uses which,
elastic/protocol/pairing.py's.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing, suppress
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from elastic.on_ray.actors import NAMESPACE, end, this_host
from elastic.on_ray.links import LinkServer
from elastic.on_ray.slots import Slot
from elastic.protocol.pairing import HolderAt, holders_for
from elastic.store.files import first_line

log = logging.getLogger(__name__)
RETRY_S = 0.5
CONNECT_S = 2.0
"""For a holder to start, and to be reached."""

Background = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class HolderActor:
    """Keeps copies of shards; it ends with the run, or when no worker is left."""

    def __init__(self, token: str, lease_s: float) -> None:
        from workers.peer_memory.holder import HolderServer

        self._server = HolderServer(this_host(), token)
        self._lease_s = lease_s

    def address(self) -> tuple[str, int]:
        return self._server.address

    def run(self) -> None:
        """Until nobody has been connected for the lease."""
        self._server.wait_until_left(self._lease_s)
        end(ray.get_runtime_context().current_actor)


class Holders:
    """The controller's view: where holders are; a lost one is started again, empty."""

    def __init__(
        self,
        token: str,
        in_background: Background,
        slots: Mapping[int, Slot],
        links: LinkServer,
    ) -> None:
        """slots, links: the cluster's, of every live worker."""
        self._token, self._run_id, self._lease_s = token, "", 0.0
        self._in_background, self._slots, self._links = in_background, slots, links
        self._actors: dict[str, ActorHandle[Any]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._addresses: dict[str, tuple[str, int]] = {}
        self._news = asyncio.Event()

    def turn_on(self, run_id: str, lease_s: float) -> None:
        """The run's state is sharded; where every member holds all of it there are none."""
        self._run_id, self._lease_s = run_id, lease_s

    def on_node(self, node: str) -> None:
        """A worker is there."""
        if self._run_id and node and (node not in self._tasks or self._tasks[node].done()):
            self._tasks[node] = self._in_background(self._watch(node))

    def for_worker(self, worker: int) -> list[list[Any]]:
        """All holders as this worker is told of them, the best first."""
        slot = self._slots.get(worker)
        known = [HolderAt(n, *address) for n, address in self._addresses.items()]
        return [list(h) for h in holders_for(slot.node_id if slot else "", known)]

    def tell(self, worker: int) -> None:
        self._links.send(worker, {"type": "holders", "holders": self.for_worker(worker)})

    def _tell_all(self) -> None:
        for worker in tuple(self._slots):
            self.tell(worker)

    def _start(self, node: str) -> ActorHandle[Any]:
        options: dict[str, Any] = {
            "label_selector": {"ray.io/node-id": node},
            "name": f"{self._run_id}-holder-{node[:12]}",
            "get_if_exists": True,  # it outlives a controller
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 16,  # `run`, once for each controller that the run has had
        }
        actor = ray.remote(HolderActor).options(**options)
        return cast(Any, actor.remote(self._token, self._lease_s))

    def _join(self, address: tuple[str, int]) -> socket.socket:
        """A connection: as long as there is one, a holder keeps what it has."""
        from workers.peer_memory.holder import connect

        return connect(address, self._token, CONNECT_S)

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
            try:
                actor: Any = self._start(node)
                self._actors[node] = actor
                host, port = await actor.address.remote()
                self._addresses[node] = (host, port)
                self._news.set()
                self._tell_all()
                with closing(await asyncio.to_thread(self._join, (host, port))):
                    await actor.run.remote()
            except (RayError, ValueError, OSError) as error:  # ValueError: its name is not free yet
                log.warning('holder on node=%s lost reason="%s"', node[:12], first_line(error))
            self._addresses.pop(node, None)
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for actor in self._actors.values():
            end(actor)
