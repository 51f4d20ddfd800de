"""Where a member stands, for tests of peer memory without members."""

from dataclasses import dataclass


@dataclass
class Place:
    generation: int
    rank: int = 0
    world_size: int = 1
