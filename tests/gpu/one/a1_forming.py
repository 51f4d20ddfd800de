"""Groups of one rank over NCCL are formed, used, aborted and freed 200 times: what stays behind?"""

import argparse
import sys
import time

import torch

from tests.gpu.experiment import Table, main, median, num_threads, thread_names
from tests.gpu.groups import HAS_GPU, Meeting, data_only, device_of, synchronize, wait_for_abort
from workers.distributed.process_group import Group, leave

ROUNDS, WARM, CROWD = 200, 5, 40
"""Of WARM each abort is waited for. From then on aborts go on while the next ones form; what CUDA
keeps of so many at once it has taken after CROWD."""
OF_TORCH = ("pt_nccl_watchdg", "pt_nccl_heartbt")


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if HAS_GPU else 0


def once(meeting: Meeting, device: torch.device) -> tuple[float, Group]:
    """Seconds until the group has formed, and the group, which has been used and left. Its abort
    may be under way."""
    began = time.monotonic()
    group = meeting.form(data_only(device)).wait(60)
    formed_s = time.monotonic() - began
    value = torch.ones(1 << 16, device=device)
    for _ in range(5):
        group.all_reduce(value).wait()
    synchronize(device)
    leave(group)
    return formed_s, group


def settled(left: list[Group]) -> int:
    """Free bytes once all are gone."""
    for group in left:
        wait_for_abort(group)
    left.clear()
    return free_bytes()


def body(table: Table, arguments: argparse.Namespace) -> None:
    device, meeting = device_of(), Meeting()
    forming, aborting, left = list[float](), list[float](), list[Group]()
    names, threads, free, crowded = list[str](), 0, 0, 0
    for number in range(arguments.rounds):
        formed_s, group = once(meeting, device)
        forming.append(formed_s)
        left.append(group)
        names += [n for n in thread_names() if n.startswith(OF_TORCH)]
        if number < WARM:  # else the next one forms meanwhile
            aborting.append(wait_for_abort(group))
        if number == WARM - 1:
            threads, free = num_threads(), free_bytes()
        if number == WARM + CROWD - 1:
            crowded = settled(left)
    kept = settled(left)
    table.at_most("threads more than after round 5", num_threads() - threads, 0)
    table.at_most("device memory less than after round 45", (crowded - kept) / 2**20, 16, "MiB")
    table.tell("device memory that aborts under way have cost once", f"{free - crowded >> 20} MiB")
    table.at_most("threads of torch's watchdog and monitor", len(names), 0)
    table.at_most(
        "slowest forming behind the fifth, aborts under way", max(forming[WARM:]), 0.5, "s"
    )
    table.tell("first forming", f"{forming[0]:.2f} s")
    table.tell("an abort takes", f"{median(aborting):.2f} s")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)


if __name__ == "__main__":
    sys.exit(main(body, options=options))
