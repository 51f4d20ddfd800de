# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The controller's side of the rendezvous: one store per generation, opened ahead of need."""

import asyncio
from typing import Any

from ray.actor import ActorHandle

START_S = 60.0
"""How long the rendezvous may take to open a store; it starts with the run."""


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
        return list(await asyncio.wait_for(self._opening[generation], START_S))
