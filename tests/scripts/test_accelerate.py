"""Batches that are dealt as Accelerate deals them go on in place. To import Accelerate takes long:
its sampler and its loader, which draws one batch ahead, are of the same shape here. Scripts with
the library itself are test_frameworks.py's."""

from collections.abc import Iterator
from itertools import islice
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from tests.scripts.test_course import BATCH, SAMPLES, Uses, end_behind, in_place, kill, used
from tests.scripts.test_units import alone
from workers.scripts.in_place.dealing import plan_of
from workers.scripts.in_place.loader import Instead, Loaders
from workers.scripts.in_place.rule import OTHER_ORDER
from workers.scripts.in_place.sampled import is_shared, sampled

RANKS = 3


class BatchSamplerShard(BatchSampler):
    """Each process has every so-many-th batch of another sampler, or its part of each batch; the
    last ones are filled from the first."""

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int,
        process_index: int,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler, self.even_batches = batch_sampler, even_batches
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches = split_batches

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[list[int]]:
        size, drops = self.batch_sampler.batch_size, self.batch_sampler.drop_last
        size //= self.num_processes if self.split_batches else 1
        samples = [sample for batch in self.batch_sampler for sample in batch]
        of_all = size * self.num_processes
        missing = 0 if drops else -len(samples) % of_all
        samples += (samples * of_all)[:missing]
        for begin in range(self.process_index * size, len(samples) // of_all * of_all, of_all):
            yield samples[begin : begin + size]


def prepared(
    rank: int, samples: int = SAMPLES, batch_size: int = BATCH, seed: int = 1, **settings: Any
) -> Any:
    """As Accelerate makes it of a script's own loader."""
    dataset = TensorDataset(torch.arange(samples))
    generator = torch.Generator().manual_seed(seed)
    own = DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        generator=generator,
        drop_last=settings.pop("drop_last", False),
    )
    shard = BatchSamplerShard(own.batch_sampler, RANKS, rank, **settings)
    return DataLoader(dataset, batch_sampler=shard)


def is_accelerates(function: Any) -> Any:
    """It is known by the module that it is of."""
    return FunctionType(function.__code__, globals() | {"__name__": "accelerate.data_loader"})


@is_accelerates
def ahead(loader: Any) -> Iterator[Any]:
    """It knows of each batch whether it is the last one."""
    batches = iter(loader)
    current = next(batches)
    while True:
        try:
            following = next(batches)
        except StopIteration:
            yield current
            return
        yield current
        current = following


def shard_of_one() -> Any:
    dataset = TensorDataset(torch.arange(SAMPLES))
    shard = BatchSamplerShard(DataLoader(dataset, BATCH).batch_sampler, 1, 0)
    return DataLoader(dataset, batch_sampler=shard)


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [3, 36, 38])
def test_without_a_loss_each_rank_has_the_batches_of_its_shard(samples, drop_last, split_batches):
    settings = {"samples": samples, "drop_last": drop_last, "split_batches": split_batches}
    found, shape = sampled(prepared(0, **settings).batch_sampler, 0)
    plan = plan_of(shape, (0, 1, 2))
    for rank in range(RANKS):
        own = list(iter(prepared(rank, **settings).batch_sampler))
        shares = [plan.share(iteration, rank) for iteration in range(plan.iterations)]
        assert [[found[position] for position in share] for share in shares] == own


def test_which_loaders_are_known_to_be_shared():
    seats = {(RANKS, 1)}
    assert is_shared(prepared(1), seats)
    assert not is_shared(prepared(2), seats), "another rank's"
    assert not is_shared(prepared(1, even_batches=False), seats), "some ranks have a batch less"

    class Own(torch.utils.data.SequentialSampler):
        """Whether it gives the same order on all ranks is not known."""

    loader = prepared(1)
    loader.batch_sampler.batch_sampler.sampler = Own(loader.dataset)
    assert not is_shared(loader, seats)


