# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The controller's side of the rendezvous: one store per generation, opened ahead of need.

Controller and rendezvous are on the same node, and each sees that the other one is not frozen: who
is gets killed, Ray starts it again, and what was asked of it is asked again.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from elastic.on_ray.slots import end_process, why_not_started
from elastic.protocol.messages.to_worker import StoreAddress

PING_S = 0.5

log = logging.getLogger(__name__)


class Stores:
    """At most one is open or being opened."""

    def __init__(
        self,
        rendezvous: ActorHandle[Any],
        start_s: float,
        begin: Callable[[], Awaitable[ActorHandle[Any]]],
    ) -> None:
        """start_s: how long it may take to open a store; it starts with the run.
        begin: make the rendezvous again."""
        self.rendezvous, self._start_s, self._begin = rendezvous, start_s, begin
        self._opening: dict[int, asyncio.Future[StoreAddress]] = {}

    def open(self, generation: int) -> None:
        if generation not in self._opening:
            opening = asyncio.ensure_future(self._taken(self.rendezvous.open.remote(generation)))
            opening.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._opening = {generation: opening}

    async def _taken(self, answer: Awaitable[StoreAddress]) -> StoreAddress:
        try:
            return await answer
        except ActorDiedError as error:  # for good: Ray starts no actor again that could not begin
            self.rendezvous = await self._begin()  # for the next try
            why = f"the rendezvous did not start: {why_not_started(error)}"
            raise RayError(why) from error

    def opened(self, generation: int) -> StoreAddress | None:
        """Host, port and secret, if they are known already."""
        opening = self._opening.get(generation)
        if opening is None or not opening.done() or opening.cancelled() or opening.exception():
            return None
        return opening.result()

    async def address(self, generation: int, patience_s: float | None = None) -> StoreAddress:
        """Host, port and secret. Raises TimeoutError if the rendezvous does not answer for
        `patience_s` (None: as long as it may take to start), RayError if it cannot."""
        self.open(generation)
        patience_s = self._start_s if patience_s is None else patience_s
        try:
            return await asyncio.wait_for(asyncio.shield(self._opening[generation]), patience_s)
        except TimeoutError:
            why = f"the rendezvous opened no store within {patience_s:g} s; its node may be out "
            raise TimeoutError(
                f"{why}of CPU or memory, a larger detect_s gives it longer"
            ) from None

    async def watch(self, silent_s: float, patience_s: float) -> None:
        """Kill the rendezvous when it has not answered for `silent_s`; until its first answer it
        may still be starting. It kills this process after `patience_s` without a ping."""
        pid = 0
        while True:
            begun = time.monotonic()
            try:
                pong = self.rendezvous.ping.remote(os.getpid(), patience_s)
                pid = await asyncio.wait_for(pong, silent_s if pid else self._start_s)
            except TimeoutError:
                was_frozen_itself = time.monotonic() - begun > silent_s + PING_S
                if pid and not was_frozen_itself:
                    log.warning('rendezvous="silent for %g s, killed"', silent_s)
                    end_process(pid)
                    self._opening.clear()  # what it had opened is gone with it
                    pid = 0
            except RayError:  # it died, and is being started
                self._opening.clear()  # what it had opened is gone with it
                pid = 0
            await asyncio.sleep(PING_S)
