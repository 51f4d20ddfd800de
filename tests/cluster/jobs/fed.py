"""Workloads on Parquet and Ray Data whose weights count how often each row was used."""

import torch
from dropping import third_dropped  # pyright: ignore[reportMissingImports]
from torch import nn
from toy import Resting  # pyright: ignore[reportMissingImports]

import elastic


class Counts(Resting):
    """SGD with rate 1 on one weight per row: after training, minus the weight is the uses."""

    def __init__(
        self,
        path,
        rows,
        *,
        sleep=0.0,
        until=None,
        transform=False,
        on_bad_file="raise",
        window=4000,
    ):
        super().__init__(sleep, until)
        self.path, self.rows, self.transform = path, rows, transform
        self.on_bad_file, self.window = on_bad_file, window

    def build_model(self):
        model = nn.Module()
        model.uses = nn.Parameter(torch.zeros(self.rows))
        return model

    def build_optimizer(self, params):
        return torch.optim.SGD(params, lr=1.0)

    def dataset(self):
        return elastic.data.parquet(
            self.path,
            window_bytes=self.window,
            prefetch_bytes=4 * self.window,
            transform=third_dropped if self.transform else None,
            on_bad_file=self.on_bad_file,
        )

    def loss(self, model, batch):
        self.rest()
        return model.uses[batch["row"]].sum(), torch.ones(())


class FromRay(Counts):
    def dataset(self):
        import ray.data

        return ray.data.read_parquet(self.path)


class Streaming(Counts):
    def dataset(self):
        class Rows(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(range(self.rows))

        return Rows()
