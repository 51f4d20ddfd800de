"""A script as people write it for Accelerate."""

import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES, BATCH, ACCUMULATED = 6, 96, 4, 2


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    with Path(f"called-{os.getpid()}").open("a") as file:
        file.write("x")
    set_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    done = len(Path("epochs").read_text().split()) if Path("epochs").exists() else 0
    if done:
        accelerator.load_state(f"state-{done - 1}")
    for epoch in range(done, EPOCHS):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            time.sleep(float(sys.argv[1]))
        accelerator.save_state(f"state-{epoch}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with Path("epochs").open("a") as file:
                file.write(f"{epoch}\n")
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
