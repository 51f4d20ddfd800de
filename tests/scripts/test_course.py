"""A script goes on in place: models, loaders and collectives over real process groups, without a
controller. Every sample that is used is counted in the weights."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elastic.protocol.errors import PeerLost, StepCancelled
from elastic.protocol.messages.to_controller import ScriptSteps
from elastic.protocol.step_record import NONE_APPLIED, AppliedRecord, StepMetrics
from tests.workers.ranks import Ranks, run_ranks
from workers.distributed.pending import Pending
from workers.distributed.process_group import Group
from workers.scripts.default_group import DefaultGroup, as_default
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.loader import Loaders
from workers.scripts.in_place.seams import standing_in
from workers.scripts.in_place.unit import Part, Unit

SAMPLES, BATCH = 36, 3


class Survivors:
    """Regroups without the lost, whom everybody knows; whoever meets the loss first tells."""

    def __init__(self, ranks: Ranks, survivors: list[int]) -> None:
        self.ranks, self._survivors = ranks, survivors
        self.denied = ""
        self.levels: list[tuple[int, str]] = []
        self.steps: list[StepMetrics] = []
        self.group = ranks.form(1, [0, 1, 2])
        ranks.once_said("lost", self.group.abandon)

    @property
    def has_changed(self) -> bool:
        return self.group.is_abandoned

    def regroup(self, error: PeerLost | None) -> Group:
        self.ranks.say("lost")
        self.group = self.ranks.form(2, self._survivors)
        return self.group

    def deny(self, why: str) -> None:
        self.denied = why
        raise StepCancelled

    def say_level(self, level: int, reason: str) -> None:
        self.levels.append((level, reason))

    @property
    def generation(self) -> int:
        return 1 if self.group.size() == 3 else 2

    def tell_steps(self, said: ScriptSteps) -> AppliedRecord:
        self.steps += said.steps
        return NONE_APPLIED

    how_it_grows = "nobody enters"

    def end_unit(self) -> None: ...

    def waited_for_data(self, seconds: float) -> None: ...

    def unwind(self) -> None:
        raise StepCancelled


def in_place(lost: int, script: Callable[[int], Any]) -> list[Any]:
    """What the script gives on the survivors of three; it ends the lost rank itself."""

    def body(ranks: Ranks) -> Any:
        survivors = [i for i in range(3) if i != lost]
        regrouping = Survivors(ranks, survivors)
        group = DefaultGroup(regrouping.group)
        course = group.course = Course("call", group, regrouping)
        with as_default(group), standing_in(course, Loaders(course)):
            if ranks.index == lost:
                ranks.tell(None)
            try:
                return script(ranks.index)
            except StepCancelled:
                return regrouping.denied or "called again"

    return run_ranks(3, body, killed=[lost])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(SAMPLES))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.uses[samples].sum()

    @torch.no_grad()
    def count(self) -> None:
        assert self.uses.grad is not None
        one = self.uses.grad[self.uses.grad > 0].min()
        self.uses += (self.uses.grad / one).round()
        self.uses.grad = None


def loader_of(samples: int = SAMPLES, **settings: Any) -> Any:
    dataset = TensorDataset(torch.arange(samples))
    return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset), **settings)


def begin() -> Any:
    """A model that has been trained on one batch."""
    model = DistributedDataParallel(Uses())
    (samples,) = next(iter(loader_of()))
    model(samples).backward()
    return model


def used(models: list[nn.Module]) -> list[list[float]]:
    return [model.uses.detach().tolist() for model in models]  # type: ignore[operator]


def test_two_models_by_hand_go_on_with_whatever_the_lost_had():
    def script(index: int) -> Any:
        first, second = Uses(), Uses()
        models = [DistributedDataParallel(first), DistributedDataParallel(second)]
        loader, num_steps, unused = loader_of(), 0, []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for (samples,) in loader:
                loss = models[0](samples) + models[1](samples)
                if (index, num_steps) == (2, 1):
                    loss.register_hook(lambda _: kill())
                loss.backward()
                for net in (first, second):
                    net.count()
                    unused.append(net.unused.grad is None)
                num_steps += 1
        return used([first, second]), num_steps, all(unused), dist.get_rank()

    found = in_place(2, script)
    everything = [[2.0] * SAMPLES] * 2
    assert found == [(everything, 8, True, 0), (everything, 8, True, 1)]


def test_who_has_missed_the_end_of_a_unit_takes_its_sums_from_who_has_seen_it():
    """Rank 2 is lost right after a unit; rank 1 does not hear its end, rank 0 does and is ahead."""

    def script(index: int) -> Any:
        reduce, num_units = Unit.reduce, [0]

        def interrupted(self: Unit, group: Group, part: Part, buffers: Any) -> Any:
            outcome = reduce(self, group, part, buffers)
            num_units[0] += 1
            if num_units[0] == 2:
                end_behind(index, 2)
            if num_units[0] == 2 and index == 1:
                assert self._attempt is not None
                for flat in self._attempt.flats():
                    flat.fill_(-1)
                raise PeerLost("the unit's end was not heard")
            return outcome

        Unit.reduce = interrupted
        net, num_steps, averages = Uses(), 0, torch.zeros(1)
        net.register_buffer("average", averages)
        model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.0)
        for (samples,) in loader_of():
            averages += index + 1
            model(samples).backward()
            net.count()
            optimizer.step()
            num_steps += 1
        course: Any = dist.group.WORLD.course  # type: ignore[union-attr]
        course.applied.tell()
        told = {line.step: line.samples for line in course._regrouping.steps}
        return used([net]), num_steps, averages.item(), told

    # Rank 0 has drawn its own of the third one by then, if it was soon enough.
    possible = [{1: 9, 2: 18, 3: third, 4: 36} for third in (24, 27)]
    assert in_place(2, script) in [[([[1.0] * SAMPLES], 4, 4.0, lines)] * 2 for lines in possible]


def test_what_one_rank_refuses_all_hear_and_tell():
    def script(index: int) -> Any:
        course: Any = dist.group.WORLD.course  # type: ignore[union-attr]
        model = DistributedDataParallel(Uses())
        (first,), (second,), *_ = loader_of()
        model(first).backward()
        if index == 1:
            course.refuse("of rank 1's own")
        model(second).backward()
        levels, refusal = course._regrouping.levels, course.refusal
        end_behind(index, 2)
        return levels, refusal

    told = (0, "rank 1: of rank 1's own")
    first, second = in_place(2, script)
    assert first == ([(1, ""), told], told[1])
    assert second == ([(1, ""), (0, "of rank 1's own")], "of rank 1's own")


def test_what_the_backend_refuses_after_a_loss_calls_the_script_again_at_level_0():
    """A gather over the number of ranks that the script has kept."""

    def script(index: int) -> Any:
        size = dist.get_world_size()
        model = begin()  # noqa: F841
        end_by(index, 1)
        dist.barrier()
        gathered = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(gathered, torch.ones(1))
        return "went on"

    found = in_place(1, script)
    assert all("with fewer ranks than it was called with" in of_rank for of_rank in found), found


def test_batches_of_loader_processes_that_are_dealt_again_are_dropped():
    def script(index: int) -> Any:
        multiprocessing.current_process()._config["daemon"] = False  # it has children
        net, num_steps = Uses(), 0
        model = DistributedDataParallel(net)
        for (samples,) in loader_of(num_workers=1):
            if (index, num_steps) == (1, 1):
                kill()
            model(samples).backward()
            net.count()
            num_steps += 1
        return used([net]), num_steps

    assert in_place(1, script) == [([[1.0] * SAMPLES], 4)] * 2


@pytest.mark.parametrize("is_new", [False, True], ids=["the same loader", "a new loader"])
def test_the_last_share_of_a_pass_is_used_in_the_next(is_new):
    def script(index: int) -> Any:
        net, num_steps = Uses(), 0
        model, loader = DistributedDataParallel(net), loader_of()
        for epoch in range(2):
            if is_new:
                sampler = DistributedSampler(loader.dataset)
                loader = DataLoader(loader.dataset, BATCH, sampler=sampler)
            loader.sampler.set_epoch(epoch)
            for (samples,) in loader:
                if (index, num_steps) == (1, 3):  # the last one of the first pass
                    kill()
                model(samples).backward()
                net.count()
                num_steps += 1
        return used([net]), num_steps

    assert in_place(1, script) == [([[2.0] * SAMPLES], 8)] * 2


def test_buffers_are_the_lowest_ranks():
    def script(index: int) -> Any:
        net = nn.BatchNorm1d(3)
        model = DistributedDataParallel(net)
        dist.group.WORLD.course.add_samples(1, 1)  # type: ignore[union-attr]
        torch.manual_seed(index)
        for step in range(4):
            if (index, step) == (1, 2):
                kill()
            model(torch.randn(4, 3)).square().sum().backward()
        return [buffer.tolist() for buffer in net.buffers()]

    first, second = in_place(1, script)
    assert first == second


def test_a_collective_that_a_lost_rank_was_in_calls_the_script_again():
    def script(index: int) -> Any:
        model = begin()  # noqa: F841
        dist.barrier()
        end_behind(index, 1)
        total = torch.ones(1)
        dist.all_reduce(total)
        return "went on"

    assert in_place(1, script) == ["called again"] * 2


def test_a_barrier_does_without_the_lost():
    def script(index: int) -> Any:
        model = begin()  # noqa: F841
        if index == 1:
            kill()
        dist.barrier()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item(), dist.get_world_size()

    assert in_place(1, script) == [(2.0, 2)] * 2


def test_a_loader_that_cannot_be_dealt_calls_the_script_again():
    def script(index: int) -> Any:
        net = Uses()
        model = DistributedDataParallel(net)
        for (samples,) in DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH):
            model(samples).backward()
            if index == 1:
                kill()
        return "went on"

    assert in_place(1, script) == ["called again"] * 2


def end_by(index: int, lost: int) -> None:
    """The lost one ends in the middle of what the others are in."""
    if index == lost:
        kill()


def end_behind(index: int, lost: int) -> None:
    """The lost one ends when all have the end of what they were in, once in a script."""
    dist.group.WORLD.course._regrouping.ranks.meet([0, 1, 2])  # type: ignore[union-attr]
    end_by(index, lost)


def test_a_broadcast_does_without_the_lost():
    def script(index: int) -> Any:
        model = begin()  # noqa: F841
        end_by(index, 1)
        said = [f"of rank {index}"]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    assert in_place(1, script) == ["of rank 0"] * 2


def test_a_sum_is_one_of_the_survivors_if_the_script_says_so():
    def script(index: int) -> Any:
        group: Any = dist.group.WORLD
        group.course.operations.sums = "survivors"
        model = begin()  # noqa: F841
        dist.barrier()
        total = torch.tensor([index + 1.0])
        end_by(index, 1)
        dist.all_reduce(total)
        return total.item()

    assert in_place(1, script) == [4.0] * 2


def test_who_has_missed_the_end_of_a_sum_takes_it_from_who_has_seen_it():
    def script(index: int) -> Any:
        model = begin()  # noqa: F841
        finish = Pending.wait
        total = torch.tensor([index + 1.0])

        def interrupted(self: Pending) -> None:
            finish(self)
            end_behind(index, 2)
            Pending.wait = finish
            if index == 1:
                total.fill_(-1.0)
                raise PeerLost("the end was not heard")

        Pending.wait = interrupted
        dist.all_reduce(total)
        dist.barrier()
        return total.item()

    assert in_place(2, script) == [6.0] * 2
