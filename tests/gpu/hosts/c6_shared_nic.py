"""Peer memory goes to holders on the other host over the NIC that NCCL uses: what does it cost?"""

import argparse
import sys

from tests.gpu.eight import b7_peer_memory
from tests.gpu.experiment import Table, main


def body(table: Table, arguments: argparse.Namespace) -> None:
    b7_peer_memory.body(table, arguments)


if __name__ == "__main__":
    sys.exit(main(body, options=b7_peer_memory.options))
