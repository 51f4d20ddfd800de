"""`CharLM`: a character-level transformer on the source text of Python's standard library.

The text is on every machine that has Python, so there is nothing to download. No Ray here.
"""

import functools
import math
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import elastic
from workers.workloads.documents import CHARACTERS, VALIDATION_EVERY, VOCABULARY_SIZE, character_ids

VALIDATION_BYTES = 65_536  # of it that `evaluate` reads: 1,024 windows, about two seconds of a core


def encode(text: bytes) -> Tensor:
    return torch.from_numpy(character_ids(text))


def decode(ids: Tensor) -> str:
    return "".join(CHARACTERS[i - 1] if i else "?" for i in ids.tolist())


@functools.cache
def library_text(part: str, limit_bytes: int) -> Tensor:
    """Character ids of the "train" or "validation" files; read once per process."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise FileNotFoundError(
            f"no *.py in {sysconfig.get_path('stdlib')}: this Python ships without its sources"
        )
    chosen, size = [], 0
    for position, file in enumerate(files):
        if (position % VALIDATION_EVERY == 0) == (part == "validation") and size < limit_bytes:
            chosen.append(file.read_bytes())
            size += len(chosen[-1])
    return encode(b"".join(chosen)[:limit_bytes])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a text: the characters, and the same shifted by one."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Pre-norm causal attention and a GELU network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.network_norm = nn.LayerNorm(width)
        self.network_in = nn.Linear(width, 4 * width)
        self.network_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x))
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.attention_out(mixed))
        hidden = F.gelu(self.network_in(self.network_norm(x)))
        return x + self.dropout(self.network_out(hidden))


class Transformer(nn.Module):
    def __init__(self, *, width: int, layers: int, heads: int, context: int, dropout: float):
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY_SIZE, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY_SIZE, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:  # the layers that write into the residual start smaller
                into_residual = name.endswith("_out.weight")
                std = 0.02 / math.sqrt(2 * layers) if into_residual else 0.02
                nn.init.normal_(weight, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def warmup_cosine(warmup_steps: int, decay_steps: int, floor: float) -> Callable[[int], float]:
    """The factor on the learning rate as a function of committed steps."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


class CharLM(elastic.Workload):
    """Predict the next character of Python's standard library; about 1 M parameters by default."""

    def __init__(
        self,
        *,
        width: int = 160,
        layers: int = 3,
        heads: int = 4,
        context: int = 64,
        dropout: float = 0.0,
        lr: float = 2e-3,
        warmup_steps: int = 20,
        decay_steps: int = 1000,
        limit_bytes: int = 16_000_000,
    ) -> None:
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.width = width
        self.layers = layers
        self.heads = heads
        self.context = context
        self.dropout = dropout
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.limit_bytes = limit_bytes

    def build_model(self) -> nn.Module:
        return Transformer(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            context=self.context,
            dropout=self.dropout,
        )

    def build_optimizer(self, params: list[nn.Parameter]) -> Optimizer:
        matrices = [p for p in params if p.dim() > 1]
        vectors = [p for p in params if p.dim() <= 1]  # norms and biases do not decay
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, warmup_cosine(self.warmup_steps, self.decay_steps, floor=0.1))

    def dataset(self) -> Windows:
        return Windows(library_text("train", self.limit_bytes), self.context)

    def validation(self) -> Windows:
        return Windows(library_text("validation", VALIDATION_BYTES), self.context)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        characters, following = batch
        scores = model(characters)
        return F.cross_entropy(scores.flatten(0, 1), following.flatten())

    def evaluate(self, session) -> None:
        session.log(validation_loss=session.evaluate(self.validation(), self.loss))


class OneBitOff(CharLM):
    """`CharLM` with the lowest bit of one initial weight flipped, for `make demo DIVERGE=1`."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        with torch.no_grad():
            model.get_parameter("head.weight").view(torch.int32)[0, 0] ^= 1
        return model
