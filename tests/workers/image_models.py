"""Models of images, as people build them, small; their cases are pipeline_models.py's."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def images(generator: torch.Generator, index: int) -> Tensor:
    return torch.randn(3, 3, 8, 8, generator=generator)


class BasicBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    """Sequences of blocks with BatchNorm, which the root has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(BasicBlock(4), BasicBlock(4))
        self.layer2 = nn.Sequential(nn.Conv2d(4, 6, 1), BasicBlock(6))
        self.pool, self.bn2 = nn.AdaptiveAvgPool2d(1), nn.BatchNorm1d(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.bn2(torch.flatten(self.pool(x), 1)))


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm, self.wide, self.narrow = nn.LayerNorm(4), nn.Linear(4, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.1))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


class Convolutions(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 2, stride=2)
        self.stages = nn.Sequential(*(block() for _ in range(3)))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((-1, -2)))


def group_normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())


class Vit(nn.Module):
    """Patches, a class token and learned positions that are parameters of the root."""

    def __init__(self, width: int, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
