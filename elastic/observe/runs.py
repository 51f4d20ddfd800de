"""The runs of a storage, as far as their files say without being read through."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastic.driver.resume import read_past_run
from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder

AT_ONCE = 16
"""Runs that are looked at at the same time: in a bucket each file is a request."""


@dataclass(frozen=True)
class Listed:
    """One run."""

    name: str
    state: str
    """The outcome of a run that has ended; the phase of one at work; `silent` if its controller is
    not heard and no result is there; `damaged` if its files are none of a run."""
    step: int
    steps: int | None
    """Of the whole run."""
    changed_at: float | None
    """Unix seconds of the last change of its files, by the storage's clock."""
    size_bytes: int
    """Of everything in the run directory."""


def runs_in(storage: Folder, now: float | None = None) -> list[Listed]:
    """The folders that hold a run, the one changed last first. `now` is Unix time."""
    sizes, changes = usage(storage)
    names = [name for name in storage.folders() if storage.at(name).exists("config.json")]
    at = now or time.time()

    def look(name: str) -> Listed:
        return listed(storage.at(name), sizes.get(name, 0), changes.get(name), now=at)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = pool.map(look, names)
        return sorted(runs, key=lambda run: (-(run.changed_at or 0.0), run.name))


def usage(storage: Folder) -> tuple[dict[str, int], dict[str, float]]:
    """By folder: bytes of all in it, and its newest change. One listing of the whole storage."""
    sizes: dict[str, int] = {}
    changes: dict[str, float] = {}
    for path, size_bytes, changed_at in storage.all_files():
        name = path.partition("/")[0]
        sizes[name] = sizes.get(name, 0) + size_bytes
        changes[name] = max(changes.get(name, 0.0), changed_at)
    return sizes, changes


def listed(folder: Folder, size_bytes: int, changed_at: float | None, *, now: float) -> Listed:
    try:
        past = read_past_run(folder, now)
    except WrongInput:
        past = None
    if past is None:
        return Listed(folder.name, "damaged", 0, None, changed_at, size_bytes)
    status, result = past.status or {}, past.result
    if result is not None:
        state, step = result.get("outcome"), result.get("steps")
    else:
        state, step = status.get("phase", "starting"), status.get("step", 0)
        if not past.is_alive and past.heard_s > past.silent_after_s:
            state = "silent"
    steps = past.config.get("steps")
    return Listed(
        name=folder.name,
        state=state if isinstance(state, str) else "damaged",
        step=step if isinstance(step, int) else 0,
        steps=steps if isinstance(steps, int) else None,
        changed_at=changed_at or None,
        size_bytes=size_bytes,
    )


def as_json(runs: Iterable[Listed]) -> list[dict[str, Any]]:
    return [
        {
            "name": run.name,
            "state": run.state,
            "step": run.step,
            "steps": run.steps,
            "changed_at": run.changed_at,
            "size_bytes": run.size_bytes,
        }
        for run in runs
    ]
