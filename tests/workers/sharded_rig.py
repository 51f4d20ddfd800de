"""A small workload, and training it for a few steps on ranks without a session around them."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elastic.protocol.mesh import Parallel
from elastic.protocol.worker_spec import Cpus, WorkerSpec
from elastic.store.catalogue import Catalogue, file_name
from elastic.store.checkpoint_files import write_part
from elastic.store.files import open_folder
from tests.workers import where
from tests.workers.ranks import DEADLINE_S
from tests.workers.waits import waits
from workers.backup.backup import Backup, NoBackup
from workers.checkpoint.saver import share
from workers.data.placement import to_device
from workers.distributed.pieces import Pieces
from workers.distributed.process_group import Alone, AnyGroup
from workers.parallel.build import build_strategy
from workers.parallel.over_shards import OverShards
from workers.parallel.shards import Ownership
from workers.parallel.strategy import Entered, Formed, Strategy
from workers.step.randomness import seed_microbatch
from workers.tensors.local import as_bytes
from workers.train_state.train_state import TrainState, Update

CPU = where.CPU
NUM_MICROBATCHES = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)

    def forward(self, x):
        return x + torch.dropout(self.norm(self.linear(x)), 0.1, self.training)


class Net(nn.Module):
    """Tied weights, a block that runs twice, BatchNorm, rows fewer than ranks, a scalar, a
    parameter that only some micro-batches use and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks.append(self.blocks[0])
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.sometimes = nn.Parameter(torch.ones(1, 2))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.never = nn.Parameter(torch.ones(4))

    def forward(self, tokens, microbatch_id):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.head(self.norm(x)) * self.scale
        return x * self.sometimes.sum() if microbatch_id % 3 == 0 else x


class Work:
    def build_model(self):
        return Net()

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.1)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

    def batch(self, step, microbatch_id):
        generator = torch.Generator().manual_seed(100 * step + microbatch_id)
        return torch.randint(0, 11, (4,), generator=generator)


class Deferred(Work):
    """Built on the meta device."""

    def init_weights(self, module, name):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)


class Dense(Work):
    """Blocks only, whose rows divide by two."""

    def build_model(self):
        return Microbatched(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))

    def batch(self, step, microbatch_id):
        return torch.ones(4, 8)


class Microbatched(nn.Sequential):
    def forward(self, x, microbatch_id):
        return super().forward(x)


def spec(parallel: str, reduction: str = "bitwise", **options: Any) -> WorkerSpec:
    """parallel: in words."""
    plain = WorkerSpec(
        worker=0, run_id="r", token="t", controller=("127.0.0.1", 1), host="127.0.0.1",
        device="cpu", cpus=Cpus(1), folder=None, steps=9, global_batch=32, micro_batch=4,
        parallel=Parallel.of(parallel), reduction=reduction, clip_norm=0.5, seed=3,
        eval_every=None, checkpoint_every=None, has_checkpoints=True, max_nonfinite=1, detect_s=3.0,
        timeouts=waits(join_s=DEADLINE_S, operation_s=DEADLINE_S),
    )  # fmt: skip
    return replace(plain, **options)


def build(
    parallel: str,
    reduction: str = "bitwise",
    workload: Work | None = None,
    open_backup: Callable[[], Backup] = NoBackup,
    device: torch.device | None = None,
    **options: Any,
) -> Any:
    """The strategy of a loading worker, which stands for the initial state. device: of its own
    (where.py)."""
    torch.set_num_threads(1)
    config = spec(parallel, reduction, **options)
    strategy = build_strategy(workload or Work(), config, device or where.HERE, open_backup)
    if isinstance(strategy, OverShards):
        strategy.shards.holding = Ownership("initial")
    return strategy


def newcomer(parallel: str) -> Any:
    strategy = build(parallel)
    strategy.forget()
    return strategy


def raise_it(error: Exception) -> None:
    raise error


def enter(
    strategy: Strategy,
    group: AnyGroup,
    step: int,
    catalogue: Catalogue | None = None,
    generation: int = 1,
    order: tuple[int, ...] = (),
) -> Entered:
    pieces = Pieces(group, lambda: None, round_s=30.0)
    made = formed(group, step, catalogue, generation, pieces)
    return strategy.enter(replace(made, order=order))


def formed(
    group: AnyGroup, step: int, catalogue: Catalogue | None, generation: int, pieces: Pieces
) -> Formed:
    return Formed(
        generation=generation, step=step, known_step=step, group=group, pieces=pieces,
        catalogue=catalogue, say_lost=raise_it, gathering=nullcontext,
    )  # fmt: skip


