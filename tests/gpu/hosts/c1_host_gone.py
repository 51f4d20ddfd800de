"""One of two hosts is gone at once (power off, or all links down)."""

import argparse
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main
from tests.gpu.hosts.through import through


def body(table: Table, arguments: argparse.Namespace) -> None:
    through(table, arguments, limit_s=10.0, watched_s=300.0, parallel=arguments.parallel)


def options(parser: argparse.ArgumentParser) -> None:
    runs.two_hosts(parser)
    parser.add_argument("--parallel", default="ddp")


if __name__ == "__main__":
    sys.exit(main(body, options=options))
