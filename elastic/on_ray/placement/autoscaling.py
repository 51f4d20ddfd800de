# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What the cluster can still have: whether machines come by themselves, and whether with GPUs.

Ray tells node types to nobody. Its autoscaler (version 2) says which demand none of them can ever
fill, and (version 1) under which names it knows the nodes. All of it is private API of Ray; where
it does not answer, nothing is certain. What there is now is machines.py's.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.core.generated import autoscaler_pb2  # pyright: ignore[reportMissingTypeStubs]
from ray.experimental import internal_kv

from elastic.protocol.errors import WrongInput
from elastic.protocol.placing import Machine, Need
from elastic.store.files import first_line

log = logging.getLogger(__name__)

REPORT = "__autoscaling_status"
"""What version 1 says about itself, in Ray's key-value store."""
BY_HAND = "node_"
"""Begins its name of a node that it did not make."""
JUDGED_S = 20.0
"""How long version 2 may take to look at a demand; it looks every 5 s."""
LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Demand:
    """A place that somebody wants."""

    amounts: Mapping[str, float]
    labels: frozenset[str] = frozenset()
    """Those that it asks for, whatever their values."""

    def is_of(self, need: Need) -> bool:
        asked = frozenset(need.labels[0]) if need.labels else frozenset[str]()
        wanted = need.amounts.items()
        return asked == self.labels and all(self.amounts.get(k, 0) == n for k, n in wanted)


def is_by_hand(machines: Sequence[Machine], report: bytes | None) -> bool:
    """Whether it is certain that all machines were started by hand, and nothing adds any.

    report: version 1's, None if there is none.
    """
    if report is None or any(machine.group for machine in machines):
        return False
    try:
        nodes: dict[str, int] = json.loads(report)["autoscaler_report"]["active_nodes"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(nodes) and all(name.startswith(BY_HAND) for name in nodes)


def is_open(machines: Sequence[Machine], report: bytes | None) -> bool:
    """Whether version 1 is there, which may add nodes and says nowhere of which kinds."""
    return report is not None and not is_by_hand(machines, report)


def unfillable(need: Need, machines: Sequence[Machine], report: bytes | None) -> str:
    """Why no machine takes a worker, if none is large enough and nothing adds any; else empty. A
    cluster without a single machine of the kind is not complete yet."""
    kind = list(need.amounts)[-1]
    of_kind = [m for m in machines if m.resources.get(kind, 0) > 0 and need.is_on(m)]
    if not of_kind or any(need.fits(m) for m in of_kind) or not is_by_hand(machines, report):
        return ""
    largest = max(of_kind, key=lambda m: m.resources.get("CPU", 0))
    has = " and ".join(f"{largest.resources.get(k, 0):g} {k}s" for k in need.amounts)
    return (
        f"a worker needs {need}, and none of the cluster's {len(machines)} nodes is that large: "
        f"the largest has {has}, and nothing adds nodes"
    )


def refuse_unfillable(need: Need, machines: Sequence[Machine], report: bytes | None) -> None:
    """WrongInput if the run would wait for ever."""
    if why := unfillable(need, machines, report):
        raise WrongInput(f"{why}; lower --cpus-per-worker, or start a larger node")


def report() -> bytes | None:
    """None as well where the head does not answer: then nothing is certain."""
    try:
        return cast(Any, internal_kv)._internal_kv_get(REPORT)
    except Exception as error:  # of a private API
        log.warning('nodes=unknown reason="%s: %s"', type(error).__name__, first_line(error))
        return None


def nothing() -> None:
    """A task that only asks for a place."""


def can_add_gpus() -> bool | None:
    """Whether the autoscaler has a node type with GPUs, by what becomes of a demand for one; None
    if it does not say. Version 1 never does, and is not waited for."""
    if report() is not None:
        return None
    demand = cast(Any, ray.remote(nothing)).options(num_cpus=0, num_gpus=1, max_retries=0).remote()
    seen_in, deadline = None, time.monotonic() + JUDGED_S
    try:
        gcs = cast(Any, internal_kv).internal_kv_get_gcs_client()
        while time.monotonic() < deadline:
            status = status_from(gcs)
            if seen_in is None:
                seen_in = version_with_gpu_demand(status)
            if seen_in is not None and (is_judged := judgement(status, seen_in)) is not None:
                return is_judged
            time.sleep(LOOK_EVERY_S)
    except Exception as error:  # of a private API: whatever it is, nothing is known
        log.warning('gpus=unknown reason="%s: %s"', type(error).__name__, first_line(error))
    finally:
        ray.cancel(demand)
    return None


def status_from(gcs: Any) -> Any:
    """What the head's table (a GcsClient) has of the cluster and of its autoscaler."""
    status = cast(Any, autoscaler_pb2).GetClusterStatusReply()
    status.ParseFromString(gcs.get_cluster_status())
    return status


def infeasible() -> tuple[Demand, ...]:
    """The demands of which version 2 says that it never adds a node for them; of a cluster whose
    nodes are started by hand, all that none of them can hold."""
    try:
        status = status_from(cast(Any, internal_kv).internal_kv_get_gcs_client())
    except Exception as error:  # of a private API: whatever it is, nothing is known
        log.warning('demand=unknown reason="%s: %s"', type(error).__name__, first_line(error))
        return ()
    requests = status.autoscaling_state.infeasible_resource_requests
    return tuple(
        Demand(dict(request.resources_bundle), first_labels(request)) for request in requests
    )


def first_labels(request: Any) -> frozenset[str]:
    """Of its first choice; the others are what else would do."""
    first = request.label_selectors[:1]
    return frozenset(c.label_key for selector in first for c in selector.label_constraints)


def version_with_gpu_demand(status: Any) -> int | None:
    """Of the cluster's state, if a demand for GPUs is in it."""
    state = status.cluster_resource_state
    pending = (r.request.resources_bundle for r in state.pending_resource_requests)
    has_demand = any(bundle.get("GPU", 0) for bundle in pending)
    return state.cluster_resource_state_version if has_demand else None


def judgement(status: Any, version: int) -> bool | None:
    """Whether some node type can fill a demand for GPUs that is in this version of the cluster's
    state; None if the autoscaler has not seen that version."""
    state = status.autoscaling_state
    if state.last_seen_cluster_resource_state_version < version:
        return None
    return not any(r.resources_bundle.get("GPU", 0) for r in state.infeasible_resource_requests)
