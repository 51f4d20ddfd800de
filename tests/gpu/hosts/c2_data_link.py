"""The data NIC or InfiniBand port of one host is down, the management network is up; for a moment
only where --mend begins with a sleep of 5 s."""

import argparse
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main
from tests.gpu.hosts.through import through


def body(table: Table, arguments: argparse.Namespace) -> None:
    through(table, arguments, limit_s=15.0, watched_s=60.0, parallel=arguments.parallel)


def options(parser: argparse.ArgumentParser) -> None:
    runs.two_hosts(parser)
    parser.add_argument("--parallel", default="ddp")


if __name__ == "__main__":
    sys.exit(main(body, options=options))
