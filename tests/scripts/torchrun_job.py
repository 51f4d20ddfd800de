"""A script as people write it for torchrun. Each world size gives the same weights."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STATE = Path("state.pt")


def rounded(gradient: torch.Tensor) -> torch.Tensor:
    """The mean of three such numbers, if they are equal, may be another, but rounds to theirs."""
    return (gradient * 2**12).round() / 2**12


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--sleep-s", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--only-once", action="store_true")
    given = parser.parse_args()
    torch.multiprocessing.set_start_method("spawn")
    if given.only_once:
        torch.library.define("elastic_of_test::once", "() -> ()")
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    layer = nn.Linear(8, 1)
    for parameter in layer.parameters():
        parameter.register_hook(rounded)  # before ranks exchange it
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    first = 0
    if STATE.exists():
        state = torch.load(STATE)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    for epoch in range(first, given.epochs):
        for _ in range(5):
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            for parameter in layer.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)
                parameter.grad.copy_(rounded(parameter.grad))
            optimizer.step()
            time.sleep(given.sleep_s)
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if epoch == given.fail_at and restarts == 0:
            return 3
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, "state.new")
            os.replace("state.new", STATE)
            with Path("epochs.jsonl").open("a") as file:
                file.write(json.dumps({"epoch": epoch, "pids": pids, "restarts": restarts}) + "\n")
        dist.barrier()
    print(f"rank {rank} of {size} has finished", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
