"""Where a rank of a script run is: its number among all, and on its node; and the environment that
torchrun gives to a script."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from workers.distributed.exchange import gather_json
from workers.distributed.process_group import Group


@dataclass(frozen=True, slots=True)
class Place:
    """Of one rank in one call of the script; constant while it lasts."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master: str
    """The host of the lowest rank."""

    @classmethod
    def of(cls, rank: int, nodes: Sequence[str], master: str) -> "Place":
        """nodes: of all ranks, in rank order; nodes are numbered by their lowest rank."""
        here = nodes[rank]
        peers = [r for r, node in enumerate(nodes) if node == here]
        distinct = list(dict.fromkeys(nodes))
        return cls(
            rank=rank,
            world_size=len(nodes),
            local_rank=peers.index(rank),
            local_world_size=len(peers),
            node_rank=distinct.index(here),
            num_nodes=len(distinct),
            master=master,
        )

    def environment(self, restart: int, run_id: str) -> dict[str, str]:
        """restart: how often the script was called before in this process."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(restart),
        }


def introduced(group: Group, mine: list[Any]) -> list[list[Any]]:
    """What all say that begin a call of the script, by rank. Who is in the middle of one hears of
    it, and begins with the others. Raises PeerLost."""
    while True:
        said = gather_json(group, {"begins": mine})
        if all("begins" in of_rank for of_rank in said):
            return [of_rank["begins"] for of_rank in said]


OWN = ("torch.", "ray.", "workers.", "elastic.")
"""Modules that ask for a rank for purposes of their own."""


def is_asked_by_script(frame: FrameType | None) -> bool:
    """frame: what asks the process group for its rank. True if that answers a
    `torch.distributed.get_rank()` of the script's, or of a framework that it uses."""
    if frame is None or frame.f_code.co_name != "get_rank":
        return False
    while frame is not None and module_of(frame).startswith("torch.distributed."):
        frame = frame.f_back
    return frame is not None and not module_of(frame).startswith(OWN)


def module_of(frame: FrameType) -> str:
    """Empty: what runs there has none."""
    return frame.f_globals.get("__name__") or ""


@contextmanager
def environment_set(values: dict[str, str]) -> Iterator[None]:
    """Within; other threads read the rest of it meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
