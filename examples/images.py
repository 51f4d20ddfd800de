"""Image classification: a convolutional network with BatchNorm on scikit-learn's 8x8 digits.

Each image is shifted at random. The generator that draws is seeded by the sample's position in the
stream, so that the shifts are the same whoever loads the sample. Needs `pip install '.[examples]'`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import elastic

HELD_OUT = 297


class Images(Dataset):
    def __init__(self, is_held_out):
        pixels, labels = load_digits(return_X_y=True)
        chosen = slice(None, HELD_OUT) if is_held_out else slice(HELD_OUT, None)
        self.images = torch.from_numpy(pixels[chosen]).float().reshape(-1, 1, 8, 8) / 16
        self.labels = torch.from_numpy(labels[chosen]).long()
        self.is_shifted = not is_held_out

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.is_shifted:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = image.roll((down, right), dims=(1, 2))
        return image, self.labels[i]


class Digits(elastic.Workload):
    def __init__(self, width=16, lr=0.05):
        self.width, self.lr = width, lr

    def build_model(self):
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

    def build_optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9)

    def dataset(self):
        return Images(is_held_out=False)

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def accuracy(self, model, batch):
        """(sum, weight): what is right in a batch, and how many there are."""
        images, labels = batch
        return (model(images).argmax(dim=1) == labels).sum(), len(labels)

    def evaluate(self, session):
        session.log(accuracy=session.evaluate(Images(is_held_out=True), self.accuracy))
