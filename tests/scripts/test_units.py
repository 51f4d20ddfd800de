"""Which of a script's batches a unit is made of; of a lone rank, without a controller."""

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elastic.protocol.errors import StepCancelled
from elastic.protocol.messages.to_controller import ScriptSteps
from elastic.protocol.step_record import NONE_APPLIED, AppliedRecord, StepMetrics
from workers.distributed.process_group import Alone, Group
from workers.scripts.default_group import DefaultGroup, as_default
from workers.scripts.in_place import rule
from workers.scripts.in_place.call_state import COLLECTIVE, SEND, SUM
from workers.scripts.in_place.collective import OwnCollective
from workers.scripts.in_place.course import REUSED, Course
from workers.scripts.in_place.ddp import Replica, replica_of
from workers.scripts.in_place.loader import REMEMBERED, Loaders
from workers.scripts.in_place.sampled import is_shared
from workers.scripts.in_place.seams import standing_in

SAMPLES, BATCH = 12, 3


class Listening:
    """The call of a lone rank: it keeps what it is told."""

    has_changed, generation = False, 1

    def __init__(self) -> None:
        self.denied = ""
        self.levels: list[int] = []
        self.steps: list[StepMetrics] = []
        self.data_s: list[float] = []

    def regroup(self, error: Any) -> Group | None:
        raise AssertionError("a lone rank lost a peer")

    def deny(self, why: str) -> None:
        self.denied = why
        raise StepCancelled

    def say_level(self, level: int, reason: str) -> None:
        self.levels.append(level)

    def tell_steps(self, said: ScriptSteps) -> AppliedRecord:
        self.steps += said.steps
        return NONE_APPLIED

    how_it_grows = "nobody enters"

    def end_unit(self) -> None: ...

    def waited_for_data(self, seconds: float) -> None:
        self.data_s.append(seconds)

    def unwind(self) -> NoReturn:
        raise StepCancelled


@contextmanager
def alone() -> Iterator[Course]:
    """Within, a script of a lone rank runs in place."""
    group = DefaultGroup(Alone("units"))
    course = group.course = Course("units", group, Listening())
    course.add_samples(1, 1)  # what is drawn from no loader is told after some units only
    with as_default(group), standing_in(course, Loaders(course)):
        yield course


@pytest.fixture
def course() -> Iterator[Course]:
    with alone() as course:
        yield course


def listening(course: Course) -> Any:
    return course._regrouping


def loader_of(**settings: Any) -> Any:
    dataset = TensorDataset(torch.randn(SAMPLES, 2))
    settings = {"sampler": DistributedSampler(dataset)} | settings
    return DataLoader(dataset, BATCH, **settings)


def replica(model: Any) -> Replica:
    found = replica_of(model)
    assert found is not None
    return found


def test_what_a_script_waits_for_its_loader_is_told_for_each_batch(course):
    began = time.monotonic()
    num_batches = sum(1 for _ in loader_of())
    waited_s = listening(course).data_s
    assert len(waited_s) == num_batches == SAMPLES // BATCH
    assert 0.0 < sum(waited_s) < time.monotonic() - began


@pytest.mark.parametrize("is_inside", [False, True], ids=["around the loop", "in the loop"])
def test_a_pass_without_gradients_counts_for_no_unit(course, is_inside):
    model = DistributedDataParallel(nn.Linear(2, 1))
    for (inputs,) in loader_of():
        with torch.set_grad_enabled(is_inside):
            for (others,) in loader_of():
                with torch.no_grad():
                    model(others)
        model(inputs).sum().backward()
        assert replica(model).weight == 1.0


