# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What a feed is told and what it serves, whichever actor it is; and what both actors do alike."""

import asyncio
import functools
import os
import sys
from dataclasses import dataclass
from typing import Any, cast

import ray

from elastic.on_ray.naming import end, find_actor

ALONE_CHECK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOrder:
    """What the feed needs to know, now and when it is started again."""

    run_id: str
    source: bytes
    """A pickled ParquetSource; empty where `dataset()` needs Ray and the feed calls it."""
    workload: bytes
    folder: str | None
    seed: int
    place: str
    """The run directory, which need not exist yet."""
    num_samples: int | None = None
    """That the run will use; None: not known."""


@dataclass(frozen=True, slots=True)
class Served:
    """A window for a worker."""

    first: int
    count: int
    rows: list[Any]
    """One reference: in a list, so that Ray does not fetch it on the way."""
    first_row: int | None = None
    """For a bare block of Ray Data: the id of its first row."""


def note(run_id: str, fields: dict[str, Any]) -> None:
    """Into the run's journal, if the run is alive."""
    controller = find_actor(f"{run_id}-controller")
    if controller is not None:
        cast(Any, controller).note.remote(fields)


def see_folder(folder: str | None) -> None:
    """The workload's modules can be imported, where Ray has not shipped them."""
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)


def folder_here(folder: str | None) -> str | None:
    """TARGET's folder in this process: where every node has it, or where Ray has unpacked what it
    ships; None if TARGET is installed on the nodes."""
    return folder or unpacked_folder()


@functools.cache
def unpacked_folder() -> str | None:
    """Of this node: Ray starts processes there, and the user's code may leave it."""
    has_package = "working_dir" in ray.get_runtime_context().runtime_env
    return os.getcwd() if has_package else None


async def end_when_alone(run_id: str) -> None:
    """The controller ends the feed; should it be gone, the feed ends itself."""
    while find_actor(f"{run_id}-controller") is not None:
        await asyncio.sleep(ALONE_CHECK_S)
    end(ray.get_runtime_context().current_actor)
