"""Workloads of experiments that need size: so many parameters, in blocks that are sharded."""

import torch
from torch import nn

import elastic


class Wide(elastic.Workload):
    """`blocks` square layers of `width`: blocks * width^2 parameters, built on the meta device."""

    def __init__(self, width: int = 8192, blocks: int = 15, samples: int = 4096) -> None:
        self.width, self.blocks, self.samples = width, blocks, samples

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(self.blocks)]
        return nn.Sequential(*layers)

    def init_weights(self, module: nn.Module, name: str) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.width**-0.5)

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-5)

    def dataset(self):
        return [torch.full((self.width,), (i % 13) / 13) for i in range(self.samples)]

    def loss(self, model, batch):
        return (model(batch) - batch).square().mean()
