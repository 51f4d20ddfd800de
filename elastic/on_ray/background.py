"""Work beside the controller's loop: kept alive until it is done, its failures not lost."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """Tasks whose failure somebody must hear of."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_failure = on_failure

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_failure(error)
