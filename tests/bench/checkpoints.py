"""Saving, in one process: how long training is blocked, how much slower it is, bytes per second.

Blocked: begin of the save plus what is left to copy when the next optimizer step comes, after half
a second of computing; against a memcpy of the same bytes into touched memory. Slow-down: the extra
seconds of a training loop from the begin of a save until it is durable, against
torch.distributed.checkpoint.async_save in the same loop. Written: a save with nothing beside it,
against `dd conv=fsync` on the same disk. Loading is in checkpoint_load.py.
    python -m tests.bench.checkpoints
"""

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as workers do, before torch loads

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from elastic.protocol.layout import Position
from elastic.protocol.manifest import SavedPart
from elastic.protocol.mesh import DDP, Mesh
from elastic.protocol.messages.to_controller import PartSaved
from elastic.protocol.timeouts import timeouts_of
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.bench.harness import console, machine, record, report, storage_directory
from workers.checkpoint.saver import Saver
from workers.tensors.local import layout_of
from workers.train_state.serialization import capture
from workers.train_state.train_state import TrainState

SIZES_MB = (200, 1000)
COMPUTE_S = 0.5
FEWEST_STEPS = 4
WIDTH = 1024
BATCH = 64


class Publisher:
    """The controller's part of a save: one rank's part makes a checkpoint."""

    def __init__(self, storage: Path) -> None:
        self.catalogue = Catalogue(open_folder(str(storage)).at("checkpoints"))
        self.concluded_saves: dict[int, bool] = {}

    def send(self, report: PartSaved) -> None:
        saved = SavedPart.unpack(report.payload)
        self.catalogue.publish(report.step, 1, [saved.part], saved.state, {})
        self.concluded_saves[report.step] = True


class By:
    """A rank that holds everything, as every one does."""

    generation = 1
    layout = staticmethod(layout_of)

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.position = Position(Mesh(DDP, world_size), rank)


def spec() -> WorkerSpec:
    values: dict[str, Any] = {name: None for name in WorkerSpec.__slots__}
    return WorkerSpec(
        **{
            **values,
            "run_id": "bench",
            "has_checkpoints": True,
            "checkpoint_every": 10**6,
            "steps": 10**7,
            "timeouts": timeouts_of(None),
        }
    )


