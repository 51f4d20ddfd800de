# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The feed of a script's data sets: an actor that executes them, pass by pass, for all ranks.

Which block holds which row is elastic/data/passes.py's. A worker's side is shard.py's.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from elastic.data.passes import Answer, CallOver, PassServer, Piece, Reading
from elastic.data.patience import WAIT_S
from elastic.on_ray.feed.blocks import pieces_of
from elastic.on_ray.feed.datasets import Datasets, unpacked
from elastic.on_ray.feed.order import end_when_alone, note, see_folder
from elastic.on_ray.feed.start import start_actor
from elastic.on_ray.naming import find_actor

WAITS = "a CPU to read data, if the cluster is full of trainers: Ray Data needs one per task"


class PassesActor:
    """Serves the blocks of a run's data sets; what it has executed dies with it."""

    def __init__(self, run_id: str, datasets: Datasets) -> None:
        see_folder(datasets.folder)
        self._run_id, self._given = run_id, datasets
        self._server = PassServer(self._execute)
        self._has_told_waiting = False
        self._alone: asyncio.Task[None] | None = None

    async def blocks_at(self, reading: Reading, row: int, lost: int | None, needed: int) -> Answer:
        """As `PassServer`'s; references stand for blocks."""
        if self._alone is None:
            self._alone = asyncio.create_task(end_when_alone(self._run_id))
        asked = asyncio.ensure_future(self._server.blocks_at(reading, row, lost, needed))
        done, _ = await asyncio.wait([asked], timeout=WAIT_S)
        if not done and not self._has_told_waiting:
            self._has_told_waiting = True
            note(self._run_id, {"waiting_for": WAITS, "waited_s": round(WAIT_S)})
        return await asked

    async def leave(self, reading: Reading) -> None:
        self._server.leave(reading)

    async def hear(self, call: int, readers: tuple[int, ...]) -> None:
        """As `PassServer`'s; a call that is over is left alone."""
        with suppress(CallOver):
            self._server.hear(call, readers)

    async def schema(self, name: str) -> Any:
        """Of a data set, as Ray Data has it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, partial(self._schema, name))

    async def write_record(self) -> None:
        """Nothing of these data sets is on record."""

    def _schema(self, name: str) -> Any:
        return self._datasets[name].schema()

    def _execute(self, name: str) -> Iterator[Piece]:
        yield from pieces_of(self._datasets[name])

    @cached_property
    def _datasets(self) -> dict[str, Any]:
        return unpacked(self._given)


class PassesFeed:
    """A worker's way to it."""

    def __init__(self, run_id: str, datasets: Datasets) -> None:
        self._order = run_id, datasets
        self.actor: Any = start_actor(PassesActor, run_id, *self._order)

    def start_again(self) -> None:
        """If the run is alive."""
        if find_actor(f"{self._order[0]}-controller") is not None:
            self.actor = start_actor(PassesActor, self._order[0], *self._order)
