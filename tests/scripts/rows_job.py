"""A script over Ray Data in DistributedDataParallel, without a checkpoint. It counts in its weights
how often each row was used.

python tests/scripts/rows_job.py STORAGE ROWS SLEEP_S
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray.data
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

RANKS, PASSES, BATCH = 3, 3, 8
TOLD = 2
"""Behind this step of each pass the ranks' processes are on record."""


class Uses(nn.Module):
    """A row's gradient is one part of the global batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(rows))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.uses[rows].sum() / len(rows) + self.bias

    @torch.no_grad()
    def count(self) -> None:
        assert self.uses.grad is not None
        self.uses += self.uses.grad > 0
        self.uses.grad = None


def learn(config: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    net = Uses(config["rows"])
    model: Any = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.SGD([net.bias], lr=0.1)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    for number in range(PASSES):
        batches = shard.iter_torch_batches(
            batch_size=BATCH, local_shuffle_buffer_size=20, local_shuffle_seed=5
        )
        for step, batch in enumerate(batches):
            model(batch["id"]).backward()
            net.count()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(config["sleep_s"])
            if step == TOLD:
                Path(config["place"], f"pids-{number}.json").write_text(json.dumps(pids))
        assert net.uses.eq(number + 1).all(), net.uses
    Path(config["place"], f"uses-{os.getpid()}.json").write_text(json.dumps(net.uses.tolist()))


def main() -> None:
    rows = int(sys.argv[2])
    TorchTrainer(
        learn,
        train_loop_config={"rows": rows, "sleep_s": float(sys.argv[3]), "place": sys.argv[1]},
        datasets={"train": ray.data.range(rows, override_num_blocks=5)},
        scaling_config=ScalingConfig(num_workers=RANKS),
        run_config=RunConfig(name="run", storage_path=sys.argv[1]),
    ).fit()


if __name__ == "__main__":
    main()
