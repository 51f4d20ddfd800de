"""All ranks abort one and three communicators with kernels queued, at once and in turn."""

import argparse
import sys
import time
from functools import partial

import torch

from tests.gpu.experiment import Table, main
from tests.gpu.groups import Member, leave, on_gpus, spin

KERNEL_S, LIMIT_S, STAGGER_S = 0.001, 1.0, 0.5
CASES = [(n, q, s) for n in (1, 3) for q in (0, 100, 1000) for s in (False, True)]


def abort(member: Member, *, world_size: int) -> list[float]:
    """Seconds of each case."""
    everybody, seconds = list(range(world_size)), list[float]()
    for number, (num_groups, num_queued, is_staggered) in enumerate(CASES):
        groups = [
            member.form(f"{number}/{i}", everybody, member.data_only) for i in range(num_groups)
        ]
        value = torch.ones(1 << 20, device=member.device)
        for group in groups:
            group.all_reduce(value).wait()
        for _ in range(num_queued):
            spin(member.device, KERNEL_S)
        for group in groups:
            group.all_reduce(value)
        if is_staggered:
            time.sleep(STAGGER_S * member.index / world_size)
        began = time.monotonic()
        for group in groups:
            group.abandon()
        for group in groups:
            leave(group)
        seconds.append(time.monotonic() - began)
        member.ranks.say(f"aborted/{number}/{member.index}")
        for rank in everybody:  # without a collective
            member.ranks.hear(f"aborted/{number}/{rank}")
    return seconds


def body(table: Table, arguments: argparse.Namespace) -> None:
    world = arguments.workers
    found = on_gpus(world, partial(abort, world_size=world), is_shared=False)
    for i, (num_groups, num_queued, is_staggered) in enumerate(CASES):
        name = f"{num_groups} communicators, {num_queued} kernels"
        name += ", staggered" if is_staggered else ""
        limit = LIMIT_S + num_queued * KERNEL_S + STAGGER_S * is_staggered
        table.at_most(name, max(of_rank[i] for of_rank in found), limit, "s")
    table.holds("no illegal access: all ranks came to the end", len(found) == world)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=8)


if __name__ == "__main__":
    sys.exit(main(body, num_gpus=8, options=options))
