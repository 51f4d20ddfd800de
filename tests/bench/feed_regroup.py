"""What the feed adds to a recovery: one of 4 workers killed at random, the same rows from Parquet
and from memory.

    python -m tests.bench.feed_regroup [--rounds 2] [--kills 5]

A round is one run of each kind with so many kills, each with all workers back. Compared are the
medians of `total_s` of result.json: from the last sign of life to the next committed step.
"""

import argparse
import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic
from tests.bench.harness import (
    console,
    elastic_run,
    machine,
    percentile,
    record,
    report,
    storage_directory,
)

WORKERS, WIDTH, ROWS = 4, 256, 20_011
WARM_STEPS = 5
OPTIONS = {"workers": f"2..{WORKERS}", "steps": 100_000, "max_failures": 999}
BATCH = {"global_batch": 64, "micro_batch": 8, "reduction": "bitwise"}


class Fed(elastic.Workload):
    """A regression on rows of Parquet, windows of a megabyte."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 1))

    def build_optimizer(self, params: Any) -> Any:
        return torch.optim.SGD(params, lr=1e-3)

    def dataset(self) -> Any:
        return elastic.data.parquet(self.folder, window_bytes=2**20, prefetch_bytes=2**24)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"])


class InMemory(Fed):
    """The same rows from a map-style dataset."""

    def dataset(self) -> Any:
        table = pq.read_table(self.folder)
        x = table["x"].combine_chunks().flatten().to_numpy().reshape(-1, WIDTH)
        return Rows(torch.from_numpy(x.copy()), torch.from_numpy(table["y"].to_numpy().copy()))


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def make_set(folder: Path) -> None:
    draw = np.random.default_rng(0)
    values = draw.random(ROWS * WIDTH, np.float32)
    x = pa.FixedSizeListArray.from_arrays(values, WIDTH)
    table = pa.table({"x": x, "y": draw.random(ROWS, np.float32)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=1021)


def is_full(status: dict[str, Any]) -> bool:
    return status["world_size"] == WORKERS and status["phase"] == "running"


def recoveries(storage: Path, kind: str, kills: int, dice: random.Random) -> list[float]:
    """Seconds of each recovery of one run, ended as soon as the last is over."""
    target = f"tests.bench.feed_regroup:{kind}"
    set_ = {"folder": repr(str(storage / "set"))}
    name = f"{kind}-{time.monotonic_ns()}"
    with elastic_run(storage, name, target=target, set_=set_, **OPTIONS, **BATCH) as run:
        for _ in range(kills):
            status = run.wait_until(is_full, 120)
            wanted = status["step"] + WARM_STEPS + dice.randrange(20)
            status = run.wait_until(lambda s, at=wanted: is_full(s) and s["step"] >= at, 120)
            time.sleep(dice.uniform(0, 0.1))  # anywhere in a step
            os.kill(dice.choice(status["workers"])["pid"], signal.SIGKILL)
            run.wait_until(lambda s, g=status["generation"]: s["generation"] > g, 60)
        status = run.wait_until(lambda s: s["phase"] == "running", 60)
        run.wait_until(lambda s, at=status["step"]: s["step"] > at + WARM_STEPS, 60)
        os.kill(run.process.pid, signal.SIGTERM)
        run.process.wait(60)
        found = run.result()["recoveries"]
    console.print(f"{kind}: {[round(each['total_s'], 3) for each in found]} s")
    return [each["total_s"] for each in found]


def main(rounds: int, kills: int) -> None:
    about = machine(WORKERS)
    seconds: dict[str, list[float]] = {"Fed": [], "InMemory": []}
    with storage_directory() as storage:
        (storage / "set").mkdir()
        make_set(storage / "set")
        for number in range(rounds):
            for kind, found in seconds.items():
                found += recoveries(storage, kind, kills, random.Random(number))
    fed, plain = seconds["Fed"], seconds["InMemory"]
    extra = statistics.median(fed) - statistics.median(plain)
    results = {
        "fed": f"p50 {1e3 * statistics.median(fed):.0f} ms, worst {1e3 * max(fed):.0f}",
        "in memory": f"p50 {1e3 * statistics.median(plain):.0f} ms, worst {1e3 * max(plain):.0f}",
        "p90": f"{1e3 * percentile(fed, 90):.0f} and {1e3 * percentile(plain, 90):.0f} ms",
        "added by the feed": f"{1e3 * extra:.0f} ms",
    }
    report("Recovery of a fed run", ("measure", "value"), list(results.items()))
    setting = f"one of {WORKERS} workers killed, {len(fed)} and {len(plain)} recoveries"
    record("feed_regroup", about=about, setting=setting, results=results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5, help="in each run")
    options = parser.parse_args()
    main(options.rounds, options.kills)
