# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A run seen from a process that is not its driver: find its controller, ask it to end the run, or
to have another number of workers.

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
    controller = controller_of(run_id, address)
    asked = controller.end_now if is_now else controller.stop
    answer_of(run_id, asked.remote("elastic stop"))


def ask_to_resize(run_id: str, address: str | None, workers: tuple[int, int]) -> tuple[int, int]:
    """From min to max; what is in force then. WrongInput with its reason if it cannot, else as
    `ask_to_end`."""
    controller = controller_of(run_id, address)
    answer = answer_of(run_id, controller.scale.remote(workers))
    if isinstance(answer, str):
        raise WrongInput(f"the run stays as it is: {answer}")
    return answer


def controller_of(run_id: str, address: str | None) -> Any:
    join(address)
    try:
        return ray.get_actor(f"{run_id}-controller", namespace=NAMESPACE)
    except ValueError as error:
        where = ray.get_runtime_context().gcs_address
        raise WrongInput(
            f"no run {run_id} is alive in the Ray cluster at {where}: give the run's --address; a "
            "run with embedded Ray is stopped by Ctrl-C or SIGTERM at its driver"
        ) from error


def answer_of(run_id: str, asked: Any) -> Any:
    try:
        return ray.get(asked, timeout=ANSWER_S)
    except RayError as error:
        raise ControllerLost(f"the controller of run {run_id} does not answer: {error}") from error
