"""A model whose steps bring more than its network carries: 8.4 M parameters stand for 350 M, and
all that is of its size is scaled alike (1.2 GB/s, MAX_QUEUED_BYTES)."""

import time

import torch
from torch import nn

import elastic
from workers.membership import state_stream

SCALE = 2048 * 4096 / 350e6
LINK_BYTES_S = 1.2e9 * SCALE
STATE_BYTES = 3 * 4 * 2048 * 4096  # AdamW in fp32
STEP_S = 0.5

state_stream.MAX_QUEUED_BYTES = round(state_stream.MAX_QUEUED_BYTES * SCALE)


class Large(elastic.Workload):
    def build_model(self):
        return nn.Linear(2048, 4096, bias=False)

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-3)

    def dataset(self):
        return [torch.full((2048,), i / 100) for i in range(100)]

    def loss(self, model, batch):
        time.sleep(STEP_S / 2)  # the work of a micro-batch, of which a step has two
        return model(batch).square().mean()
