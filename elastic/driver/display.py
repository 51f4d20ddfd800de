"""`Display`: shows a run that goes on, in a thread that nothing else of the run waits for.

Storage and terminals may take as long as they like. What is shown: elastic/cli/progress.py.
"""

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from elastic.store.files import first_line

SHOW_EVERY_S = 0.25
LAST_LOOK_S = 5.0
"""How long the end of a run waits for its last look."""


@contextmanager
def progress_shown(is_wanted: bool | None) -> Generator[Callable[[str], object] | None]:
    """What shows a run on stderr as `elastic run` shows it, to be called with the run directory
    again and again; None if nobody is to see it. is_wanted: None for where a person looks, in a
    terminal or a notebook."""
    from rich.console import Console  # here, for programs that show nothing

    from elastic.cli.progress import Progress

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter if is_wanted is None else is_wanted):
        yield None
        return
    progress = Progress(console, since=time.time())
    try:
        yield progress
    finally:
        progress.close()


class Display:
    """Begins with the run directory's first mention; end it before whatever it shows with."""

    def __init__(self, show: Callable[[str], object]) -> None:
        """show: takes the run directory, again and again."""
        self._show = show
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._trouble = ""

    def begin(self, place: str) -> None:
        """Once; later calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._keep_showing, args=(place,), name="display", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """After a last look, as long as that takes no longer than it may."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(LAST_LOOK_S)

    def _keep_showing(self, place: str) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(SHOW_EVERY_S)
            if is_last:
                time.sleep(SHOW_EVERY_S)  # so soon after the look before it would see nothing new
            try:
                self._show(place)
            except OSError as error:  # a terminal that is gone is no reason to end a run
                self._tell(first_line(error))

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            with suppress(OSError):
                print(f"elastic: progress cannot be shown: {trouble}", file=sys.stderr)
