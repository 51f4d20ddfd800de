"""Parquet files in a bucket or a folder: a regression on rows that Ray tasks read and shuffle.

`python examples/rows.py PLACE` writes the files. PLACE is a folder or a URI of pyarrow.fs, such as
s3://bucket/rows. The job is `Rows`, with `--set place=PLACE`.
"""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs
from torch.nn import functional as F

import elastic

NUM_FILES, ROWS_PER_FILE, FEATURES = 4, 1000, 8


def scaled(table):
    """Runs in a Ray task, on the rows of one row group."""
    features = np.stack(table["features"].to_numpy()).astype(np.float32) / 100
    return {"features": features, "target": table["target"].to_numpy().astype(np.float32)}


class Rows(elastic.Workload):
    def __init__(self, place="rows", lr=0.05):
        self.place, self.lr = place, lr

    def build_model(self):
        return torch.nn.Linear(FEATURES, 1)

    def build_optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr)

    def dataset(self):
        return elastic.data.parquet(self.place, transform=scaled, keeps_rows=True)

    def loss(self, model, batch):
        return F.mse_loss(model(batch["features"])[:, 0], batch["target"])


def write(place):
    """The target is the sum of a row's first two features, over 100."""
    store, folder = (
        fs.FileSystem.from_uri(place) if "://" in place else (fs.LocalFileSystem(), place)
    )
    store.create_dir(folder)
    generator = np.random.default_rng(0)
    for number in range(NUM_FILES):
        features = generator.integers(-100, 101, (ROWS_PER_FILE, FEATURES))
        target = features[:, :2].sum(axis=1) / 100
        table = pa.table({"features": list(features), "target": target})
        pq.write_table(table, f"{folder}/{number}.parquet", filesystem=store, row_group_size=250)
    print(f"{NUM_FILES * ROWS_PER_FILE} rows in {NUM_FILES} files in {place}")


if __name__ == "__main__":
    write(sys.argv[1])
