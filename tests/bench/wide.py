"""A workload that notes the memory of its process: `step_memory.py` runs it."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

WIDTH, LAYERS = 2048, 15
BEGINS_AT = 12
"""Calls of `loss` until what happens for the first time is over."""


def resident_bytes(kind: str) -> int:
    """kind: VmRSS now, VmHWM the most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


class Wide(elastic.Workload):
    """Layers of one width. `notes`: a folder for one file per process, bytes per parameter."""

    def __init__(self, notes: str):
        self.notes = notes

    def build_model(self):
        train_once(nn.Linear(2, 2))  # loads what a step loads
        self.base, self.num_calls = resident_bytes("VmRSS"), 0
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = nn.Sequential(nn.Linear(4, WIDTH), *layers, nn.Linear(WIDTH, 1))
        self.num_parameters = sum(p.numel() for p in model.parameters())
        return model

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-3)

    def dataset(self):
        return TensorDataset(torch.linspace(0, 1, 1000)[:, None].expand(-1, 4))

    def loss(self, model, batch):
        self.num_calls += 1
        if self.num_calls == BEGINS_AT:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        if self.num_calls > BEGINS_AT:
            peak = (resident_bytes("VmHWM") - self.base) / self.num_parameters
            (Path(self.notes) / str(id(self))).write_text(f"{peak:.2f}")
        return model(batch[0]).square().mean()


def train_once(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
