"""Loading at world 2 what was saved at world 4, against torch.distributed.checkpoint.

Both load into a model and an optimizer that exist, from files that were read before; the slower
rank counts, and we verify every byte. Saving is in checkpoints.py.
    python -m tests.bench.checkpoint_load
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as workers do, before torch loads

import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from elastic.protocol.manifest import SavedPart
from elastic.protocol.messages.to_controller import PartSaved
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.bench.checkpoints import By, Publisher, replica_of, seconds, spec
from tests.bench.harness import console, machine, record, storage_directory
from workers.checkpoint.load import load_newest
from workers.checkpoint.saver import Saver
from workers.train_state.digest import weights_sha256
from workers.train_state.train_state import TrainState

SAVED_AT, LOADED_AT = 4, 2


class Collector(Publisher):
    """Publishes once every rank's part is there."""

    def __init__(self, storage: Path) -> None:
        super().__init__(storage)
        self.saved: list[SavedPart] = []

    def send(self, report: PartSaved) -> None:
        self.saved.append(SavedPart.unpack(report.payload))
        if len(self.saved) == SAVED_AT:
            parts = [each.part for each in self.saved]
            state = next(each.state for each in self.saved if each.state is not None)
            self.catalogue.publish(report.step, 1, parts, state, {})


def save_ours(storage: Path, size_mb: int) -> str:
    """Gives the weights' hash."""
    train_state, collector = replica_of(size_mb), Collector(storage)
    train_state.step = 7
    for rank in range(SAVED_AT):
        saver = Saver(collector, spec())  # type: ignore[arg-type]
        saver.open(str(storage))
        saver.begin(train_state, By(rank, SAVED_AT))
        saver._wait_moving()
    return weights_sha256(train_state.model)


def state_of(train_state: TrainState) -> dict:
    model, optimizer = get_state_dict(train_state.model, train_state.optimizer)
    return {"model": model, "optimizer": optimizer}


def meet(rank: int, world_size: int, place: str) -> None:
    torch.set_num_threads(1)
    where = f"file://{place}/meeting-{world_size}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)


def save_theirs(rank: int, place: str, size_mb: int) -> None:
    meet(rank, SAVED_AT, place)
    dcp.save(state_of(replica_of(size_mb)), checkpoint_id=f"{place}/dcp")
    dist.destroy_process_group()


def load_both(rank: int, place: str, size_mb: int, repeats: int, sha256: str) -> None:
    meet(rank, LOADED_AT, place)
    train_state = replica_of(size_mb)
    catalogue = Catalogue(open_folder(place).at("checkpoints"))

    def ours() -> None:
        train_state.step = 0
        assert load_newest(catalogue, train_state) == []

    found: dict[str, list[float]] = {"ours": [], "dcp": []}
    for _ in range(repeats + 1):
        state = state_of(train_state)
        for name, load in (
            ("ours", ours),
            ("dcp", lambda s=state: dcp.load(s, checkpoint_id=f"{place}/dcp")),
        ):
            dist.barrier()
            slowest = torch.tensor(seconds(load))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name].append(slowest.item())
            if name == "ours":
                assert weights_sha256(train_state.model) == sha256
    if rank == 0:  # the first reads warmed the cache
        Path(place, "found.json").write_text(json.dumps({n: v[1:] for n, v in found.items()}))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--size-mb", type=int, default=1000)
    arguments = parser.parse_args()
    about = machine(LOADED_AT)
    console.print(about)
    with storage_directory() as storage:
        place, size_mb = str(storage), arguments.size_mb
        sha256 = save_ours(storage, size_mb)
        multiprocessing.spawn(save_theirs, (place, size_mb), nprocs=SAVED_AT)
        load = (place, size_mb, arguments.repeats, sha256)
        multiprocessing.spawn(load_both, load, nprocs=LOADED_AT)
        found = json.loads((storage / "found.json").read_text())
    ours, theirs = (statistics.median(found[name]) for name in ("ours", "dcp"))
    said = f"{ours:.2f} s (worst {max(found['ours']):.2f}), torch DCP {theirs:.2f} s"
    setting = f"{size_mb} MB saved at world {SAVED_AT}, loaded at world {LOADED_AT}"
    results = {"load": f"{said}: {ours / theirs:.2f}"}
    record("checkpoint load", about=about, setting=setting, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
