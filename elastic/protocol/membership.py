"""Who takes part in a generation.

No decisions here (elastic/control) and no process groups (workers/distributed/process_group.py).
Which micro-batches each of them computes is in mesh.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest


def counted(number: int, noun: str) -> str:
    """ "1 worker", "3 workers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def workers_from_to(low: int, high: int) -> str:
    """ "2 workers", "2 to 6 workers"."""
    return counted(high, "worker") if low == high else f"{low} to {high} workers"


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


CHUNK = 4096
"""Numbers per integer of a NumberSet."""
MAX_NUMBER = 2**20
"""Above it a set that somebody else has written would take all memory."""


@dataclass(frozen=True, slots=True)
class NumberSet:
    """An immutable set of small numbers (workers or ranks), iterated in ascending order.

    One bit per number in integers of CHUNK bits: adding to a set of 100,000 copies 700 bytes, so
    that a hundred thousand additions stay linear. Equal sets have equal fields.
    """

    chunks: tuple[int, ...] = ()
    """No zeros at the end."""
    size: int = 0

    @classmethod
    def of(cls, numbers: Iterable[int]) -> "NumberSet":
        found = tuple(numbers)
        if found and not 0 <= min(found) <= max(found) <= MAX_NUMBER:
            raise ValueError(f"{min(found)} to {max(found)} are no numbers of workers or ranks")
        flags = bytearray(max(found, default=-1) // 8 + 1)
        for n in found:
            flags[n >> 3] |= 1 << (n & 7)
        step = CHUNK // 8
        return cls._of_chunks(
            [int.from_bytes(flags[at : at + step], "little") for at in range(0, len(flags), step)]
        )

    @classmethod
    def _of_chunks(cls, chunks: Iterable[int]) -> "NumberSet":
        kept = list(chunks)
        while kept and not kept[-1]:
            kept.pop()
        return cls(tuple(kept), sum(chunk.bit_count() for chunk in kept))

    def add(self, number: int) -> "NumberSet":
        if number in self:
            return self
        if not 0 <= number <= MAX_NUMBER:
            raise ValueError(f"{number} is no number of a worker or rank")
        index, bit = divmod(number, CHUNK)
        chunks = [*self.chunks, *(0 for _ in range(len(self.chunks), index + 1))]
        chunks[index] |= 1 << bit
        return NumberSet(tuple(chunks), self.size + 1)

    def remove(self, number: int) -> "NumberSet":
        if number not in self:
            return self
        index, bit = divmod(number, CHUNK)
        chunks = list(self.chunks)
        chunks[index] ^= 1 << bit
        while chunks and not chunks[-1]:
            chunks.pop()
        return NumberSet(tuple(chunks), self.size - 1)

    def __or__(self, other: "NumberSet") -> "NumberSet":
        pairs = zip_longest(self.chunks, other.chunks, fillvalue=0)
        return self._of_chunks(a | b for a, b in pairs)

    def __and__(self, other: "NumberSet") -> "NumberSet":
        return self._of_chunks(a & b for a, b in zip(self.chunks, other.chunks, strict=False))

    def __sub__(self, other: "NumberSet") -> "NumberSet":
        pairs = zip_longest(self.chunks, other.chunks[: len(self.chunks)], fillvalue=0)
        return self._of_chunks(a & ~b for a, b in pairs)

    def __contains__(self, number: int) -> bool:
        index, bit = divmod(number, CHUNK)
        return index < len(self.chunks) and bool(self.chunks[index] >> bit & 1)

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return self.size > 0

    def __iter__(self) -> Iterator[int]:
        for index, chunk in enumerate(self.chunks):
            if not chunk:
                continue
            flags = chunk.to_bytes(CHUNK // 8, "little")
            for i, byte in enumerate(flags):
                while byte:
                    low = byte & -byte
                    yield index * CHUNK + i * 8 + low.bit_length() - 1
                    byte ^= low
