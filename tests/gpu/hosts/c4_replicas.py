"""hsdp with a shard per host: one rank is killed, or with --fault one host."""

import argparse
import sys

from tests.gpu import runs
from tests.gpu.experiment import Table, main
from tests.gpu.hosts.through import through


def body(table: Table, arguments: argparse.Namespace) -> None:
    parallel = f"hsdp:{arguments.workers // 2}"
    through(table, arguments, limit_s=arguments.limit, watched_s=30.0, parallel=parallel)


def options(parser: argparse.ArgumentParser) -> None:
    runs.two_hosts(parser)
    parser.add_argument("--limit", type=float, default=10.0, help="2 for a rank, 10 for a host")


if __name__ == "__main__":
    sys.exit(main(body, options=options))
