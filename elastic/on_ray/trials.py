# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Tune around `fit()`: it is made ours in the process of each trial, which is a run of its own.

What a trial's run is, and how Tune hears of it, is elastic/ray_train.py's.
"""

from collections.abc import Callable
from typing import Any

from ray.tune import trainable


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

        return OnElastic

    functions.wrap_function = wrap_function
