"""The models that experiments train: CharLM (1 M parameters), GPT-2 (124 M), ResNet-50."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.workloads.charlm import CharLM, Transformer


class Seeded:
    """Samples are drawn once; what they hold does not matter to a speed."""

    loader_processes = 1
    num_samples = 512

    def build_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)


class Small(CharLM):
    """1 M parameters; its launches are all there is to see."""

    loader_processes = 1


class Gpt2(Seeded):
    """124 M parameters, as GPT-2 has them."""

    context, vocabulary = 512, 50257

    def __init__(self, layers: int = 12, width: int = 768) -> None:
        self.layers, self.width = layers, width

    def build_model(self) -> nn.Module:
        model = Transformer(
            width=self.width, layers=self.layers, heads=12, context=self.context, dropout=0.0
        )
        model.characters = nn.Embedding(self.vocabulary, self.width)
        model.head = nn.Linear(self.width, self.vocabulary, bias=False)
        model.head.weight = model.characters.weight
        return model

    def dataset(self) -> list[tuple[Tensor, Tensor]]:
        drawn = torch.Generator().manual_seed(1)
        size = (self.num_samples, self.context + 1)
        tokens = torch.randint(0, self.vocabulary, size, generator=drawn)
        return [(row[:-1], row[1:]) for row in tokens]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


class ResNet50(Seeded):
    num_samples = 128

    def build_model(self) -> nn.Module:
        from torchvision.models import resnet50

        return resnet50()

    def dataset(self) -> list[tuple[Tensor, int]]:
        drawn = torch.Generator().manual_seed(1)
        images = torch.randn(self.num_samples, 3, 224, 224, generator=drawn)
        return [(image, i % 1000) for i, image in enumerate(images)]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)
