"""Checkpoints in one process: how long a save blocks training, what it writes per second, loading.

Blocked: begin of the save plus what is left to copy when the next optimizer step comes, after half
a second of computing; against a memcpy of the same bytes into touched memory. Writing: against
`dd conv=fsync` on the same disk. Loading: against torch.distributed.checkpoint in one process.
    python -m tests.bench.checkpoints
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from elastic.protocol.manifest import part_from_json
from elastic.protocol.seams import WorkerSpec
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.bench.harness import console, machine, record, report, storage_directory
from workers.checkpoint_load import load_newest
from workers.replica import Replica
from workers.saver import Saver

SIZES_MB = (200, 1000)
COMPUTE_S = 0.5
WIDTH = 1024


class Link:
    """Keeps what the saver reports."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.concluded_saves: dict[int, bool] = {}

    def send(self, kind: str, payload: bytes = b"", **fields: object) -> None:
        assert kind == "part_saved", (kind, fields)
        self.parts.append(payload)


class By:
    generation, rank, world_size, step = 1, 0, 1, 0


def spec() -> WorkerSpec:
    values: dict[str, Any] = {name: None for name in WorkerSpec.__slots__}
    return WorkerSpec(**{**values, "has_checkpoints": True, "steps": 10**6})


def replica_of(size_mb: int) -> Replica:
    """Parameters and AdamW's state together have about this size."""
    layers = math.ceil(size_mb * 2**20 / (3 * 4 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Replica(model, parameters, optimizer, None, clip_norm=None, max_nonfinite=1)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compute(for_s: float) -> None:
    a = torch.randn(256, 256)
    until = time.perf_counter() + for_s
    while time.perf_counter() < until:
        a = torch.tanh(a @ a)


def measure(storage: Path, size_mb: int, repeats: int) -> dict[str, float]:
    replica, link = replica_of(size_mb), Link()
    saver = Saver(link, spec())  # type: ignore[arg-type]
    saver.open(str(storage))
    catalogue = Catalogue(open_folder(str(storage)).at("checkpoints"))
    snapshot = replica.snapshot()
    live = [snapshot._left[name] for name in snapshot.shapes]
    copies = [torch.ones_like(t) for t in live]
    size_bytes = sum(t.nbytes for t in live)
    snapshot.drop()

    def memcpy() -> None:
        for copy, tensor in zip(copies, live, strict=True):
            copy.copy_(tensor)

    blocked: list[float] = []
    writing: list[float] = []
    copying: list[float] = []
    raw: list[float] = []
    for _ in range(repeats):
        copying.append(seconds(memcpy))
        replica.step += 1
        began = time.perf_counter()
        begin_s = seconds(lambda: saver.begin(replica, By()))
        compute(COMPUTE_S)
        blocked.append(begin_s + seconds(replica._settle))
        saver._wait()
        writing.append(time.perf_counter() - began)
        said = json.loads(link.parts[-1])
        catalogue.publish(replica.step, 1, [part_from_json(said["part"])], said["state"], {})
        catalogue.retire(2, None)
        raw.append(seconds(lambda: dd(storage, size_bytes)))
    other = replica_of(size_mb)
    return {
        "blocked_s": statistics.median(blocked),
        "worst_blocked_s": max(blocked[1:]),
        "first_blocked_s": blocked[0],
        "memcpy_s": statistics.median(copying),
        "written_per_s": size_bytes / statistics.median(writing),
        "dd_per_s": size_bytes / statistics.median(raw),
        "load_s": seconds(lambda: load_newest(catalogue, other)),
        "dcp_load_s": dcp_load(storage, replica),
    }


def dd(storage: Path, size_bytes: int) -> None:
    target = storage / "dd"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={size_bytes // 2**22}"]
    subprocess.run([*command, "conv=fsync"], check=True, capture_output=True)
    target.unlink()


def dcp_load(storage: Path, replica: Replica) -> float:
    snapshot = replica.snapshot()
    state = {name: snapshot.take(name) for name in snapshot.shapes}
    dcp.save(state, checkpoint_id=str(storage / "dcp"), no_dist=True)
    return seconds(lambda: dcp.load(state, checkpoint_id=str(storage / "dcp"), no_dist=True))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = machine(1)
    console.print(about)
    results: dict[str, str] = {}
    for size_mb in SIZES_MB:
        with storage_directory() as storage:
            m = measure(storage, size_mb, arguments.repeats)
        of = f"{size_mb} MB"
        ratio = m["blocked_s"] / m["memcpy_s"]
        results[f"blocked {of}"] = (
            f"{m['blocked_s'] * 1e3:.0f} ms, worst {m['worst_blocked_s'] * 1e3:.0f}, first "
            f"{m['first_blocked_s'] * 1e3:.0f}; memcpy {m['memcpy_s'] * 1e3:.0f} ms: {ratio:.2f}"
        )
        rate = m["written_per_s"] / m["dd_per_s"]
        results[f"written {of}"] = f"{m['written_per_s'] / 2**20:.0f} MB/s, {rate:.2f} of dd"
        load = f"{m['load_s']:.2f} s, torch DCP {m['dcp_load_s']:.2f} s"
        results[f"loaded {of}"] = load
    report("Checkpoints", list(results), [list(results.values())])
    setting = f"{arguments.repeats} saves per size, one rank"
    record("checkpoints", about=about, setting=setting, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
