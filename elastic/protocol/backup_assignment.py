"""Which holder keeps the copy of which worker's shard: one on another node where there is one.

What a holder is, is workers/backup/server.py's; where they run, elastic/on_ray/backup/servers.py's.
"""

from collections.abc import Sequence
from typing import NamedTuple


class BackupAddress(NamedTuple):
    """A holder as workers reach it."""

    node: str
    host: str
    port: int


def holders_for(node: str, holders: Sequence[BackupAddress]) -> tuple[BackupAddress, ...]:
    """Those that a worker on `node` may use, the best first: the next node's in the order of
    names, so that every node keeps as much as it gives away; its own node's last."""
    others = sorted(h for h in holders if h.node != node)
    after = [h for h in others if h.node > node]
    before = [h for h in others if h.node < node]
    return (*after, *before, *sorted(h for h in holders if h.node == node))
