"""What the bitwise reduction sends, an all-to-all and an all-gather, against NCCL's all-reduce; and
the device memory of the reducer."""

import argparse
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gpu.experiment import Table, main, median
from tests.gpu.groups import HAS_GPU, Member, on_gpus, synchronize

SIZES = [1 << n for n in (20, 24, 26, 28, 30, 31)]
"""Bytes."""
FROM, MIN_PART, ROUNDS, MAX_GRADIENTS = 1 << 26, 0.7, 10, 3.5


def bandwidths(member: Member, *, world_size: int, largest: int) -> dict[int, tuple[float, float]]:
    """Bytes -> seconds of the tree's exchanges, and of an all-reduce."""
    group, found = member.form(1, list(range(world_size))), {}
    for size in (s for s in SIZES if s <= largest):
        value = torch.ones(size // 4 // world_size * world_size, device=member.device)
        part, received = torch.empty_like(value), torch.empty_like(value)

        def tree(v=value, p=part, r=received) -> None:
            group.all_to_all_flat(p, v).wait()
            group.all_gather_flat(r, p[: p.numel() // world_size]).wait()

        def plain(v=value) -> None:
            group.all_reduce(v).wait()

        found[size] = seconds(tree, member), seconds(plain, member)
    return found


def seconds(operation: Any, member: Member) -> float:
    times = []
    for _ in range(ROUNDS):
        synchronize(member.device)
        began = time.monotonic()
        operation()
        synchronize(member.device)
        times.append(time.monotonic() - began)
    return median(times[2:])


def peak(member: Member, *, world_size: int, width: int) -> float:
    """Of a step of ddp with the bitwise reducer: device bytes beside the model, in gradients."""
    from tests.workers import sharded_rig as rig
    from tests.workers import where

    class Work(rig.Dense):
        def build_model(self) -> nn.Module:
            return rig.Microbatched(*(nn.Linear(width, width, bias=False) for _ in range(8)))

        def build_optimizer(self, params):
            return torch.optim.SGD(params, lr=0.1)

        def batch(self, step, microbatch_id):
            return torch.ones(1, width)

    where.go_to("cuda" if HAS_GPU else "cpu")
    where.HERE = member.device
    group = member.form(2, list(range(world_size)))
    strategy = rig.build("ddp", "bitwise", Work(), clip_norm=None, device=member.device)
    rig.train(strategy, group, "ddp", 1, work=Work(), device=member.device)
    if not HAS_GPU:
        return 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rig.train(strategy, group, "ddp", 1, work=Work(), device=member.device)
    return (torch.cuda.max_memory_allocated() - before) / (8 * 4 * width * width)


def body(table: Table, arguments: argparse.Namespace) -> None:
    world = arguments.workers
    measure = partial(bandwidths, world_size=world, largest=arguments.largest)
    for size, (tree_s, plain_s) in on_gpus(world, measure, is_shared=False)[0].items():
        name = f"{size >> 20} MiB: of the all-reduce's bandwidth"
        if size >= FROM:
            table.at_least(name, plain_s / tree_s, MIN_PART)
        else:
            table.tell(name, f"{plain_s / tree_s:.2f}")
    found = on_gpus(world, partial(peak, world_size=world, width=arguments.width), is_shared=False)
    table.at_most("device memory of a bitwise step", max(found), MAX_GRADIENTS, "gradients")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    parser.add_argument("--width", type=int, default=8192)


if __name__ == "__main__":
    sys.exit(main(body, num_gpus=8, options=options))
