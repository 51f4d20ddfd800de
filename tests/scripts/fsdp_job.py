"""Own FSDP in a training function as people write it for Ray Train; each world size gives the same
weights."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

EPOCHS, STEPS = 6, 4
KILLED_AT = (3, 2)


def learn(settings: dict[str, Any]) -> str:
    """settings: `kills`, where a file is named once a rank has killed itself in its backward."""
    import ray.train
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))
    mesh = init_device_mesh("cpu", (size,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=whole,
        )
        first = state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            if (rank, epoch, step) == (1, *KILLED_AT) and settings.get("kills"):
                loss.register_hook(lambda _: kill_once(Path(settings["kills"])))
            loss.backward()
            for parameter in model.parameters():  # a mean of three equal numbers may be another
                local = parameter.grad.to_local()
                local.copy_((local * 2**20).round() / 2**20)
            optimizer.step()
        states = get_state_dict(model, optimizer, options=whole)
        with tempfile.TemporaryDirectory() as folder:
            brought = None
            if rank == 0:
                state = {"model": states[0], "optimizer": states[1], "epoch": epoch}
                torch.save(state, Path(folder) / "state.pt")
                brought = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, "ranks": size}, checkpoint=brought)
    return "learned"


def kill_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
