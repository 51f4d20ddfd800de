"""Hosts with two interfaces, docker0 first: NCCL takes the one that has the worker's address."""

import argparse
import os
import re
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main

USING = re.compile(r"NCCL INFO NET/\w+ : Using \[\d+\](\w+)")


def interfaces(text: str) -> set[str]:
    """That NCCL says it uses, in a worker's log."""
    return set(USING.findall(text))


def body(table: Table, arguments: argparse.Namespace) -> None:
    with runs.place(arguments) as at:
        run = at.run("which", steps=30)
        run.env |= {"NCCL_DEBUG": "INFO"}
        os.environ.pop("NCCL_SOCKET_IFNAME", None)
        with run:
            end = run.finish(runs.SLOW)
            logs = [log.read_text() for log in (run.directory / "logs").glob("*.log")]
    runs.judge_end(table, "run", end, "")
    found = set[str]().union(*map(interfaces, logs))
    told = " ".join(sorted(found))
    table.holds("only the wanted interface", found == {arguments.interface}, told)


def options(parser: argparse.ArgumentParser) -> None:
    runs.options(parser)
    parser.add_argument("--interface", required=True, help="that the hosts know each other by")


if __name__ == "__main__":
    sys.exit(main(body, options=options))
