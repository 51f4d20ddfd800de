"""The peer of `fsdp.py`: a plain FSDP2 loop, as its users write it, under torchrun.

The same model, blocks, micro-batches, accumulation, one loader process and clipping.
    torchrun --nproc-per-node 2 -m tests.bench.torchrun_fsdp --steps 12
Rank 0 prints one JSON line: the median milliseconds per step after the warm-up.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.bench.torchrun_ddp import batches_of_rank
from workers.workloads.charlm import CharLM

WARMUP_STEPS = 3
MODEL = {"width": 512, "layers": 6, "heads": 8}
"""About 19 million parameters."""


def step_seconds(arguments: argparse.Namespace) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    workload = CharLM(**MODEL)
    torch.manual_seed(0)
    model, mesh = workload.build_model(), init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = workload.build_optimizer([p for p in model.parameters() if p.requires_grad])
    scheduler = workload.build_scheduler(optimizer)
    dataset = workload.dataset()
    ids = arguments.global_batch // arguments.micro_batch
    per_rank = ids // world
    plan = batches_of_rank(
        len(dataset),
        steps=arguments.steps,
        ids=ids,
        micro_batch=arguments.micro_batch,
        rank=rank,
        world=world,
    )
    batches = iter(DataLoader(dataset, batch_sampler=list(plan), num_workers=1))
    seconds = []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        total = torch.zeros(())
        for _ in range(per_rank):
            loss = workload.loss(model, next(batches)) / per_rank
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), arguments.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        total.item()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARMUP_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds = step_seconds(arguments)
    if dist.get_rank() == 0:
        print(json.dumps({"ms_per_step": 1000 * statistics.median(seconds)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
