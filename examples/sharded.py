"""FSDP: a deeper network whose parameters, gradients and optimizer state are spread over ranks.

With `init_weights` the model is built on the meta device: no rank ever holds all of it. The same
weights come of any number of ranks, and of `--parallel ddp`.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import elastic

FEATURES, CLASSES = 32, 8


class Clusters(Dataset):
    """Points around the corners of a cube; the class says around which."""

    def __len__(self):
        return 8192

    def __getitem__(self, i):
        label = i % CLASSES
        corner = torch.tensor([(label >> bit & 1) * 2.0 - 1 for bit in range(3)])
        noise = torch.randn(FEATURES, generator=torch.Generator().manual_seed(i))
        return torch.cat([corner + noise[:3], noise[3:]]), label


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Deep(elastic.Workload):
    def __init__(self, width=64, blocks=4, lr=1e-3):
        self.width, self.blocks, self.lr = width, blocks, lr

    def build_model(self):
        blocks = (Block(self.width) for _ in range(self.blocks))
        return nn.Sequential(
            nn.Linear(FEATURES, self.width), *blocks, nn.Linear(self.width, CLASSES)
        )

    def init_weights(self, module, name):
        """After the module's own reset_parameters(): layers into the residual begin at nothing."""
        if name.endswith(".outer"):
            nn.init.zeros_(module.weight)

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=self.lr)

    def dataset(self):
        return Clusters()

    def loss(self, model, batch):
        points, labels = batch
        return F.cross_entropy(model(points), labels)
