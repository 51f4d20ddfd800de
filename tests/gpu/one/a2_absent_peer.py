"""A group of two whose second rank never comes is given up, 20 times; then a good one forms."""

import argparse
import sys
import time
from contextlib import suppress

import torch

from elastic.protocol.errors import PeerLost
from tests.gpu.experiment import Table, main, num_threads, wait_for_threads
from tests.gpu.groups import HOST, Meeting, data_only, device_of, leave
from workers.distributed.backends import connect_for
from workers.distributed.process_group import Connect

ROUNDS, WAITED_S = 20, 2.0


def give_up(meeting: Meeting, connect: Connect) -> float:
    """Seconds until the thread that forms has come back."""
    formation = meeting.form(connect, rank=0, world_size=2)
    time.sleep(WAITED_S)
    formation.abandon()
    with suppress(PeerLost):
        formation.wait(60)
        raise AssertionError("a group has formed without its second rank")
    return wait_for_threads("form")


def good(meeting: Meeting, device: torch.device) -> bool:
    """Whether a group forms and works. The next store ends the threads of the one before."""
    group = meeting.form(data_only(device)).wait(60)
    value = torch.full((8,), 3.0, device=device)
    group.all_reduce(value).wait()
    found = value.tolist()
    leave(group)
    return found == [3.0] * 8


def body(table: Table, arguments: argparse.Namespace) -> None:
    device, meeting = device_of(), Meeting()
    good(meeting, device)
    before = num_threads()
    both = connect_for(device, HOST)
    back = [give_up(meeting, both) for _ in range(arguments.rounds)]
    table.at_most("slowest return of the forming thread", max(back), 1.0, "s")
    table.holds("a good group works afterwards", good(meeting, device))
    table.at_most("threads left behind", num_threads() - before, 0)
    # The other one is gone once the control group has formed: NCCL itself waits for it.
    table.at_most("return, if NCCL waits", give_up(meeting, data_only(device)), 1.0, "s")
    table.holds("a good group works meanwhile", good(meeting, device))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)


if __name__ == "__main__":
    sys.exit(main(body, options=options))
