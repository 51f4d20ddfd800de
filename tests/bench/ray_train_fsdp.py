"""The peer of `fsdp_recovery.py`: tuned Ray Train with FSDP2 and a DCP checkpoint every 10 steps.

The model, data and accumulation of torchrun_fsdp.py; what is tuned and printed is ray_train.py's.
    python -m tests.bench.ray_train_fsdp --workers 4 --kill-at 15
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.ray_train import CHECKPOINT_EVERY, TUNED, mark_step, measure


def train_loop(config: dict[str, Any]) -> None:
    """Runs in each of Ray Train's workers."""
    import torch
    import torch.distributed.checkpoint as dcp
    from ray import train
    from ray.train import Checkpoint, get_checkpoint, get_context
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    from tests.bench.torchrun_ddp import batches_of_rank
    from tests.bench.torchrun_fsdp import MODEL
    from workers.workloads.charlm import CharLM

    torch.set_num_threads(1)
    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    workload = CharLM(**MODEL)
    torch.manual_seed(0)
    model, mesh = workload.build_model(), init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = workload.build_optimizer(list(model.parameters()))
    begin = 0
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        with checkpoint.as_directory() as directory:
            dcp.load(state, checkpoint_id=directory)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        begin = state["step"]
    marks = Path(config["marks"])
    (marks / f"pid-{rank}").write_text(str(os.getpid()))
    dataset = workload.dataset()
    steps = config["steps"]
    plan = list(
        batches_of_rank(len(dataset), steps=steps, ids=8, micro_batch=2, rank=rank, world=world)
    )
    per_rank = len(plan) // steps
    batches = iter(DataLoader(dataset, batch_sampler=plan[begin * per_rank :], num_workers=1))
    for step in range(begin, steps):
        for _ in range(per_rank):
            (workload.loss(model, next(batches)) / per_rank).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            mark_step(marks, step + 1, world)
        if (step + 1) % CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as directory:
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": moments, "step": step + 1}
                dcp.save(state, checkpoint_id=directory)
                train.report({"step": step + 1}, checkpoint=Checkpoint.from_directory(directory))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--kill-at", type=int, default=0, help="0: kill nobody")
    arguments = parser.parse_args()
    os.environ.update(TUNED)
    found = measure(
        train_loop, workers=arguments.workers, steps=arguments.steps, kill_at=arguments.kill_at
    )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
