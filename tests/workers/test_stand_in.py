"""A stage that takes nothing from the batch loads none of it: it has its shapes, which the first
stage tells."""

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.workers import where
from tests.workers.pipeline_models import CASES, LENGTHS, WIDTH, Counting, Gate, Residual
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.session_rig import Rig
from tests.workers.sharded_rig import enter
from workers.data.loader import LoadedBatch
from workers.data.placement import to_device
from workers.parallel.pipeline.absent import Absent
from workers.parallel.pipeline.chain import find_chain
from workers.parallel.pipeline.readers import find_readers
from workers.parallel.pipeline.stand_in import Announced, StandIns, Structure
from workers.parallel.pipeline.strategy import Staged
from workers.parallel.shards import Ownership
from workers.workloads.charlm import CharLM


def readers_of(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> tuple[int, ...]:
    compute = partial(loss, model)
    return find_readers(model, find_chain(model, None, lambda: compute(batch)), compute, batch)


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("gates", (0,)),
        ("resnet", (0,)),
        ("lstm", (0,)),
        ("llama", (0, 1, 2, 3)),  # the mask is of the batch, the tables are not
        ("bert", (0, 1, 2)),
        ("autoencoder", (0, 3)),  # it is compared with the input
    ],
)
def test_blocks_that_take_something_of_the_batch_are_found(name: str, readers: tuple[int, ...]):
    case = CASES[name]
    torch.manual_seed(0)
    assert readers_of(case.build(), case.loss, case.batches()[0]) == readers


def test_of_a_language_model_only_the_ends_take_something():
    workload = CharLM(width=16, layers=4, heads=2)
    model, dataset = workload.build_model(), workload.dataset()
    batch = [torch.stack(part) for part in zip(*(dataset[i] for i in range(2)), strict=True)]
    blocks = len(find_chain(model, None, lambda: workload.loss(model, batch)).names)
    assert readers_of(model, workload.loss, batch) == (0, blocks - 1)


class Looks(Residual):
    """Before any block."""

    def forward(self, x):
        return super().forward(x if x.max() > 9 else x * 2)


def test_a_loss_that_looks_at_values_has_them_on_every_stage():
    batch = torch.ones(4, WIDTH)
    readers = readers_of(Looks(Gate), lambda model, x: model(x).square().mean(), batch)
    assert readers == (0, 1, 2, 3)


def batch_of(length: int) -> dict[str, Any]:
    return {
        "ids": torch.ones(3, length, dtype=torch.int64),
        "at": [torch.ones(()), torch.zeros(length, 3).T],
    }


def test_a_stand_in_has_shapes_strides_and_dtypes_of_each_micro_batch():
    structure = Structure.of(batch_of(4))
    assert structure is not None
    for length in LENGTHS:
        batch = batch_of(length)
        found = structure.stand_in(structure.numbers(batch))
        assert found.keys() == batch.keys()
        pairs = [(found["ids"], batch["ids"]), *zip(found["at"], batch["at"], strict=True)]
        for stand, real in pairs:
            assert isinstance(stand, Absent)
            assert (stand.shape, stand.stride(), stand.dtype) == (
                real.shape,
                real.stride(),
                real.dtype,
            )


@pytest.mark.parametrize("batch", [3, [], ["words", torch.ones(2)], {"x": np.ones(2)}])
def test_what_is_not_made_of_tensors_alone_is_loaded(batch: Any):
    assert Structure.of(batch) is None


class Loads:
    """A loader that counts."""

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self.batch, self.fetched = batch, list[int]()

    def assign(self, step: int, ids: range) -> None: ...

    def next(self, step: int, microbatch_id: int, is_cancelled: Callable[[], bool]) -> LoadedBatch:
        return LoadedBatch(step, microbatch_id, np.arange(3), self.batch(microbatch_id))

    def fetch(self, step: int, microbatch_id: int) -> LoadedBatch:
        self.fetched.append(microbatch_id)
        return self.next(step, microbatch_id, lambda: False)


def test_a_micro_batch_that_is_made_otherwise_is_loaded_after_all():
    told: dict[int, Tensor] = {}
    batches = {0: torch.ones(2, 3), 1: [torch.ones(2, 3)], 2: torch.ones(5, 3)}
    loader, structure = Loads(batches.__getitem__), Structure.of(batches[0])
    assert structure is not None
    announced = Announced(loader, structure, lambda numbers, i: told.update({i: numbers}))
    stands = StandIns(loader, structure, lambda numbers, i: numbers.copy_(told[i]))
    for i in batches:
        announced.next(7, i, lambda: False)
        found = stands.next(7, i, lambda: False)
        assert isinstance(found.batch, Absent) == (i != 1)
        assert (found.microbatch_id, len(found.rows)) == (i, 3 if i == 1 else 0)
    assert loader.fetched == [1]


class Work:
    loader_processes = 1

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(Counting() for _ in range(6)))

    def build_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def dataset(self) -> list[dict[str, Tensor]]:
        return [{"x": torch.full((WIDTH,), i / 7), "y": torch.tensor(i % 3)} for i in range(41)]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        inputs, wanted = batch.pop("x"), batch.pop("y")
        return nn.functional.cross_entropy(model(inputs), wanted, reduction="sum"), len(wanted)


def trained(parallel: str, group: Any = None, is_seen: bool = False) -> tuple[str, int, int]:
    """The weights' hash, how many batches have had values here, and how many have not."""
    torch.set_num_threads(1)
    rig = Rig("bitwise", Work(), parallel=parallel)
    if isinstance(rig.strategy, Staged):
        batch = {"x": torch.ones(3, WIDTH), "y": torch.zeros(3, dtype=torch.int64)}
        batch = to_device(batch, where.HERE)
        loss = partial(rig.workload.loss, rig.train_state.model)
        rig.strategy.examine(loss, lambda: dict(batch), is_seen=is_seen)
        rig.strategy.shards.holding = Ownership("initial")
    rig.form(1, 0)
    if group is not None:
        rig.join(group)
        assert isinstance(rig.strategy, Staged)
        rig.strategy.shards.holding = Ownership("initial")
        enter(rig.strategy, group, 0)
    seen: list[bool] = []
    for _ in range(3):
        with rig.session.next_step() as step:
            for batch in step.microbatches():
                seen.append(isinstance(batch["x"], Absent))
                step.backward(rig.workload.loss(rig.session.model, batch))
            step.commit()
    rig.loader.close()
    return rig.strategy.weights_sha256(), seen.count(False), seen.count(True)


@pytest.mark.usefixtures("place_slowly")
@pytest.mark.parametrize(
    ("parallel", "is_seen", "with_values"),
    [
        ("pp:3", False, [12, 0, 12]),
        ("pp:3", True, [12, 12, 12]),
        ("pp:3/Interleaved1F1B", False, [24, 0, 24]),
        ("pp:3/ZBVZeroBubble", False, [24, 0, 0]),
    ],
)
def test_a_stage_in_the_middle_has_no_values_and_the_bits_are_those_of_ddp(
    parallel: str, is_seen: bool, with_values: list[int]
):
    """is_seen: the user's own loop may look at a batch, so that each stage has it."""

    def body(ranks: Ranks) -> Any:
        process: Any = multiprocessing.current_process()
        process._config["daemon"] = False  # it has a loader process, which dies with it
        return trained(parallel, ranks.form(1, [0, 1, 2]), is_seen)

    sha256, *_ = trained("ddp")
    total = max(with_values)
    assert run_ranks(3, body) == [(sha256, some, total - some) for some in with_values]