def drawn_with(
    generator: torch.Generator, *, is_loaders: bool, replaces: bool, workers: int
) -> tuple[list[Any], list[list[int]]]:
    """Three passes of rank 1's, the second of them broken off: their batches, and what generators
    give behind each."""
    dataset = TensorDataset(torch.arange(70))
    sampler = RandomSampler(dataset, replaces, generator=generator)
    loader = DataLoader(
        dataset,
        batch_sampler=BatchSamplerShard(BatchSampler(sampler, BATCH, False), RANKS, 1),
        generator=generator if is_loaders else None,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    torch.manual_seed(5)
    batches: list[Any] = []
    behind: list[list[int]] = []
    for stop in (None, 2, None):
        batches += [samples.tolist() for (samples,) in islice(ahead(loader), stop)]
        states = (generator.get_state(), torch.get_rng_state())
        behind.append([hash(state.numpy().tobytes()) for state in states])
    return batches, behind


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("is_loaders", [False, True])
def test_a_generator_gives_the_orders_that_it_gives_without_us(workers, replaces, is_loaders):
    settings = {"is_loaders": is_loaders, "replaces": replaces, "workers": workers}
    own = drawn_with(torch.Generator().manual_seed(3), **settings)
    with alone() as course:
        course.member, course.members, course.seats = 1, (0, 1, 2), {(RANKS, 1)}
        assert drawn_with(torch.Generator().manual_seed(3), **settings) == own
        assert course.training.orders, "it is dealt"


def test_torchs_own_generator_gives_the_orders_that_it_gives_without_us():
    settings = {"is_loaders": True, "replaces": False, "workers": 0}
    own = drawn_with(torch.default_generator, **settings)
    with alone() as course:
        course.member, course.members, course.seats = 1, (0, 1, 2), {(RANKS, 1)}
        assert drawn_with(torch.default_generator, **settings) == own


@pytest.mark.parametrize("lost_at", [1, 3], ids=["in the middle", "in the last iteration"])
def test_a_loss_in_the_middle_of_a_pass_leaves_each_sample_to_be_used_once(lost_at):
    def script(index: int) -> Any:
        net, loader = Uses(), prepared(dist.get_rank())
        model, steps = DistributedDataParallel(net), 0
        for _ in range(2):
            for (samples,) in ahead(loader):
                loss = model(samples)
                if (index, steps) == (1, lost_at):
                    loss.register_hook(lambda _: kill())
                loss.backward()
                net.count()
                steps += 1
        course: Any = dist.group.WORLD.course  # type: ignore[union-attr]
        return used([net]), steps, course.refusal

    assert in_place(1, script) == [([[2.0] * SAMPLES], 8, "")] * 2


@pytest.mark.parametrize("seeds", [(1, 1, 1), (1, 1, 2)], ids=["one seed", "seeds of their own"])
def test_ranks_whose_samplers_have_other_orders_are_at_level_0(seeds):
    def script(index: int) -> Any:
        model = DistributedDataParallel(Uses())
        for (samples,) in ahead(prepared(index, seed=seeds[index])):
            model(samples).backward()
        levels = dist.group.WORLD.course._regrouping.levels  # type: ignore[union-attr]
        end_behind(index, 2)
        return levels

    level = (1, "") if len(set(seeds)) == 1 else (0, OTHER_ORDER.why)
    assert in_place(2, script) == [[level]] * 2


def test_a_batch_of_a_shard_that_is_iterated_by_hand_is_delivered_at_once():
    with alone() as course:
        loader = shard_of_one()
        for _ in loader:
            course.begin_forward()
            (stands,) = course.stand().passes
            course.end_unit(1, 0)
            assert course.stand().passes[0].counted == stands.drawn
        for number, _ in enumerate(ahead(loader)):
            course.begin_forward()
            course.end_unit(1, 0)
            assert course.stand().passes[0].counted == number


def test_a_loader_that_keeps_its_iterator_is_dealt_in_the_next_call_too():
    """As one with persistent workers does, whose iterator keeps what gives it its batches."""
    loader = shard_of_one()
    kept = loader._iterator = SimpleNamespace(_index_sampler=loader.batch_sampler)
    for _ in range(2):
        with alone() as course:
            loaders = Loaders(course)
            with loaders._given(loader):
                if not isinstance(kept._index_sampler, Instead):
                    kept._index_sampler = loader.batch_sampler  # as it is made
                assert kept._index_sampler is loader.batch_sampler
            assert loader.batch_sampler is not kept._index_sampler
