"""What the bits of a worker's results depend on beside the program: compared with those of the
others before a worker joins a run that promises bits.

On a CPU the bits of a fixed computation decide. On a GPU its type and its libraries do as well:
they choose kernels, and one computation does not show all choices.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import nccl

from elastic.protocol.errors import UnfitNode
from elastic.protocol.membership import worker_name
from elastic.protocol.messages import to_controller as r
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.files import reach_folder, read_json
from elastic.store.remote import patiently
from workers.distributed.group_spec import GroupSpec
from workers.distributed.process_group import Connect, Group
from workers.health.nvml import nvml
from workers.tensors.local import as_bytes

log = logging.getLogger(__name__)
KEY = "fingerprint"
"""In the store of a generation: the first rank's."""
SEED = 20_260_101
BITS = "bits of a fixed computation"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    worker: str
    facts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join([self.worker, *(f"{name}: {value}" for name, value in self.facts)])

    @classmethod
    def of(cls, text: str) -> "Fingerprint":
        worker, *lines = text.splitlines()
        pairs = (line.partition(": ") for line in lines)
        return cls(worker, tuple((name, value) for name, _, value in pairs))

    def unlike(self, other: "Fingerprint") -> str:
        """What differs, both values of each; empty if nothing does."""
        mine, theirs = dict(self.facts), dict(other.facts)
        names = [*mine, *(name for name in theirs if name not in mine)]
        return ", ".join(
            f"{name} {mine.get(name, 'unknown')} here and {theirs.get(name, 'unknown')} there"
            for name in names
            if mine.get(name) != theirs.get(name)
        )


def fingerprint(worker: str, device: torch.device) -> Fingerprint:
    """A few milliseconds; on a GPU the first use of its libraries, which take a second."""
    facts = [*_of_gpu(device)] if device.type == "cuda" else []
    place = device if device.type == "cuda" else torch.device("cpu")
    return Fingerprint(worker, (*facts, (BITS, computed(place))))


def fingerprint_of(spec: WorkerSpec, device: torch.device) -> Fingerprint:
    return fingerprint(f"{worker_name(spec.worker)} on node {spec.host}", device)


def _of_gpu(device: torch.device) -> Iterator[tuple[str, str]]:
    found: Any = torch.cuda.get_device_properties(device)
    library = nvml()
    yield "GPU", found.name
    yield "multiprocessors", str(found.multi_processor_count)
    yield "compute capability", f"{found.major}.{found.minor}"
    yield "driver", library.driver if library else "unknown"
    yield "torch", torch.__version__
    yield "CUDA", str(torch.version.cuda)
    yield "cuDNN", str(torch.backends.cudnn.version())
    yield "NCCL", ".".join(map(str, nccl.version()))
    yield "precision of float32 products", torch.get_float32_matmul_precision()
    yield "TF32 of convolutions", str(torch.backends.cudnn.allow_tf32)


@cache
def computed(device: torch.device) -> str:
    """A hash of the results of a small network's forward, backward and optimizer's step. What it
    draws is drawn on the host, and nobody else's generator is touched."""
    drawn = torch.Generator("cpu").manual_seed(SEED)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=drawn, device="cpu").to(device)

    weights = [nn.Parameter(numbers(96, 64)), nn.Parameter(numbers(33, 96))]
    scale, shift = nn.Parameter(numbers(96)), nn.Parameter(numbers(96))
    table = nn.Parameter(numbers(17, 64))
    chosen = torch.randint(0, 17, (48,), generator=drawn, device="cpu").to(device)
    parameters = [*weights, scale, shift, table]
    with torch.enable_grad():
        hidden = torch.tanh(nn.functional.embedding(chosen, table) @ weights[0].T)
        hidden = nn.functional.layer_norm(hidden, (96,), scale, shift)
        scores = nn.functional.gelu(hidden) @ weights[1].T
        loss = nn.functional.cross_entropy(scores, chosen % 33) + torch.logsumexp(scores, 0).mean()
        loss.backward()
    with torch.no_grad():
        for p in parameters:
            assert p.grad is not None
            p.addcdiv_(p.grad, p.grad.square().sqrt_().add_(1e-3), value=-0.1)
    found = hashlib.sha256()
    for tensor in (loss.detach(), *(p.detach() for p in parameters)):
        found.update(as_bytes(tensor.cpu().contiguous()))
    return found.hexdigest()[:16]


def alike(connect: Connect, spec: WorkerSpec, device: torch.device) -> Connect:
    """`connect` for workers whose results have the same bits: who joins looks whether it is one of
    them first. Raises UnfitNode in it, not in the others. Where bits are no promise, as it is."""
    if spec.reduction != "bitwise":
        return connect
    own = fingerprint_of(spec, device)
    log.info('fingerprint="%s"', "; ".join(f"{n} {value}" for n, value in own.facts))
    is_known = False

    def connect_alike(asked: GroupSpec) -> Group:
        nonlocal is_known
        if "/" not in asked.name.removeprefix(f"{spec.run_id}/"):  # no part of a group
            if asked.rank == 0:
                asked.store.set(KEY, str(own))
            elif not is_known:
                compare(own, Fingerprint.of(asked.store.get(KEY).decode()))
            is_known = True
        return connect(asked)

    return connect_alike


def compare(own: Fingerprint, first: Fingerprint) -> None:
    """first: of the generation's first rank. Raises UnfitNode."""
    if difference := own.unlike(first):
        raise UnfitNode(
            f"{own.worker} does not compute as {first.worker} does ({difference}), and "
            "reduction='bitwise' asks for equal bits: use machines of one kind, or "
            "reduction='fast'"
        )


def check_recorded(spec: WorkerSpec, device: torch.device) -> None:
    """Raises UnfitNode where the run is to repeat bits that it has begun with on other GPUs. A
    store that is away keeps no newcomer from joining."""
    if spec.reduction != "bitwise" or not spec.has_checkpoints:
        return
    read = partial(_recorded, spec.place)
    try:
        recorded = read() if spec.is_newcomer else patiently(read)
    except OSError:  # it is compared with the first rank when it joins
        if not spec.is_newcomer:
            raise
        return
    if recorded:
        compare_recorded(fingerprint_of(spec, device), recorded)


def _recorded(place: str) -> dict[str, str]:
    return (read_json(reach_folder(place), "config.json") or {}).get("fingerprint", {})


def compare_recorded(own: Fingerprint, recorded: dict[str, str]) -> None:
    """recorded: of config.json. Raises UnfitNode."""
    there = Fingerprint("", tuple(recorded.items()))
    has_gpu = "GPU" in dict(own.facts)
    difference = own.unlike(there) if has_gpu else f"no GPU here, {recorded['GPU']} there"
    if difference:
        raise UnfitNode(
            f"{own.worker} does not compute as the machine on which this run has begun "
            f"({difference}), and reduction='bitwise' asks for equal bits: go on with it on "
            "machines of that kind, or take its checkpoint into another run (elastic checkpoint "
            "export and import)"
        )


def to_record(spec: WorkerSpec, device: torch.device) -> r.Fingerprint | None:
    """For config.json, of a run on GPUs whose bits are a promise."""
    if spec.reduction != "bitwise" or device.type != "cuda":
        return None
    return r.Fingerprint(fingerprint_of(spec, device).facts)
