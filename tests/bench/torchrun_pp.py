"""The peer of `pipeline.py`: torch.distributed.pipelining's 1F1B, as its users write it, under
torchrun. Two stages of the same model, micro-batches, loader process and clipping.

    torchrun --nproc-per-node 2 -m tests.bench.torchrun_pp --steps 12
Rank 0 prints one JSON line: the median milliseconds per step after the warm-up. With `--place` it
saves every few steps by torch.distributed.checkpoint and goes on from the newest one; `pipeline.py`
kills a rank of it.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.bench.torchrun_ddp import batches_of_rank
from tests.bench.torchrun_fsdp import MODEL, WARMUP_STEPS
from workers.workloads.charlm import CharLM


class Part(nn.Module):
    """The blocks of a stage, and the ends of the model where they are."""

    def __init__(self, model: Any, rank: int, world: int) -> None:
        super().__init__()
        count = len(model.blocks)
        first, last = count * rank // world, count * (rank + 1) // world
        self.blocks = model.blocks[first:last]
        self.is_first, self.is_last = rank == 0, rank == world - 1
        if self.is_first:
            self.characters, self.positions = model.characters, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.characters(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), following.flatten())


def starts() -> int:
    """How often torchrun has started all ranks again."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Saves:
    """The state of all stages; and a line for each step, and the process of each rank, for who
    looks on."""

    def __init__(self, place: str, every: int, part: nn.Module, optimizer: Any) -> None:
        self._place, self._every = Path(place) if place else None, every
        self._part, self._optimizer = part, optimizer
        if self._place is not None:
            (self._place / f"rank-{dist.get_rank()}").write_text(str(os.getpid()))

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._part, self._optimizer)
        return {f"stage-{dist.get_rank()}": {"model": model, "optimizer": optimizer}}

    def load(self) -> int:
        """The steps of the newest one."""
        found = sorted(self._place.glob("step-*/.metadata")) if self._place else []
        if not found:
            return 0
        state = self._state()
        dcp.load(state, checkpoint_id=str(found[-1].parent))
        mine = state[f"stage-{dist.get_rank()}"]
        set_state_dict(
            self._part,
            self._optimizer,
            model_state_dict=mine["model"],
            optim_state_dict=mine["optimizer"],
        )
        return int(found[-1].parent.name.removeprefix("step-"))

    def after_step(self, number: int) -> None:
        if self._place is None:
            return
        if number % self._every == 0:
            dcp.save(self._state(), checkpoint_id=str(self._place / f"step-{number:06}"))
        if dist.get_rank() == 0:
            with (self._place / "steps.jsonl").open("a") as file:
                line = {"step": number, "time": time.time(), "start": starts()}
                file.write(json.dumps(line) + "\n")


def step_seconds(arguments: argparse.Namespace) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    workload = CharLM(**MODEL)
    torch.manual_seed(0)
    part = Part(workload.build_model(), rank, world)
    count = arguments.global_batch // arguments.micro_batch
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=loss_of)
    optimizer = workload.build_optimizer(list(part.parameters()))
    scheduler = workload.build_scheduler(optimizer)
    dataset = workload.dataset()
    plan = batches_of_rank(
        len(dataset), steps=arguments.steps, ids=1, micro_batch=arguments.global_batch,
        rank=0, world=1,
    )  # fmt: skip
    saves = Saves(arguments.place, arguments.save_every, part, optimizer)
    batches = iter(DataLoader(dataset, batch_sampler=list(plan), num_workers=1))
    seconds: list[float] = []
    for number in range(saves.load() + 1, arguments.steps + 1):
        begin = time.perf_counter()
        characters, following = next(batches)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(characters)
        else:
            schedule.step(target=following, losses=losses)
        squares = torch.stack([p.grad.square().sum() for p in part.parameters()]).sum()
        dist.all_reduce(squares)
        coefficient = min(1.0, arguments.clip_norm / (float(squares.sqrt()) + 1e-6))
        for parameter in part.parameters():
            parameter.grad.mul_(coefficient)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = torch.stack(losses).sum() if losses else torch.zeros(())
        dist.all_reduce(total.detach())
        saves.after_step(number)
        seconds.append(time.perf_counter() - begin)
    return seconds[WARMUP_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--place", default="", help="of checkpoints; default: none")
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds = step_seconds(arguments)
    if dist.get_rank() == 0:
        print(json.dumps({"ms_per_step": 1000 * statistics.median(seconds)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
