"""Runs on a cluster that has no node until somebody asks: Ray's own autoscaler, on fake nodes."""

import time
from functools import partial

import pytest

from tests.cluster.fake_cloud import FakeCloud
from tests.cluster.live import JOBS, LiveRun, assert_gone, assert_same_bits

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 100
NOTICE_S = 30
NODES_GO_S = 60.0


@pytest.fixture
def cloud(request, fork_server):
    """`request.param`: whether its autoscaler is version 2."""
    found = FakeCloud(v2=request.param)
    yield found
    print(found.log())  # shown of a test that fails
    found.close()


@pytest.fixture
def start_there(cloud, tmp_path, ray_temp):
    """start_there(**options) -> LiveRun (a context manager) of Toy on the cloud."""
    target = f"{JOBS / 'toy.py'}:Toy"
    return partial(LiveRun, target, tmp_path, "run", ray_temp, address=cloud.address)


def versions(first: bool, second: bool) -> pytest.MarkDecorator:
    """first: tried by default; second: the other version, among the slow tests."""
    cases = [first, pytest.param(second, marks=pytest.mark.slow)]
    names = {True: "v2", False: "v1"}
    return pytest.mark.parametrize("cloud", cases, ids=names.get, indirect=True)


@versions(True, False)
def test_a_run_grows_with_the_cloud_and_loses_no_step_with_its_nodes(cloud, start_there, reference):
    began = time.monotonic()
    with start_there(workers="1..3", steps=STEPS, set=["sleep=0.2"]) as run:
        run.wait_for(lambda s: s["step"] > 0)
        first_step_s = time.monotonic() - began
        status = run.wait_for_step(lambda s: s["world_size"] == 3)
        all_three_s = time.monotonic() - began
        assert {w["node_id"] for w in status["workers"]} == set(cloud.nodes())

        lost = status["workers"][1]["node_id"]
        cloud.take(lost)
        run.wait_for_step(lambda s: s["world_size"] == 2)
        status = run.wait_for_step(lambda s: s["world_size"] == 3)

        leaves = status["workers"][0]["node_id"]
        cloud.give_notice(leaves, NOTICE_S)
        run.wait_for(lambda s: leaves not in {w["node_id"] for w in s["workers"]})
        cloud.take(leaves)
        status = run.wait_for_step(lambda s: s["world_size"] == 3)
        assert {lost, leaves}.isdisjoint(w["node_id"] for w in status["workers"])
        end = run.finish()
        nodes_go_s = cloud.wait_until_empty(NODES_GO_S)
        pids = run.seen_pids
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    result = end["result"]
    assert (result["lost_steps"], len(result["recoveries"])) == (0, 1)
    assert_gone(pids)
    print(
        f"submit to first step, 0 -> 3 nodes: {first_step_s:.1f} s, to three workers "
        f"{all_three_s:.1f} s; without notice: recovered in "
        f"{result['recoveries'][0]['total_s']:.3f} s; nodes gone {nodes_go_s:.1f} s after the end"
    )


@versions(True, False)
def test_a_wish_that_no_node_type_can_fill_is_told_with_what_there_is(cloud, start_there):
    began = time.monotonic()
    with start_there(workers=2, cpus_per_worker=64) as run:
        wish = "waiting for a place for 2 workers of 64 CPUs; the cluster has 1 node with 0 CPUs"
        run.wait_for(lambda s: wish in s.get("reason", ""))
        told_s = time.monotonic() - began
        why = (
            "Ray's autoscaler has no kind of node for that"
            if cloud.is_v2
            else "whether Ray's autoscaler (version 1) has a kind for it, it does not tell"
        )
        run.wait_for(lambda s: why in s["reason"])
        told_why_s = time.monotonic() - began
    print(f"told in {told_s:.1f} s, and that no node comes in {told_why_s:.1f} s")
    assert cloud.nodes() == {}
