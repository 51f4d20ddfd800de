"""The peer of `throughput.py`: a plain torch DDP loop, as its users write it, under torchrun.

The same model, micro-batches, accumulation with `no_sync`, one loader process and clipping.
    torchrun --nproc-per-node 2 -m tests.bench.torchrun_ddp --steps 40
Rank 0 prints one JSON line: the median milliseconds per step after the warm-up.
"""

import argparse
import contextlib
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from elastic.driver.target import load_target
from tests.bench.harness import CHARLM

WARMUP_STEPS = 5


def batches_of_rank(size: int, *, steps: int, ids: int, micro_batch: int, rank: int, world: int):
    """Sample indices of each micro-batch of this rank, from one seeded permutation."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(steps):
        for micro in range(rank * ids // world, (rank + 1) * ids // world):
            begin = (step * ids + micro) * micro_batch
            yield [order[i % size] for i in range(begin, begin + micro_batch)]


def step_seconds(arguments: argparse.Namespace) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    workload = load_target(arguments.target, {}).workload
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.build_model())
    optimizer = workload.build_optimizer([p for p in model.parameters() if p.requires_grad])
    scheduler = workload.build_scheduler(optimizer)
    dataset = workload.dataset()
    ids = arguments.global_batch // arguments.micro_batch
    if ids % world:
        raise ValueError(f"{ids} micro-batches do not divide by {world} ranks")
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
        for micro in range(per_rank):
            is_last = micro == per_rank - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = workload.loss(model, next(batches)) / per_rank
                loss.backward()
                total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), arguments.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(total)  # the loss that is logged is the step's, as in our metrics
        total.item()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARMUP_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--target", default=CHARLM)
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
