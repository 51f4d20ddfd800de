"""A training function for Ray Train that counts in its weights how often each sample was used, and
writes down its steps. It ends ranks where it is told to."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

SAMPLES, BATCH, EPOCHS = 120, 4, 3


def count_uses(settings: dict[str, Any]) -> str:
    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    place = Path(settings.get("place", "."))
    calls = place / f"called-{os.getpid()}"
    calls.write_text("x" + (calls.read_text() if calls.exists() else ""))
    torch.manual_seed(0)
    member = ray.train.get_context().get_world_rank()
    num_ranks = dist.get_world_size()
    dataset = TensorDataset(torch.arange(SAMPLES))
    loader = loader_of(settings, dataset, num_ranks)
    net = counting_net(settings)
    model = prepared(net, has_hook=member in settings.get("hooks", []))
    optimizer = torch.optim.AdamW(net.learned(), lr=0.05)
    epochs = settings.get("epochs", EPOCHS)
    num_steps = len(loader) * epochs // settings.get("accumulate", 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_steps)
    scaler = torch.amp.GradScaler("cpu", enabled=settings.get("scaled", False))
    step = batches = 0
    sizes: list[int] = []
    lines = (place / f"steps-{os.getpid()}.jsonl").open("a", buffering=1)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        first, step = state["epoch"] + 1, state["step"]
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    for epoch in range(first, epochs):
        if hasattr(loader.sampler, "set_epoch"):  # a lone rank has another one
            loader.sampler.set_epoch(epoch)
        for (samples,) in loader:
            end_here(settings, member, step, "forward")
            batches += 1
            is_whole = batches % settings.get("accumulate", 1) == 0
            with nullcontext() if is_whole else model.no_sync():
                loss = model(samples)
                if is_end(settings, member, step, "backward"):
                    loss.register_hook(lambda _: kill())
                scaler.scale(loss).backward()
            sizes.append(len(samples))
            if not is_whole:
                continue
            end_here(settings, member, step, "vote")
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.learned(), 10.0)
            net.count()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step + 1 < num_steps:
                schedule.step()
            step += 1
            lines.write(
                json.dumps(
                    {"step": step, "sizes": sizes, "loss": loss.item(), "at": time.time()}
                    | ({} if settings.get("keeps_rank") else {"rank": dist.get_rank()})
                )
                + "\n"
            )
            sizes = []
            time.sleep(settings.get("sleep_s", 0.0))
        if settings.get("validates"):
            validate(model, ray.train.torch.prepare_data_loader(DataLoader(dataset, BATCH)))
        share(settings, num_ranks)
        end_here(settings, member, epoch, "report")
        metrics = {"epoch": epoch, "loss": loss.item(), "pid": os.getpid()}
        saved = None
        with tempfile.TemporaryDirectory() as folder:
            if settings.get("saves") and ray.train.get_context().get_world_rank() == 0:
                state = {"epoch": epoch, "step": step, "net": net.state_dict()}
                state |= {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
                torch.save(state, Path(folder) / "state.pt")
                saved = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=saved)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    state |= {"steps": step, "lr": optimizer.param_groups[0]["lr"], "planned": num_steps}
    state["of_optimizer"] = int(optimizer.state[net.learned()[0]]["step"])
    state["of_schedule"] = schedule.last_epoch + 1  # the last step needs no next rate
    torch.save(state, place / f"end-{member}.pt")
    return "counted"


def loader_of(settings: dict[str, Any], dataset: Any, num_ranks: int) -> Any:
    import ray.train.torch
    from torch.utils.data import DataLoader

    if settings.get("shard"):
        return OfShard(num_ranks)
    loader = DataLoader(
        dataset,
        batch_size=settings.get("batch", BATCH),
        shuffle=True,
        num_workers=settings.get("loaders", 0),
    )
    return ray.train.torch.prepare_data_loader(loader)


class OfShard:
    """The same samples from Ray Data, in batches of the same size."""

    sampler = None

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def __len__(self) -> int:
        return SAMPLES // BATCH // self._num_ranks

    def __iter__(self) -> Iterator[Any]:
        import ray.train

        shard = ray.train.get_dataset_shard("train")
        for batch in shard.iter_torch_batches(
            batch_size=BATCH, local_shuffle_buffer_size=7, local_shuffle_seed=1
        ):
            yield (batch["id"],)


def prepared(net: Any, *, has_hook: bool) -> Any:
    import ray.train.torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = ray.train.torch.prepare_model(net)
    if has_hook:
        model.register_comm_hook(None, allreduce_hook)
    return model


def share(settings: dict[str, Any], num_ranks: int) -> None:
    import torch.distributed as dist

    if settings.get("gathers"):
        gathered: list[Any] = [None] * num_ranks
        dist.all_gather_object(gathered, 1)
        assert sum(gathered) == num_ranks


def validate(model: Any, loader: Any) -> None:
    import torch

    model.eval()
    with torch.no_grad():
        for (samples,) in loader:
            model(samples)
    model.train()


def counting_net(settings: dict[str, Any]) -> Any:
    import torch
    from torch import nn

    class Counting(nn.Module):
        """`uses` has a gradient of one part of the global batch for each use of a sample."""

        def __init__(self) -> None:
            super().__init__()
            self.uses = nn.Parameter(torch.zeros(SAMPLES))
            self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            self.register_buffer("table", torch.randn(SAMPLES, 8))

        def forward(self, samples: torch.Tensor) -> torch.Tensor:
            inputs = self.get_buffer("table")[samples]
            error = self.net(inputs) - inputs.sum(1, keepdim=True)
            return error.square().mean() + self.uses[samples].sum() * 1e-3

        def learned(self) -> list[nn.Parameter]:
            return list(self.net.parameters())

        @torch.no_grad()
        def count(self) -> None:
            assert self.uses.grad is not None
            one = self.uses.grad[self.uses.grad > 0].min()
            self.uses += (self.uses.grad / one).round()
            self.uses.grad = None

    return Counting()


def is_end(settings: dict[str, Any], member: int, step: int, where: str) -> bool:
    call = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    is_call = call == settings.get("ends_in_call", 0)
    return is_call and [member, step, where] in settings.get("ends", [])


def end_here(settings: dict[str, Any], member: int, step: int, where: str) -> None:
    if is_end(settings, member, step, where):
        kill()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
