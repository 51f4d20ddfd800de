"""A training function that reports no checkpoint: it counts its epochs by `elastic.torch`."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

EPOCHS, STEPS = 12, 4


def learn_by_epochs(settings: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch
    from torch import nn

    import elastic.torch

    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    inputs = torch.randn(16, 4)
    model = ray.train.torch.prepare_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.zeros(1)
    elastic.torch.keep(average=average)
    elastic.torch.on_missing(samples="survivors")  # all ranks have the same samples
    for epoch in elastic.torch.epochs(EPOCHS):
        for step in range(STEPS):
            if [rank, epoch, step] in settings.get("ends", []):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            average.mul_(0.5).add_(loss.detach())
            time.sleep(settings.get("sleep_s", 0.0))
        schedule.step()
        line = {"epoch": epoch, "size": torch.distributed.get_world_size(), "pid": os.getpid()}
        with Path(settings["place"], "epochs.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    state |= {"average": average, "lr": torch.tensor(schedule.get_last_lr())}
    torch.save(state, Path(settings["place"], f"end-{os.getpid()}.pt"))
