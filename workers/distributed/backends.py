"""Which backend connects the members of a generation: NCCL between GPUs, else gloo."""

from functools import partial

import torch

from workers.distributed import gloo, nccl
from workers.distributed.process_group import Connect


def connect_for(device: torch.device, host: str) -> Connect:
    """host: this worker's address that its peers can reach."""
    if device.type == "cuda":
        return partial(nccl.connect, device)
    return partial(gloo.connect, host)