def train(
    strategy: Strategy,
    group: AnyGroup,
    parallel: str,
    num_steps: int,
    reduction: str = "bitwise",
    work: Work | None = None,
    after_step: Callable[[TrainState], None] = lambda train_state: None,
    device: torch.device | None = None,
    seed: Callable[[int, int, int], None] = seed_microbatch,
) -> None:
    """As a session does it, with a vote of what was used."""
    train_state, work = strategy.train_state, work or Work()
    mesh = strategy.mesh_of(group.size())
    reducer = strategy.reducer(train_state.parameters, mesh, group)
    ids = mesh.ids(NUM_MICROBATCHES, group.rank())
    num_passes = mesh.num_passes(NUM_MICROBATCHES, group.rank())
    for _ in range(num_steps):
        reducer.begin()
        train_state.buffers.begin_step()
        train_state.casting.cast()
        scale = train_state.loss_scale.value if train_state.loss_scale else 1.0
        for index in range(num_passes):
            if index == len(ids):
                reducer.serve_pass()
                continue
            i = ids[index]
            train_state.buffers.begin_microbatch()
            seed(3, train_state.step, i)
            batch = to_device(work.batch(train_state.step, i), device or where.current())
            loss = train_state.model(batch, i).square().mean()
            reducer.before_backward(index == num_passes - 1)
            (loss * scale).backward()
            reducer.after_backward(i, train_state.buffers.end_microbatch())
        train_state.casting.restore()
        reduced = reducer.finish()
        reduced = strategy.before_vote(reduced, group.read)
        is_bad = torch.tensor([not reduced.magnitude(group.read).is_finite], dtype=torch.int64)
        group.control.all_reduce(is_bad).wait()
        mine = [name in reducer.used for name in train_state.parameters]
        used = torch.tensor(mine, dtype=torch.int64)
        group.control.all_reduce(used).wait()
        flags = zip(train_state.parameters, used.tolist(), strict=True)
        should_skip, all_used = is_bad.item(), {name for name, flag in flags if flag}
        assert train_state.loss_scale or not should_skip
        strategy.apply(
            Update(
                step=train_state.step + 1,
                is_finite=not should_skip,
                divisor=float(NUM_MICROBATCHES),
                num_microbatches=NUM_MICROBATCHES,
                gradients={n: g for n, g in reduced.gradients.items() if n in all_used},
                buffers=reduced.buffers,
                integers=train_state.buffers.integers,
                log_names=(),
                squares=reduced.squares,
            )
        )
        after_step(train_state)
    reducer.close()


def sha256(strategy: Strategy) -> str:
    return strategy.weights_sha256()


def undisturbed(num_steps: int) -> list[str]:
    """The hashes of one rank that holds the whole state, after 0, 1, ... `num_steps` steps."""
    strategy = build("ddp")
    hashes = [sha256(strategy)]
    for _ in range(num_steps):
        train(strategy, Alone(), "ddp", 1)
        hashes.append(sha256(strategy))
    return hashes


def save_part(strategy: Strategy, group: AnyGroup, place: str, generation: int):
    """(this rank's part of a checkpoint of the state, its header)"""
    train_state, at = strategy.train_state, strategy.position(group.rank(), group.size())

    def mine(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {box.name: piece for box, piece in share(tensors, at, strategy.layout)}

    snapshot = train_state.snapshot(mine)
    boxes = [box for box, _ in share(train_state.tensors(), at, strategy.layout)]
    contents = [snapshot.take(b.name) for b in boxes]
    folder = catalogue_in(place).prepare(train_state.step)
    name = file_name(generation, group.rank(), group.size())
    nothing = memoryview(b"")
    chunks = [as_bytes(t) if t.numel() else nothing for t in contents]
    return write_part(folder, name, boxes, chunks), snapshot.header


def catalogue_in(place: str) -> Catalogue:
    return Catalogue(open_folder(place).at("checkpoints"))


def load(parallel: str, group: AnyGroup, place: str, step: int, work: Work | None = None) -> Any:
    """A fresh worker's state from the checkpoint, as a member of `group`."""
    strategy = build(parallel, workload=work)
    assert strategy.load(catalogue_in(place), 0, 0, lambda: None) == []
    enter(strategy, group, step, catalogue_in(place))
    return strategy
