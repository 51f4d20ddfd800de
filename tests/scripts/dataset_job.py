"""A script over Ray Data as people write them for Ray Train. It counts how often it has used each
row, and keeps where its pass is in its checkpoints.

python tests/scripts/dataset_job.py STORAGE ROWS SLEEP_S
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.data
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, DataConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

RANKS, PASSES, BATCH, EVERY = 3, 2, 8, 3
BUFFER, SEED = 20, 5


def learn(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    shard = ray.train.get_dataset_shard("train")
    counts, first, orders = torch.zeros(config["rows"], dtype=torch.int64), 0, []
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            kept = torch.load(Path(folder) / "state.pt")
        counts, first, orders = kept["counts"], kept["number"], kept["orders"]
        shard.load_state_dict(kept["shard"])
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())

    def report(number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            state = {"counts": counts, "number": number, "orders": orders}
            brought = None
            if rank == 0:
                torch.save({**state, "shard": shard.state_dict()}, Path(folder) / "state.pt")
                brought = Checkpoint.from_directory(folder)
            told = {"pass": number, "used": int(counts.sum()), "pids": pids}
            ray.train.report(told, checkpoint=brought)

    for number in range(first, PASSES):
        if len(orders) <= number:
            orders.append([])
        batches = shard.iter_torch_batches(
            batch_size=BATCH, local_shuffle_buffer_size=BUFFER, local_shuffle_seed=SEED
        )
        for step, batch in enumerate(batches):
            of_all: list[Any] = [None] * size
            dist.all_gather_object(of_all, batch["id"].tolist())
            used = [row for of_rank in of_all for row in of_rank]
            counts += torch.bincount(torch.tensor(used), minlength=config["rows"])
            orders[number] += used
            time.sleep(config["sleep_s"])
            if step % EVERY == EVERY - 1:
                report(number)
        assert counts.eq(number + 1).all(), counts
        validation = ray.train.get_dataset_shard("valid")
        seen = [row["id"] for row in validation.iter_rows()]
        assert seen == [2 * row for row in range(10)], "each rank has all of it"
        assert validation.materialize().count() == len(seen)
        assert validation.schema().names == ["id"]
    report(PASSES)


def doubled(rows: dict[str, Any]) -> dict[str, Any]:
    return {"id": rows["id"] * 2}


def main() -> None:
    rows = int(sys.argv[2])
    result = TorchTrainer(
        learn,
        train_loop_config={"rows": rows, "sleep_s": float(sys.argv[3])},
        datasets={
            "train": ray.data.range(rows, override_num_blocks=5),
            "valid": lambda: ray.data.range(10, override_num_blocks=1).map_batches(doubled),
        },
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=RANKS),
        run_config=RunConfig(name="run", storage_path=sys.argv[1]),
    ).fit()
    print("used", result.metrics["used"])


if __name__ == "__main__":
    main()
