"""A whole node lost under a sharded run: its rows come from the holders of other nodes."""

import contextlib

import pytest

from tests.cluster.live import JOBS, LiveRun, assert_same_bits, leftovers

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 60
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


def spoil(checkpoints) -> int:
    """Every file of every checkpoint so far; gives their number."""
    files = [path for path in checkpoints.rglob("*") if path.is_file()]
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # it has been pruned
            path.write_bytes(b"spoilt")
    return len(files)


@pytest.mark.parametrize("parallel", ["fsdp", "fsdp-grad-op", "hsdp:2"])
def test_a_lost_node_takes_two_ranks_and_a_holder_and_no_step(
    nodes, tmp_path, ray_temp, reference, parallel
):
    """No checkpoint can be read, so nobody does."""
    added = [nodes.add_node(**NODE) for _ in range(3)]
    options = {"steps": STEPS, "set": ["sleep=0.1"], "workers": "2..6", "parallel": parallel}
    options |= {"checkpoint_every": 3}
    target = f"{JOBS / 'toy.py'}:Toy"
    with LiveRun(target, tmp_path, "run", ray_temp, address=nodes.address, **options) as run:
        run.wait_for(lambda s: s["world_size"] == 6 and s["step"] > 9)
        assert spoil(run.directory / "checkpoints")
        nodes.remove_node(added[1], allow_graceful=False)
        run.wait_for(lambda s: s["world_size"] == 4 and s["phase"] == "running")
        end = run.finish()
        pids = run.seen_pids
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0
    assert leftovers(pids) == []
