"""Steps per second at one rank against a plain loop of torch, in alternating pairs; what the GPU
idles in a step, and how often the host waits for it.
"""

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.experiment import Table, main, median
from tests.gpu.groups import HAS_GPU, device_of, synchronize
from tests.gpu.models import Gpt2, ResNet50, Small
from tests.workers import session_rig, where
from workers.data.loader import Loader
from workers.data.placement import to_device
from workers.health import gpu
from workers.session import Session

PAIRS, STEPS, WARM = 9, 20, 5
LIMITS = {"fast": 0.97, "bitwise": 0.90}
MAX_SYNCS, MAX_IDLE = 2, 0.02
MODELS: dict[str, tuple[Callable[[], Any], int, int, str]] = {
    "CharLM 1M": (Small, 64, 16, "fp32"),
    "GPT-2 124M bf16": (Gpt2, 16, 4, "bf16"),
    "ResNet-50": (ResNet50, 64, 32, "fp32"),
}
"""Workload, global batch, micro-batch, precision."""


class Ours(session_rig.Rig):
    """One worker's session, without processes around it but for its loader."""

    def __init__(self, workload: Any, reduction: str, batch: int, micro: int, precision: str):
        sizes = {"global_batch": batch, "micro_batch": micro, "precision": precision}
        super().__init__(reduction, workload, clip_norm=None, steps=10**6, **sizes)
        self.loader = Loader(workload, 3, batch, micro)
        self.session = Session(self.spec, workload, self.member, self.loader)
        self.form(1, 0)

    def step(self) -> None:
        with self.session.next_step() as step:
            for batch in step.microbatches():
                step.backward(self.workload.loss(self.session.model, batch))
            step.commit()


class Plain:
    """The loop that a person writes."""

    def __init__(self, workload: Any, batch: int, micro: int, precision: str, device: Any) -> None:
        self._workload, self._device, self._count = workload, device, batch // micro
        self._casts = precision == "bf16"
        torch.manual_seed(3)
        self._model = workload.build_model().to(device)
        self._optimizer = workload.build_optimizer(list(self._model.parameters()))
        self._loader = Loader(workload, 3, batch, micro)
        self._step = 0

    def step(self) -> None:
        for i in range(self._count):
            batch = to_device(self._loader.fetch(self._step, i).batch, self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._casts):
                loss = self._workload.loss(self._model, batch)
            (loss / self._count).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss.item()  # a loop that says how it goes
        self._step += 1


def steps_per_s(step: Callable[[], None], count: int, device: torch.device) -> float:
    for _ in range(WARM):
        step()
    synchronize(device)
    began = time.monotonic()
    for _ in range(count):
        step()
    synchronize(device)
    return count / (time.monotonic() - began)


def syncs_of(step: Callable[[], None]) -> int:
    """How often the host waits in it, by torch's own count."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in found)


def idle_of(step: Callable[[], None]) -> float:
    """The part of three steps in which no kernel runs."""
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    on_device = [e.time_range for e in profile.events() if "CUDA" in str(e.device_type)]
    return idle_part([(r.start, r.end) for r in on_device])


def idle_part(spans: list[tuple[float, float]]) -> float:
    """Of the time from the first one's start to the last one's end, what none of them covers."""
    covered, end = 0.0, min(spans)[0]
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return 1 - covered / (end - min(spans)[0])


def body(table: Table, arguments: argparse.Namespace) -> None:
    where.go_to("cuda" if HAS_GPU else "cpu")
    device = device_of()
    for name, (workload, batch, micro, precision) in MODELS.items():
        if name == "ResNet-50" and importlib.util.find_spec("torchvision") is None:
            table.tell(name, "torchvision is missing")
            continue
        if arguments.only and arguments.only not in name:
            continue
        for reduction, limit in LIMITS.items():
            if reduction == "bitwise" and HAS_GPU:
                gpu.make_deterministic()
            ours = Ours(workload(), reduction, batch, micro, precision)
            plain = Plain(workload(), batch, micro, precision, device)
            ratios = [
                steps_per_s(ours.step, arguments.steps, device)
                / steps_per_s(plain.step, arguments.steps, device)
                for _ in range(arguments.pairs)
            ]
            table.at_least(f"{name}, {reduction}: of a plain loop's steps/s", median(ratios), limit)
            if HAS_GPU:
                table.at_most(f"{name}, {reduction}: host waits", syncs_of(ours.step), MAX_SYNCS)
                idle = idle_of(ours.step)
                table.at_most(f"{name}, {reduction}: GPU idle", idle, MAX_IDLE)
                table.tell(f"{name}, {reduction}: idle in the plain loop", idle_of(plain.step))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", help="a part of a model's name")


if __name__ == "__main__":
    sys.exit(main(body, options=options))
