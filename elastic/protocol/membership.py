"""Who takes part in a generation, and which micro-batches each of them computes.

No decisions here (elastic/control) and no process groups (workers/groups.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self


def worker_name(worker: int) -> str:
    """The name a person reads (`status.json`, log files) of worker number `worker`."""
    return f"w{worker}"


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers of one generation; a worker's rank is its position."""

    generation: int
    workers: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def rank_of(self, worker: int) -> int:
        return self.workers.index(worker)


@dataclass(frozen=True, slots=True)
class NumberSet:
    """An immutable set of small numbers (workers or ranks), iterated in ascending order.

    One integer holds a bit per number, so that adding to a set of 100,000 copies 12 kB.
    """

    bits: int = 0

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Self:
        found = tuple(numbers)
        flags = bytearray(max(found, default=-1) // 8 + 1)
        for n in found:
            flags[n >> 3] |= 1 << (n & 7)
        return cls(int.from_bytes(flags, "little"))

    def add(self, number: int) -> "NumberSet":
        return NumberSet(self.bits | 1 << number)

    def remove(self, number: int) -> "NumberSet":
        return NumberSet(self.bits & ~(1 << number))

    def __or__(self, other: "NumberSet") -> "NumberSet":
        return NumberSet(self.bits | other.bits)

    def __sub__(self, other: "NumberSet") -> "NumberSet":
        return NumberSet(self.bits & ~other.bits)

    def __contains__(self, number: int) -> bool:
        return bool(self.bits >> number & 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __iter__(self) -> Iterator[int]:
        for i, byte in enumerate(self.bits.to_bytes((self.bits.bit_length() + 7) // 8, "little")):
            while byte:
                low = byte & -byte
                yield i * 8 + low.bit_length() - 1
                byte ^= low


def microbatch_ids(num_microbatches: int, world_size: int, rank: int) -> range:
    """The contiguous ids that `rank` computes: V=8 over W=3 gives 3, 3, 2."""
    share, extra = divmod(num_microbatches, world_size)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))
