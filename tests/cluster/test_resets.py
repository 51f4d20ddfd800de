"""Every connection is reset at once under a run: the links, the holders', the members', Ray's."""

import os

import pytest

from tests.cluster.live import assert_same_bits
from tests.cluster.resets import descendants, reset_connections

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 30


def test_connections_that_are_all_reset_at_once_cost_no_worker_and_no_step(nodes, start, reference):
    for _ in range(2):
        nodes.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    options = {"workers": 2, "steps": STEPS, "parallel": "fsdp", "set": ["sleep=0.02"]}
    with start("Toy", address=nodes.address, **options) as run:
        status = run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 5)
        pids = [w["pid"] for w in status["workers"]]
        assert reset_connections(descendants(os.getpid())) > 10
        again = run.wait_for_step(
            lambda s: s["generation"] > status["generation"] and s["world_size"] == 2
        )
        assert [w["pid"] for w in again["workers"]] == pids
        end = run.finish()
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0
    assert end["result"]["recoveries"] == []
