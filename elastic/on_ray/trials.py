# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Tune around `fit()`: it is made ours in the process of each trial, which is a run of its own.

What a trial's run is, and how Tune hears of it, is elastic/ray_train.py's. It refuses a Ray whose
private parts are not known here before anything of this is done.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from ray.train._internal.session import get_session
from ray.tune import trainable
from ray.util.queue import Empty

TAKEN_S = 600.0
"""How long a trial waits for Tune to take what was reported."""
LOOK_S = 0.2


class TakenInTurn:
    """Ray's queue of what callbacks report, which Tune's thread reads: its next question, if there
    is nothing more, says that it has handled whatever it was given before."""

    def __init__(self, queue: Any) -> None:
        self._queue, self._changed = queue, threading.Condition()
        self._asked = self._found_empty = 0
        """Questions so far, and the latest one that nothing was there for."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process only puts."""
        return itself, (self._queue,)

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """For Tune's thread only."""
        with self._changed:
            self._asked += 1
        try:
            return self._queue.get(block=block, timeout=timeout)
        except Empty:
            with self._changed:
                self._found_empty = self._asked
                self._changed.notify_all()
            raise

    def await_handled(self, is_over: Callable[[], bool]) -> None:
        """Until all that was put before has been handled, or nobody takes any more.

        is_over: whether the trial is ended from outside.
        """
        deadline = time.monotonic() + TAKEN_S
        with self._changed:
            begun = self._asked  # that question may be older than what was put last
            while self._found_empty <= begun and not is_over():
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Tune has not taken in {TAKEN_S:.0f} s what the trial's callbacks reported"
                    )
                self._changed.wait(LOOK_S)


def itself(queue: Any) -> Any:
    return queue


def on_elastic(begin: Callable[[], None], count: Callable[[], None]) -> None:
    """From now on functions that Tune is given run so.

    begin: by name, of a module; called in each trial's process. count: called here for each.
    """
    functions: Any = trainable
    rays_own = functions.wrap_function

    def wrap_function(function: Callable[..., Any], name: str | None = None) -> type:
        count()

        class OnElastic(rays_own(function, name)):
            def setup(self, config: dict[str, Any]) -> None:
                begin()
                super().setup(config)
                report_in_turn(get_session())

        return OnElastic

    functions.wrap_function = wrap_function


def report_in_turn(session: Any) -> None:
    """The trial's function reports, and so ends, only once Tune has taken what callbacks reported
    before. Ray has one place for both: with the function's report in it, Tune's thread would wait
    for ever to lay the callbacks' there, which it alone empties."""
    rays_own, rays_queue = session.report, session._get_or_create_inter_actor_queue

    def queue() -> Any:
        if session._inter_actor_queue is None:
            session._inter_actor_queue = TakenInTurn(rays_queue())
        return session._inter_actor_queue

    def report(*arguments: Any, **named: Any) -> None:
        reported = session._inter_actor_queue
        is_functions = threading.current_thread() is session.training_thread
        if is_functions and reported is not None:
            reported.await_handled(session.stop_event.is_set)
        rays_own(*arguments, **named)

    session._get_or_create_inter_actor_queue, session.report = queue, report
