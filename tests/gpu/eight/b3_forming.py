"""How long a group takes to form at each world size, the first time and later, and its first
collectives."""

import argparse
import sys
import time
from functools import partial

import torch

from tests.gpu.experiment import Table, main
from tests.gpu.groups import Member, leave, on_gpus, synchronize

WARM_S = 1.0


def timed(member: Member, *, world_size: int) -> dict[int, tuple[float, float, float, float]]:
    """By world size: seconds of the first group, of the third one, and of the first all-reduce and
    all-to-all behind that."""
    found = {}
    for size in range(2, world_size + 1):
        if member.index >= size:
            continue
        seconds, first = list[float](), [0.0, 0.0]
        for number in range(3):
            began = time.monotonic()
            group = member.form(f"{size}/{number}", list(range(size)))
            seconds.append(time.monotonic() - began)
            value = torch.ones(size << 10, device=member.device)
            received = torch.empty_like(value)
            began = time.monotonic()
            group.all_reduce(value).wait()
            synchronize(member.device)
            reduced = time.monotonic()
            group.all_to_all_flat(received, value).wait()
            synchronize(member.device)
            first = [reduced - began, time.monotonic() - reduced]
            leave(group)
        found[size] = seconds[0], seconds[2], first[0], first[1]
    return found


def body(table: Table, arguments: argparse.Namespace) -> None:
    world = arguments.workers
    found = on_gpus(world, partial(timed, world_size=world), is_shared=False)
    for size in range(2, world + 1):
        of_size = [of_rank[size] for of_rank in found if size in of_rank]
        first, later, reduced, exchanged = (max(column) for column in zip(*of_size, strict=True))
        table.tell(f"W = {size}: first group", f"{first:.2f} s")
        table.tell(f"W = {size}: first all-reduce, all-to-all", f"{reduced:.3f}, {exchanged:.3f} s")
        if size == world:
            table.at_most(f"W = {size}: a group formed again", later, WARM_S, "s")
        else:
            table.tell(f"W = {size}: a group formed again", f"{later:.2f} s")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=8)


if __name__ == "__main__":
    sys.exit(main(body, num_gpus=8, options=options))
