"""A script as people write it for Lightning's Fabric."""

import os
import sys
import time
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES, BATCH, ACCUMULATED = 6, 96, 4, 2


def main() -> None:
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp")
    fabric.launch()
    with Path(f"called-{os.getpid()}").open("a") as file:
        file.write("x")
    fabric.seed_everything(0)
    inputs = torch.randn(SAMPLES, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=BATCH, shuffle=True))
    done = len(Path("epochs").read_text().split()) if Path("epochs").exists() else 0
    if done:
        fabric.load(f"state-{done - 1}", {"model": model, "optimizer": optimizer})
    for epoch in range(done, EPOCHS):
        for number, (batch, targets) in enumerate(loader, 1):
            is_whole = number % ACCUMULATED == 0
            with fabric.no_backward_sync(model, enabled=not is_whole):
                fabric.backward(nn.functional.mse_loss(model(batch), targets))
            if is_whole:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            time.sleep(float(sys.argv[1]))
        fabric.save(f"state-{epoch}", {"model": model, "optimizer": optimizer})
        fabric.barrier()
        if fabric.global_rank == 0:
            with Path("epochs").open("a") as file:
                file.write(f"{epoch}\n")
        fabric.barrier()


if __name__ == "__main__":
    main()
