# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A run seen from a process that is not its driver: find its controller, ask it to end the run.

What the controller does then is elastic/controller/supervisor.py's.
"""

from typing import Any

import ray
from ray.exceptions import RayError

from elastic.on_ray.driver.remote_faults import join
from elastic.on_ray.naming import NAMESPACE
from elastic.protocol.errors import ControllerLost, WrongInput

ANSWER_S = 30.0
"""How long a controller may be away: Ray may be starting its successor."""


def ask_to_end(run_id: str, address: str | None, *, is_now: bool) -> None:
    """After its step, or at once. WrongInput if the run is not in that cluster, ControllerLost if
    its controller does not answer."""
    join(address)
    try:
        controller: Any = ray.get_actor(f"{run_id}-controller", namespace=NAMESPACE)
    except ValueError as error:
        where = ray.get_runtime_context().gcs_address
        raise WrongInput(
            f"no run {run_id} is alive in the Ray cluster at {where}: give the run's --address; a "
            "run with embedded Ray is stopped by Ctrl-C or SIGTERM at its driver"
        ) from error
    asked = controller.end_now if is_now else controller.stop
    try:
        ray.get(asked.remote("elastic stop"), timeout=ANSWER_S)
    except RayError as error:
        raise ControllerLost(f"the controller of run {run_id} does not answer: {error}") from error