def replica_of(size_mb: int) -> TrainState:
    """Parameters and AdamW's state together have about this size."""
    layers = math.ceil(size_mb * 2**20 / (3 * 4 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    named = dict(model.named_parameters())
    return TrainState(model, named, optimizer, None, clip_norm=None, max_nonfinite=1)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compute(for_s: float) -> None:
    a = torch.randn(256, 256)
    until = time.perf_counter() + for_s
    while time.perf_counter() < until:
        a = torch.tanh(a @ a)


class Training:
    """A loop in this process, and its saves."""

    def __init__(self, storage: Path, size_mb: int) -> None:
        self.storage, self.train_state = storage, replica_of(size_mb)
        self.publisher = Publisher(storage)
        self.saver = Saver(self.publisher, spec())  # type: ignore[arg-type]
        self.saver.open(str(storage))
        _, self.live = capture(self.train_state.model, self.train_state.optimizer, None)
        self.size_bytes = sum(t.nbytes for t in self.live.values())
        self.batch = torch.randn(BATCH, WIDTH)
        self.train_state.step = 1
        # as after the first step of a generation
        self.saver.after_step(self.train_state, By(), is_asked=False)
        repeat(self.step)

    def step(self) -> None:
        self.train_state.model(self.batch).sum().backward()
        self.train_state.settle()
        self.train_state.optimizer.step()
        self.train_state.drop_gradients()

    def begin_save(self) -> Callable[[], bool]:
        """Gives what tells whether it is durable."""
        self.train_state.step += 1
        self.saver.begin(self.train_state, By())
        return lambda: not self.saver.is_busy

    def begin_dcp(self) -> Callable[[], bool]:
        state = {"model": self.train_state.model, "optimizer": self.train_state.optimizer}
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
        target = tempfile.mkdtemp(dir=self.storage)
        future = dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=target)
        return future.done  # type: ignore[union-attr]

    def clear(self) -> None:
        """Room on the disk."""
        for folder in self.storage.iterdir():
            shutil.rmtree(folder, ignore_errors=True)

    def blocked_s(self) -> float:
        begin_s = seconds(self.begin_save)
        compute(COMPUTE_S)
        return begin_s + seconds(self.train_state.settle)

    def slow_down_s(self, begin: Callable[[], Callable[[], bool]], step_s: float) -> float:
        """Extra seconds until the save is durable."""
        began, num_steps = time.perf_counter(), 0
        is_done = begin()
        while not is_done() or num_steps < FEWEST_STEPS:
            self.step()
            num_steps += 1
        return time.perf_counter() - began - num_steps * step_s


def measure(storage: Path, size_mb: int, repeats: int) -> dict[str, list[float]]:
    training = Training(storage, size_mb)
    saver = training.saver
    copies = {name: torch.ones_like(t) for name, t in training.live.items()}

    def memcpy() -> None:
        for name, tensor in training.live.items():
            copies[name].copy_(tensor)

    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        found.setdefault("memcpy", []).append(seconds(memcpy))
        found.setdefault("blocked", []).append(training.blocked_s())
        saver._wait_moving()
        training.clear()
        found.setdefault("plain", []).append(seconds(lambda: repeat(training.step)) / FEWEST_STEPS)
        step_s = statistics.median(found["plain"])
        ours = training.slow_down_s(training.begin_save, step_s)
        found.setdefault("slower", []).append(ours)
        training.clear()
        found.setdefault("slower dcp", []).append(training.slow_down_s(training.begin_dcp, step_s))
        training.clear()

        def save() -> None:
            training.begin_save()
            training.saver._wait_moving()

        found.setdefault("written", []).append(training.size_bytes / seconds(save))
        training.clear()
        size = training.size_bytes
        found.setdefault("dd", []).append(size / seconds(lambda n=size: dd(storage, n)))
    return found


def repeat(step: Callable[[], None]) -> None:
    for _ in range(FEWEST_STEPS):
        step()


def dd(storage: Path, size_bytes: int) -> None:
    target = storage / "dd"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={size_bytes // 2**22}"]
    subprocess.run([*command, "conv=fsync"], check=True, capture_output=True)
    target.unlink()


def said_of(found: dict[str, list[float]]) -> dict[str, str]:
    median = {name: statistics.median(values) for name, values in found.items()}
    blocked, memcpy = median["blocked"], median["memcpy"]
    return {
        "blocked": f"{blocked * 1e3:.1f} ms, first {found['blocked'][0] * 1e3:.0f}, worst "
        f"{max(found['blocked']) * 1e3:.0f}; memcpy {memcpy * 1e3:.0f} ms: {blocked / memcpy:.2f}",
        "slow-down": f"{median['slower'] * 1e3:.0f} ms, dcp.async_save "
        f"{median['slower dcp'] * 1e3:.0f} ms: {median['slower'] / median['slower dcp']:.2f} "
        f"(a step is {median['plain'] * 1e3:.0f} ms)",
        "written": f"{median['written'] / 2**20:.0f} MB/s, dd {median['dd'] / 2**20:.0f}: "
        f"{median['written'] / median['dd']:.2f}",
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = machine(1)
    console.print(about)
    with tempfile.TemporaryDirectory() as meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting}/s", rank=0, world_size=1)
        results: dict[str, str] = {}
        for size_mb in SIZES_MB:
            with storage_directory() as storage:
                said = said_of(measure(storage, size_mb, arguments.repeats))
            console.print(said)
            results |= {f"{name} {size_mb} MB": value for name, value in said.items()}
        dist.destroy_process_group()
    report("Checkpoints", list(results), [list(results.values())])
    setting = f"{arguments.repeats} saves per size, one rank"
    record("checkpoints", about=about, setting=setting, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
