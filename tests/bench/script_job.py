"""The script that `scripts.py` measures, as people write one for Ray Train; the same on both sides.

python tests/bench/script_job.py FOLDER --workers 2 --steps 200
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT_EVERY = 100
SAMPLES, BATCH, WIDTH = 12_800, 64, 256


def train(config: dict[str, Any]) -> None:
    entered_at = time.time()
    marks, context = Path(config["folder"]), ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, WIDTH))
    dataset = TensorDataset(torch.randn(SAMPLES, WIDTH))
    loader = prepare_data_loader(DataLoader(dataset, BATCH, shuffle=True))
    begin, checkpoint = 0, ray.train.get_checkpoint()
    optimizer = torch.optim.AdamW(module.parameters())
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt")
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    model = prepare_model(module)
    (marks / f"pid-{rank}").write_text(str(os.getpid()))
    for step, (batch,) in zip(range(begin, config["steps"]), passes(loader), strict=False):
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0:
            line = {"step": step + 1, "time": time.time(), "world": world, "loss": loss.item()}
            line["entered_at"] = entered_at
            with (marks / "steps.jsonl").open("a") as file:
                print(json.dumps(line), file=file)
        if (step + 1) % CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as directory:
                saved = None
                if rank == 0:
                    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "step": step + 1}, Path(directory) / "state.pt")
                    saved = Checkpoint.from_directory(directory)
                ray.train.report({"step": step + 1}, checkpoint=saved)
    began = time.time()
    for number in range(config["reports"]):
        ray.train.report({"number": number})
    if rank == 0:
        (marks / "reports_s").write_text(str(time.time() - began))


def passes(loader: DataLoader[Any]) -> Iterator[Any]:
    """Over the data, without end."""
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--reports", type=int, default=0, help="without a checkpoint, at the end")
    given = parser.parse_args()
    TorchTrainer(
        train,
        train_loop_config={
            "folder": given.folder,
            "steps": given.steps,
            "reports": given.reports,
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=given.workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(Path(given.folder) / "storage"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


if __name__ == "__main__":
    main()
