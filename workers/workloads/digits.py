"""`Digits`: a small convolutional network with BatchNorm on scikit-learn's 8x8 digits.

It is here for what `CharLM` has not: buffers, (sum, weight) losses and an accuracy. No Ray here.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import elastic
from elastic.protocol.errors import WrongInput

VALIDATION_SAMPLES = 297  # of 1797


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) in 0..1 and their labels; read once per process."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise WrongInput(
            "Digits needs scikit-learn, which is not installed: "
            "pip install 'elastic-ray-trainer[examples]'"
        ) from error
    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    return pixels, torch.from_numpy(labels).long()


class Digits(elastic.Workload):
    """Ten digits, 1,500 training images; about 97 % right after a few hundred steps."""

    def __init__(self, *, width: int = 16, lr: float = 0.05, momentum: float = 0.9) -> None:
        self.width = width
        self.lr = lr
        self.momentum = momentum

    def build_model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )

    def build_optimizer(self, params: list[nn.Parameter]) -> Optimizer:
        return SGD(params, lr=self.lr, momentum=self.momentum)

    def dataset(self) -> TensorDataset:
        images, labels = digits()
        return TensorDataset(images[VALIDATION_SAMPLES:], labels[VALIDATION_SAMPLES:])

    def validation(self) -> TensorDataset:
        images, labels = digits()
        return TensorDataset(images[:VALIDATION_SAMPLES], labels[:VALIDATION_SAMPLES])

    def loss(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)

    def accuracy(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        images, labels = batch
        return (model(images).argmax(dim=1) == labels).sum(), len(labels)

    def evaluate(self, session) -> None:
        session.log(accuracy=session.evaluate(self.validation(), self.accuracy))
