# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Actors that only hold what a worker needs, so that a run has less of the cluster.

How many there are is elastic/chaos/capacity.py's.
"""

from typing import Any

import ray
from ray.actor import ActorHandle

from elastic.on_ray.placement.machines import machines
from elastic.protocol.errors import WrongInput
from elastic.protocol.placing import Machine, Need

MOST = 256
"""Each is a process."""


class Placeholder:
    """It does nothing."""


class Placeholders:
    """They end with this process, or when fewer are asked for. This process has joined the
    cluster."""

    def __init__(self, need: Need) -> None:
        """need: of one worker."""
        self._need = need
        self._actors: list[ActorHandle[Any]] = []

    def total(self) -> int:
        return sum(places_on(machine, self._need) for machine in machines())

    def hold(self, count: int) -> None:
        """WrongInput if they are too many."""
        if count > MOST:
            raise WrongInput(
                f"{count} slots would have to be held, and each takes a process: at most {MOST}; "
                "use a smaller cluster"
            )
        while len(self._actors) > count:
            ray.kill(self._actors.pop(), no_restart=True)
        make: Any = ray.remote(Placeholder)
        while len(self._actors) < count:
            options = {**self._need.options, "max_restarts": 0}
            self._actors.append(make.options(**options).remote())


def refuse_other_cluster(node_ids: set[str]) -> None:
    """WrongInput unless one of a run's nodes is in the cluster that was joined: slots are taken
    from nobody else."""
    if node_ids.isdisjoint(machine.node_id for machine in machines()):
        raise WrongInput("no worker of the run is on this Ray cluster: give its --address")


def places_on(machine: Machine, need: Need) -> int:
    """How many such workers fit on the machine while it is empty."""
    if not need.fits(machine):
        return 0
    wanted = need.amounts.items()
    return int(min(machine.resources[kind] / amount for kind, amount in wanted if amount))
