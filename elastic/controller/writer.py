"""`Writer`: the thread in which a run's files are written, and what becomes of its errors.

What is written is the supervisor's choice, how it is written elastic/store's.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from elastic.controller.storage_health import StorageTrouble, Unpublished
from elastic.store.files import first_line
from elastic.store.remote import shown_uri
from elastic.store.run_directory import RunDirectory

log = logging.getLogger(__name__)

SOON_S = 0.1
"""Steps are promised on record 0.5 s after their commit, and each wake of a thread costs."""


class Writer:
    """One thread, so that things are written in their order. Errors come back in the event loop."""

    def __init__(self, on_failed: Callable[[str], None], on_broken: Callable[[str], None]) -> None:
        """on_failed: storage did not take something, and this is news. on_broken: a record of ours
        contradicts itself."""
        self._on_failed, self._on_broken = on_failed, on_broken
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self.loop: asyncio.AbstractEventLoop
        """The controller's, once it runs."""
        self.trouble = StorageTrouble()
        self._is_taken_over = False
        self._put_off: list[Callable[[], Any]] = []
        self._flushing: asyncio.TimerHandle | None = None

    def write(self, function: Any, *arguments: Any) -> "Future[Any]":
        """In the thread: a decision never waits for storage."""
        self.flush()
        return self._submit(function, *arguments)

    def write_soon(self, function: Any, *arguments: Any) -> None:
        """Within SOON_S, together with others of its kind, and before whatever is written later."""
        self._put_off.append(partial(function, *arguments))
        if self._flushing is None:
            self._flushing = self.loop.call_later(SOON_S, self.flush)

    def flush(self) -> None:
        """What was put off is the thread's now."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        put_off, self._put_off = self._put_off, []
        if put_off:
            self._submit(self._write_all, put_off)

    async def settle(self) -> None:
        """Until all is written that was asked for before."""
        self.flush()
        await self.loop.run_in_executor(self.executor, int)

    def _submit(self, function: Any, *arguments: Any) -> "Future[Any]":
        future = self.executor.submit(function, *arguments)
        future.add_done_callback(lambda done: self._hear(done.exception()))
        return future

    def _write_all(self, functions: list[Callable[[], Any]]) -> None:
        """In the thread: each, whatever becomes of the others."""
        for function in functions:
            try:
                function()
            except Exception as error:
                self._hear(error)

    def _hear(self, error: BaseException | None) -> None:
        if isinstance(error, ValueError | AssertionError):
            self.loop.call_soon_threadsafe(self._on_broken, f"record: {error}")
        elif error is not None:
            cause = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, Unpublished) or self.trouble.hear_write(cause):
                self.loop.call_soon_threadsafe(self._tell, cause)

    def _tell(self, cause: str) -> None:
        log.error('storage reason="%s"', cause)
        self._on_failed(cause)

    def hear_uploads(self, directory: RunDirectory) -> None:
        if directory.taken_by and not self._is_taken_over:
            self._is_taken_over = True
            self._on_broken(f"{shown_uri(directory.place)} was taken over by {directory.taken_by}")
        cause = directory.upload_error
        if self.trouble.hear_upload(cause) and cause:
            self._tell(cause)

    def warning(self, directory: RunDirectory | None, committed: int | None) -> str:
        """For the end of the run; empty if storage took everything."""
        if directory is None:
            return ""
        self.hear_uploads(directory)
        spool = "" if directory.folder.local else str(directory.directory)
        return self.trouble.summary(committed, spool)