def test_an_evaluation_without_gradients_in_its_loop_counts_no_samples(course):
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    to_train, to_evaluate = loader_of(), loader_of()
    for epoch in range(2):
        for (inputs,) in to_evaluate:
            with torch.no_grad():
                measured = model(inputs)
            dist.all_reduce(measured)
            evaluated = course.stand().passes[0]
            assert evaluated.counted == evaluated.drawn
        for number, (inputs,) in enumerate(to_train):
            if (epoch, number) == (0, 0):
                with torch.no_grad():
                    model(inputs)
            model(inputs).sum().backward()
            optimizer.step()
            trained = course.stand().passes[1]
            assert trained.counted == trained.drawn == number
    course.applied.tell()
    told = [line.samples for line in listening(course).steps]
    assert told == list(range(BATCH, 2 * SAMPLES + 1, BATCH))


def test_a_batch_drawn_after_the_forward_is_not_of_its_unit(course):
    model = DistributedDataParallel(nn.Linear(2, 1))
    batches = iter(loader_of())
    (inputs,) = next(batches)
    loss = model(inputs).sum()
    (ahead,) = next(batches)
    loss.backward()
    (loader,) = course.stand().passes
    assert (loader.drawn, loader.counted) == (1, 0)
    model(ahead).sum().backward()
    (loader,) = course.stand().passes
    assert (loader.drawn, loader.counted) == (1, 1)


@pytest.mark.parametrize("num_ranks", [1, 2], ids=["before a loss", "after a loss"])
def test_after_a_loss_nothing_is_trained_by_a_loader_that_cannot_be_dealt(course, num_ranks):
    course.num_ranks = num_ranks
    model = DistributedDataParallel(nn.Linear(2, 1))
    (inputs,) = next(iter(loader_of(sampler=None)))
    if num_ranks == 1:
        model(inputs).sum().backward()
        assert (listening(course).denied, course.stand().refusal != "") == ("", True)
        return
    with pytest.raises(StepCancelled):
        model(inputs).sum().backward()
    assert "no DistributedSampler" in listening(course).denied


def test_a_sampler_made_for_the_ranks_of_before_is_dealt(course):
    course.seats |= {(4, 3), (3, 2)}
    dataset = TensorDataset(torch.randn(SAMPLES, 2))
    for size, rank, is_known in ((4, 3, True), (3, 2, True), (5, 4, False)):
        sampler = DistributedSampler(dataset, size, rank)
        assert is_shared(loader_of(sampler=sampler), course.seats) is is_known


def test_a_second_gradient_after_the_first_was_sent_calls_the_script_again(course):
    net = nn.Linear(2, 1)
    model = DistributedDataParallel(net)
    for index, parameter in enumerate(net.parameters()):
        again = partial(replica(model).unit.hear_gradient, index)
        parameter.register_post_accumulate_grad_hook(lambda _, again=again: again())
    with pytest.raises(StepCancelled):
        model(torch.randn(BATCH, 2)).sum().backward()
    assert "second gradient" in listening(course).denied


def test_autograd_grad_is_no_unit(course):
    model = DistributedDataParallel(nn.Linear(2, 1))
    inputs = torch.randn(BATCH, 2, requires_grad=True)
    output = model(inputs).sum()
    before = course.operations.num_done
    torch.autograd.grad(output, inputs, retain_graph=True)
    assert course.operations.num_done == before
    output.backward()
    assert course.operations.num_done == before + 1


def test_models_that_are_gone_do_not_count(course):
    model = DistributedDataParallel(nn.Linear(2, 1))
    del model
    gc.collect()
    assert course.num_models == 0


def test_a_new_loader_in_each_pass_leaves_nothing_behind(course):
    model = DistributedDataParallel(nn.Linear(2, 1))
    loaders, passes = [], []
    for _ in range(20):
        loader = loader_of()
        batches = iter(loader)
        loaders.append(weakref.ref(loader))
        passes.append(weakref.ref(batches))
        for (inputs,) in batches:
            model(inputs).sum().backward()
        del loader, batches
    gc.collect()
    assert [ref() for ref in (*loaders, *passes) if ref() is not None] == []
    assert len(course.loaders) == REMEMBERED


