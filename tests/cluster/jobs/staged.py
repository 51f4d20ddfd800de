"""Layers that can be cut into stages, and some that cannot."""

import time
from pathlib import Path

import torch
from torch import nn
from toy import Resting, Samples


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        x = x + torch.relu(self.norm(self.linear(x)))
        return nn.functional.dropout(x, 0.1, self.training)


class Tied(nn.Module):
    """Blocks with BatchNorm between two uses of one matrix."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.ends = nn.Parameter(torch.randn(8, 8) / 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(depth))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = x @ self.ends
        for block in self.blocks:
            x = block(x)
        return x @ self.ends.t()


class Layers(Resting):
    def __init__(self, sleep: float = 0.0, until: str | None = None, depth: int = 5) -> None:
        """depth: blocks."""
        super().__init__(sleep, until)
        self.depth = depth

    def build_model(self):
        return Tied(self.depth)

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-2)

    def dataset(self):
        return Samples(501)

    def loss(self, model, batch):
        self.rest()
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


class Evaluated(Layers):
    """It evaluates over samples of its own."""

    def evaluate(self, session):
        session.log(validation=session.evaluate(Samples(77), self.loss))


class TakingApart(Evaluated):
    """Its loss leaves nothing of a batch."""

    def collate(self, samples):
        inputs, labels = torch.utils.data.default_collate(samples)
        return {"inputs": inputs, "labels": labels}

    def loss(self, model, batch):
        if isinstance(batch, dict):
            batch = batch.pop("inputs"), batch.pop("labels")
        return super().loss(model, batch)


class Skipping(Layers):
    """A model that no stages can be made of."""

    def build_model(self):
        class Skip(Tied):
            def forward(self, x):
                kept = x = x @ self.ends
                for block in self.blocks:
                    x = block(x + kept)
                return x

        return Skip()


class Hangs(Layers):
    """The second stage of the first pipeline sleeps in the loss, once there is a file `marker`."""

    session = None

    def __init__(self, marker: str, **settings) -> None:
        super().__init__(**settings)
        self.marker = Path(marker)

    def evaluate(self, session):
        self.session = session

    def loss(self, model, batch):
        if self.session is not None and self.session.rank == 1 and self.marker.exists():
            self.marker.unlink()
            time.sleep(3600)
        return super().loss(model, batch)
