"""A model with everything that checkpoints trip over, and a checkpoint of it made in process."""

from collections import Counter
from pathlib import Path

import torch
from torch import nn

import elastic
from elastic.protocol.layout import Position
from elastic.protocol.mesh import DDP, Mesh
from elastic.store.catalogue import Catalogue, file_name
from elastic.store.checkpoint_files import write_part
from elastic.store.files import open_folder
from workers.checkpoint.saver import share
from workers.tensors.local import as_bytes
from workers.train_state.train_state import TrainState

WORLD_SIZE = 3


class Odd(nn.Module):
    """Tied weights, integer buffers, bf16, a scalar, an empty tensor, a cache, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11, bias=False)
        self.table = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.table.weight = self.head.weight
        self.register_buffer("scratch", torch.rand(3), persistent=False)
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("flags", torch.rand(7) > 0.5)
        self.calls = Counter(a=1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.table(ids)) * self.scale
        return self.head(hidden) + self.short.float().sum() + self.empty.sum()

    def get_extra_state(self) -> Counter:
        return self.calls

    def set_extra_state(self, state: Counter) -> None:
        self.calls = state


class Job(elastic.Workload):
    """With two parameter groups of other options than `build` has."""

    def __init__(self, width=None, optimizer="AdamW"):
        self.width, self.kind = width, optimizer

    def build_model(self):
        return nn.Linear(self.width, 2) if self.width else Odd()

    def build_optimizer(self, params):
        groups = [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:], "lr": 7e-4}]
        return getattr(torch.optim, self.kind)(groups, lr=0.5)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=9)

    def dataset(self):
        return list(range(11))

    def loss(self, model, batch):
        return model(batch).square().mean()


def build(seed: int, steps: int = 2) -> TrainState:
    """With AdamW in two groups, after some steps."""
    torch.manual_seed(seed)
    model = Odd()
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[:1], "weight_decay": 0.0},
        {"params": parameters[1:], "lr": 3e-4},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=9)
    train_state = TrainState(
        model, dict(model.named_parameters()), optimizer, scheduler, clip_norm=None, max_nonfinite=1
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 11, (8,))).square().mean().backward()
        optimizer.step()
        scheduler.step()
    model.calls["a"] += seed
    return train_state


def save(run_dir: Path, step: int, train_state: TrainState) -> Catalogue:
    """As three ranks would."""
    train_state.step = step
    catalogue = Catalogue(open_folder(str(run_dir)).at("checkpoints"))
    snapshot = train_state.snapshot()
    tensors = {name: snapshot.take(name) for name in snapshot.shapes}
    parts = []
    for rank in range(WORLD_SIZE):
        pieces = share(tensors, Position(Mesh(DDP, WORLD_SIZE), rank))
        contents = (as_bytes(t.contiguous()) if t.numel() else memoryview(b"") for _, t in pieces)
        name = file_name(1, rank, WORLD_SIZE)
        parts.append(write_part(catalogue.prepare(step), name, [b for b, _ in pieces], contents))
    catalogue.publish(step, 1, parts, snapshot.header, {})
    return catalogue


def damage(run_dir: Path, step: int) -> Path:
    """Alter the last byte of rank 1's file; gives the file."""
    path = run_dir / "checkpoints" / f"step-{step:08d}" / file_name(1, 1, WORLD_SIZE)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path
