"""One hash for every history: weights after 100 steps for W = 1, 2, 3, 4 and for 2-4-1-3 workers.

The last history is made by real nodes (ray.cluster_utils): slots appear, and vanish with workers.
    python -m tests.bench.worlds
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.bench.harness import (
    Run,
    console,
    elastic_run,
    machine,
    record,
    report,
    storage_directory,
)

OPTIONS = {"global_batch": 64, "micro_batch": 8, "seed": 0, "reduction": "bitwise"}


def steady(storage: Path, world: int, steps: int) -> str:
    with elastic_run(storage, f"w{world}", workers=world, steps=steps, **OPTIONS) as run:
        return run.finish(900)["weights_sha256"]


def wait_for_world(run: Run, world: int) -> None:
    """Until `world` workers have committed a few steps together."""

    def is_settled(status: dict[str, Any]) -> bool:
        lines = run.metrics()[-3:]
        return status["world_size"] == world and [x["world_size"] for x in lines] == [world] * 3

    run.wait_until(is_settled, timeout_s=120)


def two_four_one_three(storage: Path, steps: int) -> tuple[str, list[int]]:
    """Nodes come and go under one run; gives the hash and the sizes that committed steps.

    The run begins with the one slot of the head node, so its sizes are 1-2-4-1-3.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    options = {"workers": "1..4", "steps": steps, "address": cluster.address, **OPTIONS}
    try:
        with elastic_run(storage, "restless", **options) as run:
            wait_for_world(run, 1)
            nodes = [cluster.add_node(num_cpus=1)]
            wait_for_world(run, 2)
            nodes.append(cluster.add_node(num_cpus=2))
            wait_for_world(run, 4)
            for node in nodes:
                cluster.remove_node(node, allow_graceful=False)
            wait_for_world(run, 1)
            cluster.add_node(num_cpus=2)
            wait_for_world(run, 3)
            sha = run.finish(900)["weights_sha256"]
            return sha, [size for size, _ in groupby(x["world_size"] for x in run.metrics())]
    finally:
        cluster.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    about = machine(4)
    console.print(about)
    with storage_directory() as storage:
        hashes = {f"W={w}": steady(storage, w, arguments.steps) for w in (1, 2, 3, 4)}
        sha, sizes = two_four_one_three(storage, arguments.steps)
    hashes["-".join(map(str, sizes))] = sha
    report("weights_sha256", ["history", "hash"], [[k, v] for k, v in hashes.items()])
    distinct = len(set(hashes.values()))
    results = {"histories": ", ".join(hashes), "distinct hashes": str(distinct), "hash": sha[:16]}
    record("worlds", about=about, setting=f"{arguments.steps} steps, bitwise", results=results)
    console.print("one hash" if distinct == 1 else "THE HASHES DIFFER")
    return 0 if distinct == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
