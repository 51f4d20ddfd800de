"""A character-level language model on the source text of Python's standard library.

The text is on every machine that has Python. `evaluate` measures on files that are not trained on.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import elastic

CONTEXT, CHARACTERS = 64, 128
HELD_OUT = 20
"""Every so many files are held out."""


class Windows(Dataset):
    """Consecutive windows of some files: the characters, and the same shifted by one."""

    def __init__(self, is_held_out, limit_bytes):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        chosen = (f for i, f in enumerate(files) if (i % HELD_OUT == 0) == is_held_out)
        text, size = [], 0
        while size < limit_bytes and (file := next(chosen, None)) is not None:
            text.append(file.read_bytes())
            size += len(text[-1])
        self.text = torch.frombuffer(bytearray(b"".join(text)[:limit_bytes]), dtype=torch.uint8)

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, i):
        window = self.text[i * CONTEXT : (i + 1) * CONTEXT + 1].long().clamp(max=CHARACTERS - 1)
        return window[:-1], window[1:]


class Transformer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, norm_first=True, activation="gelu", **layer)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, characters):
        length = characters.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=characters.device)
        x = self.characters(characters) + self.positions[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


class CharLM(elastic.Workload):
    def __init__(self, width=64, layers=2, lr=3e-3, limit_bytes=2_000_000):
        self.width, self.layers, self.lr = width, layers, lr
        self.limit_bytes = limit_bytes

    def build_model(self):
        return Transformer(self.width, self.layers)

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=self.lr)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))

    def dataset(self):
        return Windows(is_held_out=False, limit_bytes=self.limit_bytes)

    def loss(self, model, batch):
        characters, following = batch
        return F.cross_entropy(model(characters).flatten(0, 1), following.flatten())

    def evaluate(self, session):
        held_out = Windows(is_held_out=True, limit_bytes=20_000)
        session.log(held_out_loss=session.evaluate(held_out, self.loss))
