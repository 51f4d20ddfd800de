"""Workloads on Parquet and Ray Data whose weights count how often each row was used."""

import time

import torch
from torch import nn

import elastic


def third_dropped(table):
    """Drops some rows, repeats others: by their content alone."""
    x = table.column("row").to_numpy()
    return table.take([i for i in range(len(x)) for _ in range(x[i] % 3)])


class Counts(elastic.Workload):
    """SGD with rate 1 on one weight per row: after training, minus the weight is the uses."""

    def __init__(self, path, rows, sleep=0.0, transform=False, on_bad_file="raise", window=4000):
        self.path, self.rows, self.sleep, self.transform = path, rows, sleep, transform
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
        time.sleep(self.sleep)
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