def test_parameters_that_a_model_gets_later_are_refused(course):
    net = nn.Sequential(nn.Linear(2, 2))
    model = DistributedDataParallel(net)
    model(torch.randn(BATCH, 2)).sum().backward()
    assert course.refusal == ""
    net.append(nn.Linear(2, 1))
    model(torch.randn(BATCH, 2)).sum().backward()
    assert "had not when DistributedDataParallel was made" in course.refusal


def test_a_model_that_is_made_later_is_as_any_other(course):
    first = DistributedDataParallel(nn.Linear(2, 1))
    first(torch.randn(BATCH, 2)).sum().backward()
    second = DistributedDataParallel(nn.Linear(2, 1))
    (first(torch.randn(BATCH, 2)) + second(torch.randn(BATCH, 2))).sum().backward()
    assert (course.refusal, course.num_models) == ("", 2)
    assert all(p.grad is not None for p in second.parameters())


def test_lbfgs_is_refused(course):
    net = nn.Linear(2, 1)
    model, inputs = DistributedDataParallel(net), torch.randn(BATCH, 2)
    optimizer = torch.optim.LBFGS(net.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert "LBFGS" in course.refusal


def test_optimizers_and_models_that_ranks_share_are_refused(course):
    net = nn.Linear(2, 1)
    ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    assert "ZeroRedundancyOptimizer" in course.refusal
    course.refusal = ""
    with suppress(RuntimeError):  # it has no groups here, and is heard of before it asks for them
        FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    assert "FullyShardedDataParallel" in course.refusal


@pytest.mark.parametrize(
    ("net", "settings", "obstacle"),
    [
        (nn.Linear(2, 1), {"process_group": DefaultGroup(Alone("other"))}, rule.OWN_GROUP),
        (nn.Linear(2, 1), {"mixed_precision": _MixedPrecision()}, rule.MIXED_PRECISION),
        (nn.Embedding(4, 2, sparse=True), {}, rule.SPARSE),
        (nn.Linear(2, 1), {"delay_all_reduce_named_params": []}, rule.DELAYED),
    ],
    ids=["group", "mixed precision", "sparse", "delayed"],
)
def test_what_only_torchs_own_reducer_can_do_is_refused(course, net, settings, obstacle):
    if obstacle is rule.DELAYED:
        named = [("weight", net.weight)]
        settings = {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": net.bias}
    with suppress(Exception):  # it has no group of its own kind here, and is heard of before
        DistributedDataParallel(net, **settings)
    assert course.refusal == obstacle.why


def test_groups_of_the_script_s_own_are_refused(course):
    course.group.new_group([0], group_name="own")
    assert course.refusal == rule.OWN_GROUPS.why


def trained_elsewhere(course: Course, units: int) -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    for _ in range(units):
        model(torch.randn(BATCH, 2)).sum().backward()


def test_samples_from_no_loader_are_refused_at_once(course):
    course.training.num_without_samples = REUSED  # as at the start of a call
    trained_elsewhere(course, 1)
    assert ("no DataLoader" in course.refusal, listening(course).levels) == (True, [0])


def test_a_batch_may_be_used_for_several_units_but_not_for_any_number(course):
    next(iter(loader_of()))
    trained_elsewhere(course, REUSED)
    assert course.refusal == ""
    trained_elsewhere(course, 1)
    assert "no DataLoader" in course.refusal


def test_samples_from_no_loader_are_accepted_by_who_says_so(course):
    course.operations.samples = "survivors"
    trained_elsewhere(course, REUSED + 1)
    assert (course.refusal, course.sums_survivors) == ("", False)


def test_who_accepts_sums_of_the_survivors_accepts_no_samples_from_elsewhere(course):
    course.operations.sums = "survivors"
    trained_elsewhere(course, REUSED + 1)
    assert ("no DataLoader" in course.refusal, course.sums_survivors) == (True, True)


def test_after_a_loss_samples_from_no_loader_call_the_script_again(course):
    course.num_ranks = 2
    with pytest.raises(StepCancelled):
        trained_elsewhere(course, REUSED + 1)
    assert "no DataLoader" in listening(course).denied


def test_a_collective_in_flight_while_gradients_meet_is_refused(course):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    trained_elsewhere(course, 1)
    assert work is not None
    work.wait()
    assert "in flight" in course.refusal


def test_what_raises_at_the_call_of_a_collective_is_not_taken_for_the_next_one(course):
    group = course.group
    with pytest.raises(TypeError):
        group.allgather([[torch.ones(1)]], None)  # pyright: ignore[reportArgumentType]
    assert (group._coming, course.operations.num_collectives) == (None, 0)
    with pytest.raises(AttributeError):
        group.reduce_scatter_single(torch.ones(1), None)  # pyright: ignore[reportArgumentType]
    assert course.operations.num_collectives == 0
    trained_elsewhere(course, 1)
    assert course.refusal == ""


def test_only_the_first_backward_of_an_unknown_output_is_a_unit(course):
    class Hidden:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Hiding(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return Hidden(super().forward(input).sum())

    model = DistributedDataParallel(Hiding(2, 1))
    loss = model(torch.randn(BATCH, 2)).value
    before = course.operations.num_done
    loss.backward(retain_graph=True)
    assert course.operations.num_done == before + 1
    loss.backward()
    assert course.operations.num_done == before + 1


def keeps_rank(course: Course) -> bool:
    return course.stand().keeps_rank


def test_a_script_that_asks_for_its_rank_only_at_its_start_has_kept_it(course):
    DistributedSampler(range(3))  # pyright: ignore[reportArgumentType]
    assert not keeps_rank(course), "torch has asked, for itself"
    dist.get_rank()
    assert keeps_rank(course)
    trained_elsewhere(course, 1)
    assert keeps_rank(course)
    dist.get_rank()
    assert not keeps_rank(course)


def test_a_script_that_gathers_while_it_trains_reads_by_ranks(course):
    dist.all_gather([torch.ones(1)], torch.ones(1))
    assert not course.stand().gathers
    trained_elsewhere(course, 1)
    with torch.no_grad():
        dist.all_gather([torch.ones(1)], torch.ones(1))
    assert not course.stand().gathers
    dist.all_gather([torch.ones(1)], torch.ones(1))
    assert course.stand().gathers


def test_what_is_gathered_between_forward_and_backward_is_trained_on(course):
    """Also without gradients, as within a function of the script's own, and in its first unit."""
    loss = DistributedDataParallel(nn.Linear(2, 1))(torch.randn(BATCH, 2)).sum()
    with torch.no_grad():
        dist.all_gather([torch.ones(1)], torch.ones(1))
    assert course.stand().gathers
    loss.backward()
    course.training.gathers = False
    with torch.no_grad():
        dist.all_gather([torch.ones(1)], torch.ones(1))
    assert not course.stand().gathers, "what is measured"


def test_a_broadcast_whose_sender_is_lost_as_it_is_called_calls_the_script_again(
    course, monkeypatch
):
    """By then another rank may be its sender, which has nothing to send."""

    def begin(doing: str, source: int, *, is_by_rank: bool = False) -> None:
        course.members = (0, 1, 2)
        own = OwnCollective(doing, [], [], source)
        course.begin_collective(own, is_by_rank=is_by_rank)
        course.drop_collective()

    monkeypatch.setattr(course, "check", lambda: setattr(course, "members", (0, 2)))
    begin(SUM, -1)
    begin(SEND, 0)
    for source, is_by_rank in ((1, False), (2, False), (-1, True)):
        with pytest.raises(StepCancelled):
            begin(COLLECTIVE, source, is_by_rank=is_by_rank)
    assert "ranks are other members'" in listening(course).denied


def test_a_device_mesh_is_refused(course):
    init_device_mesh("cpu", (1,))
    assert "device mesh" in course.refusal
