# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Tune around `fit()`: it is made ours in the process of each trial, which is a run of its own.

What a trial's run is, and how Tune hears of it, is elastic/ray_train.py's.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from ray.train._internal.session import get_session
from ray.tune import trainable

TAKEN_S = 60.0
"""How long a trial's end waits for Tune to take what was reported."""
LOOK_S, SETTLE_S = 0.05, 0.5


def on_elastic(begin: Callable[[], None], count: Callable[[], None]) -> None:
    """From now on functions that Tune is given run so.

    begin: by name, of a module; called in each trial's process. count: called here for each.
    """
    functions: Any = trainable
    rays_own = functions.wrap_function

    def wrap_function(function: Callable[..., Any], name: str | None = None) -> type:
        count()

        class OnElastic(rays_own(until_taken(function), name)):
            def setup(self, config: dict[str, Any]) -> None:
                begin()
                super().setup(config)

        return OnElastic

    functions.wrap_function = wrap_function


def until_taken(function: Callable[..., Any]) -> Callable[..., Any]:
    """It returns once Tune has taken all that callbacks have reported from the trial's process: if
    the function ends before, Ray's own last result and theirs wait for one place, for ever."""

    @functools.wraps(function)
    def whole(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        reported: Any = getattr(get_session(), "_inter_actor_queue", None)
        deadline = time.monotonic() + TAKEN_S
        while reported is not None and not reported.empty() and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        if reported is not None:  # the last one is on its way from one queue to the other
            time.sleep(SETTLE_S)
        return result

    return whole
