"""The script with which `script_reports.py` measures reports and joins, as people write one for Ray
Train: it reports a checkpoint every few steps, and asks for its rank when it saves.

python tests/bench/script_reports_job.py FOLDER --workers 4
It writes down what it does in FOLDER/marks.jsonl, and ends once there is a file FOLDER/enough.
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
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, WIDTH = 6_400, 16, 128
KEPT = 5


def train(config: dict[str, Any]) -> None:
    entered_at = time.time()
    folder, context = Path(config["folder"]), ray.train.get_context()

    def mark(kind: str, step: int, **more: Any) -> None:
        line = {"kind": kind, "step": step, "pid": os.getpid(), "entered_at": entered_at, **more}
        with (folder / "marks.jsonl").open("a") as file:
            file.write(json.dumps({**line, "time": time.time()}) + "\n")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, WIDTH))
    optimizer = torch.optim.AdamW(module.parameters())
    begin, name, checkpoint = 0, "", ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt")
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin, name = state["step"], Path(checkpoint.path).name
    mark("entered", begin, checkpoint=name, world=context.get_world_size())
    model = prepare_model(module)
    dataset = TensorDataset(torch.randn(SAMPLES, WIDTH))
    loader = prepare_data_loader(DataLoader(dataset, BATCH, shuffle=True))
    for step, (batch,) in zip(itertools.count(begin + 1), passes(loader), strict=False):
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        mark("stepped", step)
        time.sleep(config["pause_s"])
        if step % config["every"]:
            continue
        mark("reports", step)
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if context.get_world_rank() == 0:
                state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, Path(directory) / "state.pt")
                saved = Checkpoint.from_directory(directory)
            ray.train.report({"step": step}, checkpoint=saved)
        mark("returned", step)
        if broadcast_from_rank_zero((folder / "enough").exists()):
            return


def passes(loader: DataLoader[Any]) -> Iterator[Any]:
    """Over the data, without end."""
    for epoch in itertools.count():
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=int, default=5, help="steps for each report")
    parser.add_argument("--pause-s", type=float, default=0.02, help="after each step")
    given = parser.parse_args()
    TorchTrainer(
        train,
        train_loop_config={
            "folder": given.folder,
            "every": given.every,
            "pause_s": given.pause_s,
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=given.workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(Path(given.folder) / "storage"),
            checkpoint_config=CheckpointConfig(num_to_keep=KEPT),
        ),
    ).fit()


if __name__ == "__main__":
    main()
