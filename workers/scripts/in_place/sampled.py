"""Which samples a DataLoader's sampler gives to all ranks of a call together, in one pass.

Known are torch's DistributedSampler, and Accelerate's `BatchSamplerShard`, which deals the batches
of another sampler among processes. How they are dealt again is dealing.py's, who loads them
loader.py's.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from workers.scripts.in_place.dealing import Shape

OF_SHARDS = "BatchSamplerShard"
"""The class by its name: a script may have any version of Accelerate, or none."""
ALIKE = ("torch.utils.data.", "accelerate.")
"""Where samplers come from that give the same order on all ranks of Accelerate's, if they have the
same seed: course.py compares it in each pass."""


def is_shared(loader: Any, seats: set[tuple[int, int]]) -> bool:
    """Whether its samples are known to be shared among the ranks of the call. seats: how many ranks
    a sampler may have been made for, and for which one of them."""
    if not getattr(loader, "in_order", True):
        return False
    if is_shard(loader.batch_sampler):
        shard = loader.batch_sampler
        return (shard.num_processes, shard.process_index) in seats
    return (
        type(loader.sampler) is DistributedSampler
        and (loader.sampler.num_replicas, loader.sampler.rank) in seats
        and type(loader.batch_sampler) is BatchSampler
        and loader.batch_sampler.sampler is loader.sampler
    )


def is_shard(batch_sampler: Any) -> bool:
    """Of Accelerate's, with as many batches of one size for each process."""
    if type(batch_sampler).__name__ != OF_SHARDS:
        return False
    inner, sampler = batch_sampler.batch_sampler, getattr(batch_sampler.batch_sampler, "sampler", 0)
    return (
        type(inner) is BatchSampler
        and not isinstance(sampler, DistributedSampler)
        and type(sampler).__module__.startswith(ALIKE)
        and (batch_sampler.even_batches or inner.drop_last)
    )


def sampled(batch_sampler: Any, num_carried: int) -> tuple[list[int], Shape]:
    """The samples of a pass that begins, padding included, in the order of `Shape`'s positions. The
    generators of random numbers are behind it as they were before."""
    if is_shard(batch_sampler):
        return of_shards(batch_sampler, num_carried)
    sampler = batch_sampler.sampler
    shape = Shape(
        num_positions=sampler.total_size,
        replicas=sampler.num_replicas,
        batch_size=batch_sampler.batch_size,
        drop_last=batch_sampler.drop_last,
        num_carried=num_carried,
    )
    return order_of(sampler), shape


def order_of(sampler: Any) -> list[int]:
    """The samples of all replicas, padding included: replica r has r, r + replicas and so on."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.num_samples = 1, 0, sampler.total_size
    return list(iter(whole))


def of_shards(shard: Any, num_carried: int) -> tuple[list[int], Shape]:
    """By Accelerate's own code, for one process after the other."""
    batches = copy.copy(shard.batch_sampler)
    batches.sampler = copy.copy(batches.sampler)  # which may keep what it has drawn with
    with unmoved(getattr(batches.sampler, "generator", None)):
        drawn = Drawn(batches)
    of_all: list[list[list[int]]] = []
    for index in range(shard.num_processes):
        own = copy.copy(shard)
        own.process_index, own.batch_sampler = index, drawn
        of_all.append(list(iter(own)))
    samples = [s for iteration in zip(*of_all, strict=True) for batch in iteration for s in batch]
    parts = shard.num_processes if shard.split_batches else 1
    shape = Shape(
        num_positions=len(samples),
        replicas=shard.num_processes,
        batch_size=shard.batch_sampler.batch_size // parts,
        drop_last=True,
        num_carried=num_carried,
        is_in_blocks=True,
    )
    return samples, shape


@contextmanager
def unmoved(generator: torch.Generator | None) -> Iterator[None]:
    """Whatever is drawn from it within, it does not notice. None: torch's own."""
    drawn_from = torch.default_generator if generator is None else generator
    state = drawn_from.get_state()
    try:
        yield
    finally:
        drawn_from.set_state(state)


class Drawn:
    """What a batch sampler has given once, for all who want it; each may write into its lists."""

    def __init__(self, batch_sampler: Any) -> None:
        self._batches: Sequence[list[int]] = list(iter(batch_sampler))
        self.batch_size, self.drop_last = batch_sampler.batch_size, batch_sampler.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return (list(batch) for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches)
