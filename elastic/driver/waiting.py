"""Waiting for the end of a run: what is told meanwhile, what interrupts do, when a driver leaves.

What the run comes to is elastic/driver/launch.py's.
"""

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from elastic.driver.display import Display
from elastic.driver.starting import tell

Progress = Callable[[str], object]
POLL_S = 0.2
END_NOW_S = 10.0
"""How long a controller may take to end a run at once, before it is ended without it."""
CHECKS_S = 5.0
"""A driver that will leave waits for what the first worker finds wrong, as nobody is there to be
told of it later; but only so long if there is no place for all: machines may take hours to come."""


def wait(driver: Any, onlooker: "Onlooker", detach: bool) -> dict[str, Any] | None:
    """The controller's answer at the end of the run; None if it was left alone after its start.

    The first SIGINT or SIGTERM asks it to finish the step, the next one ends it at once.
    """
    told, end_by, departure = 0, math.inf, Departure()
    with interrupts_heard() as interrupts:
        try:
            while (answer := driver.poll(POLL_S)) is None:
                onlooker.look(driver)
                if detach and departure.is_due(driver, time.monotonic()):
                    return None
                if len(interrupts) > told:
                    told = len(interrupts)
                    name = signal.Signals(interrupts[0]).name
                    (driver.stop if told == 1 else driver.end_now)(f"{name} at the driver")
                    if told == 1:
                        onlooker.hear_interrupt(name, driver)
                    else:
                        end_by = min(end_by, time.monotonic() + END_NOW_S)
                if time.monotonic() > end_by:
                    driver.abandon()
            if answer["is_open"]:
                onlooker.look_back()
            return answer
        finally:
            onlooker.end()


class Departure:
    """When a driver leaves a run that goes on without it: once it has begun; or while there is no
    place for all of its workers, but not before those that had one have had their time."""

    def __init__(self) -> None:
        self._is_lacking, self._leave_by = False, math.inf

    def is_due(self, driver: Any, now: float) -> bool:
        """Asked again and again."""
        if not driver.place:
            return False
        was_lacking, self._is_lacking = self._is_lacking, bool(driver.waits_for)
        has_found_place = was_lacking and not self._is_lacking
        if has_found_place or self._leave_by == math.inf:
            self._leave_by = now + CHECKS_S
        return driver.has_begun or (self._is_lacking and now > self._leave_by)


@contextmanager
def interrupts_heard() -> Generator[list[int]]:
    """The SIGINTs and SIGTERMs so far; they do nothing else."""
    interrupts: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        interrupts.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Onlooker:
    """Tells whoever has started the run what it waits for, where it is, and how it goes."""

    def __init__(
        self,
        on_progress: Progress | None = None,
        *,
        tell_place: bool = False,
        is_silent: bool = False,
        is_script: bool = False,
        place: str = "",
    ) -> None:
        """place: the run directory. tell_place: once the run is there to stay. is_silent: not how
        far a start is that lacks nothing. is_script: its steps are its own, and it is stopped at a
        report."""
        self._tell_place, self._is_silent, self._is_script = tell_place, is_silent, is_script
        self._display = None if on_progress is None else Display(on_progress)
        self._told, self._place = "", place

    def look(self, driver: Any) -> None:
        line = driver.waits_for
        need, _, rest = line.partition(";")  # what others have left changes all the time
        need += rest.partition(";")[2]
        if not line and not self._is_silent:
            need = line = driver.starts
        if line and need != self._told:
            self._told = need
            tell(line)
        if not driver.has_begun:
            return
        if self._tell_place:
            self._tell_place = False
            why = "temporary: without storage the same name does not resume it"
            print(f"run directory: {driver.place} ({why})", file=sys.stderr)
        if self._display is not None:
            self._display.begin(driver.place)

    def hear_interrupt(self, name: str, driver: Any) -> None:
        """The first one: a long step, or a script that reports nothing, ends much later."""
        if not driver.has_begun:
            when = "before it has begun"
        elif self._is_script:
            when = "at the script's next report with a checkpoint, or when it returns"
        else:
            when = "with the checkpoint of this step"
        tell(f"{name}: the run stops {when}; a second one ends it at once")

    def look_back(self) -> None:
        """At a run that has ended, perhaps before it was seen to begin."""
        if self._display is not None and self._place:
            self._display.begin(self._place)

    def end(self) -> None:
        if self._display is not None:
            self._display.end()
