"""Nodes that come and go under a model in stages: two, four, three, five; the layers are cut anew
each time, and the bits are those of one undisturbed worker that computes whole micro-batches."""

import pytest

from tests.cluster.live import JOBS, LiveRun, assert_same_bits
from tests.cluster.test_drain import drain, end_node
from tests.cluster.test_sharded_nodes import spoil
from tests.cluster.test_stages import planned

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, DRAIN_S = 150, 20
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.mark.parametrize("parallel", ["pp:2", "pp:2,fsdp-grad-op"])
def test_nodes_grow_and_drain_without_a_trace(nodes, tmp_path, ray_temp, reference, parallel):
    expected = reference(STEPS, job="staged", target="Layers")
    for _ in range(2):
        nodes.add_node(**NODE)
    options = {"steps": STEPS, "parallel": parallel, "workers": "2..5", "set": ["sleep=0.05"]}
    options |= {"address": nodes.address, "max_failures": 0, "detect_s": 10.0}
    with LiveRun(f"{JOBS / 'staged.py'}:Layers", tmp_path, "run", ray_temp, **options) as run:

        def wait_for_world(world_size: int) -> dict:
            return run.wait_for_step(
                lambda s: s["world_size"] == world_size and s["phase"] == "running"
            )

        wait_for_world(2)
        for _ in range(2):
            nodes.add_node(**NODE)
        leaver = wait_for_world(4)["workers"][1]
        asking = drain(nodes, run.env, leaver["node_id"], DRAIN_S)
        said = asking.communicate(timeout=60)
        assert asking.returncode == 0, said
        run.wait_for(lambda s: leaver["id"] not in [w["id"] for w in s["workers"]])
        end_node(nodes, leaver["node_id"])
        wait_for_world(3)
        for _ in range(2):
            nodes.add_node(**NODE)
        wait_for_world(5)
        end = run.finish()
    assert_same_bits(run, end, expected, STEPS)
    assert (end["result"]["lost_steps"], end["result"]["recoveries"]) == (0, [])
    for layout in ("1 pipeline of 2 stages", "2 pipelines of 2 stages", "1 pipeline of 3 stages"):
        assert any(each.startswith(layout) for each in planned(run)), planned(run)


def test_a_lost_node_takes_a_pipeline_and_no_step_though_no_holder_has_its_blocks(
    nodes, tmp_path, ray_temp, reference
):
    """They live on the other node. No checkpoint can be read, so nobody does."""
    expected = reference(STEPS, job="staged", target="Layers")
    _, second = [nodes.add_node(**{**NODE, "num_cpus": 2}) for _ in range(2)]
    options = {"steps": STEPS, "parallel": "pp:2", "workers": "2..4", "set": ["sleep=0.05"]}
    options |= {"address": nodes.address, "detect_s": 10.0, "checkpoint_every": 3}
    with LiveRun(f"{JOBS / 'staged.py'}:Layers", tmp_path, "run", ray_temp, **options) as run:
        full = run.wait_for_step(lambda s: s["world_size"] == 4 and s["step"] > 9)
        places = {(w["node_id"], w["mesh"]["dp"]) for w in full["workers"]}
        assert len(places) == 2, "a pipeline is on one node"
        assert spoil(run.directory / "checkpoints")
        nodes.remove_node(second, allow_graceful=False)
        run.wait_for(lambda s: s["world_size"] == 2 and s["phase"] == "running")
        end = run.finish()
    assert_same_bits(run, end, expected, STEPS)
    assert end["result"]["lost_steps"] == 0
    assert any(each.startswith("2 pipelines of 2 stages") for each in planned(run)), planned(run)
