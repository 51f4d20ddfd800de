"""A group is aborted while kernels are queued and the host reads: how long does that take?"""

import argparse
import sys
import threading
import time

import torch

from tests.gpu.experiment import Table, main
from tests.gpu.groups import Meeting, data_only, device_of, leave, spin

KERNEL_S, SETTLE_S = 0.001, 120.0


def once(meeting: Meeting, device: torch.device, num_queued: int) -> tuple[float, bool]:
    """Seconds of the abort, and whether the host's read came back."""
    group = meeting.form(data_only(device)).wait(60)
    value = torch.ones(1 << 20, device=device)
    group.all_reduce(value).wait()
    value.sum().item()
    for _ in range(num_queued):
        spin(device, KERNEL_S)
    group.all_reduce(value).wait()
    reading = threading.Thread(target=value.tolist, daemon=True)
    reading.start()
    began = time.monotonic()
    leave(group)
    took_s = time.monotonic() - began
    reading.join(10 + num_queued * KERNEL_S)
    return took_s, not reading.is_alive()


def body(table: Table, arguments: argparse.Namespace) -> None:
    raised = list[str]()
    threading.excepthook = lambda args: raised.append(repr(args.exc_value))
    device, meeting = device_of(), Meeting()
    for num_queued in (0, 100, 1000):
        took_s, came_back = once(meeting, device, num_queued)
        table.at_most(f"abort with {num_queued} kernels queued", took_s,
                      1.0 + num_queued * KERNEL_S, "s")  # fmt: skip
        table.holds(f"the read returns ({num_queued})", came_back)
    time.sleep(arguments.settle)
    name = f"no exception elsewhere within {arguments.settle:g} s"
    table.holds(name, not raised, "; ".join(raised))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds")


if __name__ == "__main__":
    sys.exit(main(body, options=options))
