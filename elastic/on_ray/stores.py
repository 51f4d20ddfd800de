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
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from elastic.on_ray.slots import end_process

START_S = 60.0
"""How long the rendezvous may take to open a store; it starts with the run."""
PING_S = 0.5

log = logging.getLogger(__name__)


class Stores:
    """At most one is open or being opened."""

    def __init__(self, rendezvous: ActorHandle[Any]) -> None:
        self._rendezvous = rendezvous
        self._opening: dict[int, Any] = {}

    def open(self, generation: int) -> None:
        if generation not in self._opening:
            self._opening = {generation: self._rendezvous.open.remote(generation)}

    async def address(self, generation: int) -> list[Any]:
        """Host and port. TimeoutError if the rendezvous does not answer."""
        self.open(generation)
        try:
            return list(await asyncio.wait_for(self._opening[generation], START_S))
        except TimeoutError:
            raise TimeoutError(f"the rendezvous opened no store within {START_S:g} s") from None

    async def watch(self, silent_s: float, patience_s: float) -> None:
        """Kill the rendezvous when it has not answered for `silent_s`; until its first answer it
        may still be starting. It kills this process after `patience_s` without a ping."""
        pid = 0
        while True:
            begun = time.monotonic()
            try:
                pong = self._rendezvous.ping.remote(os.getpid(), patience_s)
                pid = await asyncio.wait_for(pong, silent_s if pid else START_S)
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
