"""Models as people build them, small: blocks in lists and sequences, with all that is passed
between them. Each is a `Case`: how to build it, its loss, its micro-batches."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.workers.image_models import (
    ConvNext,
    Convolutions,
    ResNet,
    Vgg,
    Vit,
    group_normed,
    images,
)

WIDTH = 8
VOCABULARY = 19
LENGTHS = (6, 9, 5, 6)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Any]
    loss: Callable[[nn.Module, Any], Any]
    is_random: bool = False
    """It draws randomness in a forward."""

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        return [self.batch(generator, i) for i in range(len(LENGTHS))]


def vectors(generator: torch.Generator, index: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def sequences(generator: torch.Generator, index: int) -> Tensor:
    return torch.randn(3, LENGTHS[index], WIDTH, generator=generator)


def tokens(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (3, LENGTHS[index]), generator=generator)
    pad = torch.zeros_like(ids, dtype=torch.bool)
    pad[0, -2:] = True
    return {"ids": ids, "pad": pad}


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"], batch["pad"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


# --- vectors -------------------------------------------------------------------------------------
def sequence_of_linears() -> nn.Module:
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def sequence_in_place() -> nn.Module:
    """Of three dims, what a linear layer returns is a view."""
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """Code between blocks, parameters of the root before and behind them."""

    def __init__(self, block: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


class Gate(nn.Module):
    """A scalar parameter, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate, self.never = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x + self.gate * torch.tanh(self.linear(x))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x += torch.tanh(self.linear(x.clone()))
        return x


class Dropping(nn.Module):
    """Dropout and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        keep = torch.rand(x.shape[0], 1, device=x.device) > 0.2
        return x + keep * self.dropout(self.linear(x))


class Checkpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + checkpoint(self.linear, x, use_reentrant=False)


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class Frozen(Residual):
    def __init__(self) -> None:
        super().__init__(Gate)
        for part in (self.first, *self.blocks[:2]):
            part.requires_grad_(False)


class Detached(Residual):
    """A feature extractor that is not trained."""

    def __init__(self) -> None:
        super().__init__(Gate)

    def forward(self, x):
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](self.first(x)))
        for block in self.blocks[2:]:
            x = block(x)
        return self.last(self.norm(x))


class Between(Residual):
    """What is computed between two blocks belongs to the earlier one."""

    def __init__(self) -> None:
        super().__init__(Gate, 3)
        self.scales = nn.ParameterList([torch.full((WIDTH,), 0.5 + i) for i in range(3)])

    def forward(self, x):
        x = self.first(x)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = F.silu(block(x) * scale)
        return self.last(self.norm(x))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (8, 6, 3)
        pairs = list(itertools.pairwise(sizes))
        self.encoder = nn.Sequential(*(nn.Linear(a, b) for a, b in pairs))
        self.decoder = nn.Sequential(*(nn.Linear(b, a) for a, b in reversed(pairs)))

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x))) - x


class Counting(nn.Module):
    """BatchNorm, which counts its forwards, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + F.dropout(self.norm(torch.tanh(self.linear(x))), 0.2, self.training)


class Deep(nn.Module):
    """Seven blocks; matrices behind the first one are used again behind the fourth, the fifth and
    the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(7))
        self.shared = nn.ParameterList([torch.eye(WIDTH) + 0.01 * i for i in range(3)])

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            for used_in, matrix in zip((3, 4, 6), self.shared, strict=True):
                x = x @ matrix if number in (0, used_in) else x
        return x


class State(NamedTuple):
    x: Tensor
    total: Tensor
    note: str


class Passing(nn.Module):
    """A block takes and returns a named tuple in a dict, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, state):
        held = state["held"]
        x = held.x + self.linear(held.x)
        return {"held": State(x, held.total + x.mean(), "passed on"), "count": state["count"] + 1}


class Structured(Residual):
    def __init__(self) -> None:
        super().__init__(Passing)

    def forward(self, x):
        x = self.first(x)
        state = {"held": State(x, x.sum(), "made"), "count": 0}
        for block in self.blocks:
            state = block(state=state)
        return self.last(self.norm(state["held"].x)) + state["held"].total


class Mixture(nn.Module):
    """Experts that all tokens go through, and a result that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(3)])

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        result = torch.zeros(x.shape, device=x.device)
        for i, expert in enumerate(self.experts):
            result.add_(weights[:, i : i + 1] * (x @ expert))
        return x + result


def summed(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    found = model(batch)
    return found.square().sum(), torch.tensor(float(found.numel()))


# --- sequences -----------------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x, mask=None, rotate=lambda t: t, bias=None):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in
                   self.qkv(x).chunk(3, -1))  # fmt: skip
        scores = rotate(q) @ rotate(k).transpose(-1, -2) / q.shape[-1] ** 0.5
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LlamaLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.input_norm, self.post_norm, self.attention = RMSNorm(), RMSNorm(), Attention()
        self.gate, self.up = (nn.Linear(WIDTH, 16, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(16, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None):
        cos, sin = position_embeddings

        def rotate(t):
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat([-b, a], -1) * sin

        x = self.attention(self.input_norm(hidden_states), attention_mask, rotate)
        hidden_states = hidden_states + self.dropout(x)
        x = self.post_norm(hidden_states)
        x = self.down(F.silu(self.gate(x)) * self.up(x))
        return (hidden_states + self.dropout(x),)


class Llama(nn.Module):
    """Rotary tables, a mask, tuple outputs, keyword arguments."""

    def __init__(self, is_tied: bool = False, dropout: float = 0.0, num_layers: int = 4) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaLayer(dropout) for _ in range(num_layers))
        self.norm, self.lm_head = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed_tokens.weight
        frequencies = 1 / 100 ** (torch.arange(0, WIDTH // 2, 2) / (WIDTH // 2))
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, ids, pad):
        length = ids.shape[1]
        at = torch.arange(length, device=ids.device)
        angles = at[:, None] * self.inv_freq[None]
        angles = torch.cat([angles, angles], -1)
        causal, others = at[:, None] < at[None], at[:, None] != at[None]
        mask = causal[None, None] | (pad[:, None, None, :] & others)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_embeddings=(angles.cos(), angles.sin()))[0]
        return self.lm_head(self.norm(x))


class Bert(nn.Module):
    """torch's own encoder layers, learned positions, a pooler, a padding mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(12, WIDTH)
        self.norm, self.pooler = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, 4)

    def forward(self, ids, pad):
        at = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.positions(at))
        x = self.encoder(x, src_key_padding_mask=pad)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def classified(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["pad"]), batch["ids"][:, 0] % 4)


