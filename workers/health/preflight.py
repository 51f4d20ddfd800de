"""Whether a GPU computes and keeps what it is given, before its worker says that it has started.

A second of work. A GPU that raises has failed (workers/health/gpu.py); one that is wrong, or has no
memory left, is the node's: another node may have a better one.
"""

import logging

import torch

from elastic.protocol.errors import UnfitNode
from workers.health.nvml import Health, nvml

log = logging.getLogger(__name__)
SIZE = 512
KEPT_BYTES = 64 << 20


def check(device: torch.device, name: str, host: str) -> None:
    """name: of the GPU, for a person. Raises UnfitNode, and torch.AcceleratorError as it is."""
    if device.type == "cpu":
        return
    if (library := nvml()) is not None:
        check_health(library.health(name.partition(" ")[0]), name, host)
    try:
        is_kept, is_right = _keeps(device), _computes(device)
    except torch.OutOfMemoryError as error:
        raise UnfitNode(
            f"{name} on node {host} has no {KEPT_BYTES >> 20} MiB left before anything is on it; "
            "end the process that holds its memory (nvidia-smi lists them), or leave the GPU out"
        ) from error
    if not (is_kept and is_right):
        what = "adds integers wrongly" if is_kept else "does not keep what is written to it"
        raise UnfitNode(
            f"{name} on node {host} {what}: leave it out and have it replaced; nvidia-smi -q -d "
            "ECC,ROW_REMAPPER may say more"
        )


def check_health(health: Health, name: str, host: str) -> None:
    """What its error counters say. Raises UnfitNode."""
    if health.uncorrected:
        log.warning('gpu="%s" uncorrected_errors=%d since its reset', name, health.uncorrected)
    if health.has_no_spare:
        raise UnfitNode(
            f"{name} on node {host} has a bad row of memory and no spare one left: have it "
            "replaced, and leave it out until then"
        )
    if health.needs_reset:
        raise UnfitNode(
            f"{name} on node {host} has a bad row of memory that only a reset replaces: end what "
            f"uses it and call nvidia-smi --gpu-reset -i {name.partition(' ')[0]}"
        )


def _keeps(device: torch.device) -> bool:
    pattern = torch.arange(KEPT_BYTES // 8, device=device)
    copy = pattern.bitwise_xor(-1)
    return not bool((copy.bitwise_xor(pattern) + 1).any().item())


def _computes(device: torch.device) -> bool:
    """A product of small whole numbers: float32 holds it exactly, in whatever order and format
    the GPU multiplies."""
    rows = torch.arange(SIZE, dtype=torch.int64)
    left = ((rows[:, None] * 3 + rows) % 7 - 3).float()
    right = ((rows[:, None] + rows * 5) % 11 - 5).float()
    found = (left.to(device) @ right.to(device)).cpu()
    return torch.equal(found, left @ right)
