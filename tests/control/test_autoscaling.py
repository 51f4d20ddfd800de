"""What Ray's autoscalers say about what the cluster can still have; without Ray's processes."""

import json
from typing import Any, cast

import pytest
from ray.core.generated import autoscaler_pb2  # pyright: ignore[reportMissingTypeStubs]

from elastic.on_ray.autoscaling import (
    is_by_hand,
    judgement,
    refuse_unfillable,
    version_with_gpu_demand,
)
from elastic.on_ray.machines import Machine, Need
from elastic.protocol.errors import WrongInput

HEAD, SMALL = Machine("h", "10.0.0.1", {}), Machine("n", "10.0.0.2", {"CPU": 4.0})
GPU_NODE = Machine("g", "10.0.0.3", {"CPU": 2.0, "GPU": 1.0})


def report(*names: str) -> bytes:
    return json.dumps({"autoscaler_report": {"active_nodes": dict.fromkeys(names, 1)}}).encode()


BY_HAND = report("node_0123", "node_4567")


@pytest.mark.parametrize(
    ("machines", "said", "is_certain"),
    [
        ([HEAD, SMALL], BY_HAND, True),
        ([HEAD, SMALL], report("node_0123", "spot_gpu"), False),
        ([HEAD, Machine("n", "", {}, "spot-gpu")], BY_HAND, False),
        ([HEAD], report(), False),
        ([HEAD], None, False),
        ([HEAD], b"{}", False),
        ([HEAD], b"torn", False),
    ],
)
def test_only_what_ray_says_makes_it_certain_that_nothing_adds_machines(machines, said, is_certain):
    assert is_by_hand(machines, said) is is_certain


@pytest.mark.parametrize(
    ("need", "machines", "says"),
    [
        (Need(64, 0), [HEAD, SMALL], "a worker needs 64 CPUs, .* 2 nodes .* largest has 4 CPUs,"),
        (Need(4, 1), [SMALL, GPU_NODE], "4 CPUs and 1 GPU, .* largest has 2 CPUs and 1 GPUs,"),
    ],
)
def test_a_need_that_no_machine_can_ever_fill_is_refused_with_the_largest(need, machines, says):
    with pytest.raises(WrongInput, match=says):
        refuse_unfillable(need, machines, BY_HAND)
    refuse_unfillable(need, machines, None)  # something may add a larger one
    refuse_unfillable(Need(1, need.gpus), machines, BY_HAND)


@pytest.mark.parametrize(("need", "machines"), [(Need(1, 1), [SMALL]), (Need(1, 0), [HEAD])])
def test_a_cluster_without_any_machine_of_the_kind_is_waited_for(need, machines):
    refuse_unfillable(need, machines, BY_HAND)


def status(seen: int, *, demand: tuple[str, ...] = (), infeasible: tuple[str, ...] = ()) -> Any:
    reply = cast(Any, autoscaler_pb2).GetClusterStatusReply()
    reply.cluster_resource_state.cluster_resource_state_version = 7
    for kind in demand:
        request = reply.cluster_resource_state.pending_resource_requests.add()
        request.request.resources_bundle[kind] = 1
    reply.autoscaling_state.last_seen_cluster_resource_state_version = seen
    for kind in infeasible:
        request = reply.autoscaling_state.infeasible_resource_requests.add()
        request.resources_bundle[kind] = 1
    return reply


def test_a_demand_is_judged_once_the_autoscaler_has_seen_it():
    assert version_with_gpu_demand(status(0, demand=("CPU",))) is None
    assert version_with_gpu_demand(status(0, demand=("CPU", "GPU"))) == 7
    assert judgement(status(6), 7) is None
    assert judgement(status(7, infeasible=("CPU",)), 7) is True
    assert judgement(status(8, infeasible=("CPU", "GPU")), 7) is False