class T5Block(nn.Module):
    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), RMSNorm()
        self.table = nn.Embedding(8, 2) if is_first else None

    def forward(self, x, bias=None):
        if self.table is not None:
            at = torch.arange(x.shape[1], device=x.device)
            bias = self.table((at[:, None] - at[None]).clamp(-3, 3) + 3).permute(2, 0, 1)[None]
        return x + self.attention(self.norm(x), bias=bias), bias


class T5(Residual):
    """The first block's bias is passed on by all."""

    def __init__(self) -> None:
        super().__init__(lambda: T5Block(False))
        self.blocks[0] = T5Block(True)

    def forward(self, x):
        x, bias = self.first(x), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.last(self.norm(x))


class Alibi(nn.Module):
    """A buffer in each block that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25])[:, None, None])

    def forward(self, x):
        at = torch.arange(x.shape[1], device=x.device)
        return x + self.attention(x, bias=-self.slopes * (at[:, None] - at[None]).abs())


class Recurrent(nn.Module):
    """A stack of recurrent layers that return their last state, too."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return self.last(x[:, -1])


class GivenState(Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.GRU)

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x, torch.zeros(1, x.shape[0], WIDTH, device=x.device))
        return self.last(x[:, -1])


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channels(F.gelu(x))


class WaveNet(Residual):
    """A sum of skips that is passed from block to block."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=2, dilation=2)

        def forward(self, x, skips):
            a, b = self.convolution(x.transpose(1, 2)).transpose(1, 2).chunk(2, -1)
            y = torch.tanh(a) * torch.sigmoid(b)
            return x + y, skips + y

    def __init__(self) -> None:
        super().__init__(WaveNet.Layer)

    def forward(self, x):
        x = self.first(x)
        skips = torch.zeros_like(x)
        for block in self.blocks:
            x, skips = block(x, skips)
        return self.last(self.norm(skips))


HOST_ONLY = ("lstm", "gru", "rnn", "given state")
"""Recurrent layers are computed by other formulas on a device, or by kernels that it lacks."""
CASES: dict[str, Case] = {
    "a sequence": Case(sequence_of_linears, vectors, square),
    "a sequence in place": Case(sequence_in_place, sequences, square),
    "gates": Case(lambda: Residual(Gate), vectors, square),
    "in place": Case(lambda: Residual(InPlace), vectors, square),
    "dropout": Case(lambda: Residual(Dropping), vectors, square, is_random=True),
    "checkpointing": Case(lambda: Residual(Checkpointing), vectors, square),
    "weight norm": Case(lambda: Residual(weight_normed), vectors, square),
    "frozen": Case(Frozen, vectors, square),
    "detached": Case(Detached, vectors, square),
    "between": Case(Between, vectors, square),
    "autoencoder": Case(Autoencoder, vectors, square),
    "deep": Case(Deep, vectors, square, is_random=True),
    "structured": Case(Structured, vectors, square),
    "mixture": Case(lambda: Residual(Mixture), vectors, square),
    "sum and weight": Case(lambda: Residual(Gate), vectors, summed),
    "llama": Case(Llama, tokens, next_token),
    "llama, tied": Case(lambda: Llama(is_tied=True), tokens, next_token),
    "llama, dropout": Case(lambda: Llama(dropout=0.1), tokens, next_token, is_random=True),
    "bert": Case(Bert, tokens, classified),
    "bert, dropout": Case(lambda: Bert(0.1), tokens, classified, is_random=True),
    "t5": Case(T5, sequences, square),
    "alibi": Case(lambda: Residual(Alibi), sequences, square),
    "lstm": Case(lambda: Recurrent(nn.LSTM), sequences, square),
    "gru": Case(lambda: Recurrent(nn.GRU), sequences, square),
    "rnn": Case(lambda: Recurrent(nn.RNN), sequences, square),
    "given state": Case(GivenState, sequences, square),
    "mixer": Case(lambda: Residual(Mixer), sequences, square),
    "wavenet": Case(WaveNet, sequences, square),
    "resnet": Case(ResNet, images, square),
    "vgg": Case(Vgg, images, square),
    "convnext": Case(lambda: Convolutions(ConvNext), images, square),
    "group norm": Case(lambda: Convolutions(group_normed), images, square),
    "vit": Case(lambda: Vit(WIDTH, Alibi), images, square),
}
