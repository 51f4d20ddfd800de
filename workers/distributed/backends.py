"""Which backends connect the members of a generation.

Between GPUs there are two groups, formed one after the other: NCCL for data, and gloo for control,
whose waits block and raise. Elsewhere one group over gloo is both.
"""

from dataclasses import replace
from functools import partial

import torch

from workers.distributed import gloo, nccl
from workers.distributed.process_group import Connect, Group, Place


def connect_for(device: torch.device, host: str) -> Connect:
    """host: this worker's address that its peers can reach."""
    control = partial(gloo.connect, host)
    if device.type != "cuda":
        return control
    return with_control(partial(nccl.connect, device), control)


def with_control(data: Connect, control: Connect) -> Connect:
    """Both in one thread, control first: it notices a peer that is gone already."""

    def connect(place: Place) -> Group:
        deciding = control(replace(place, name=f"{place.name}/control"))
        group = data(place)
        group.take_control(deciding)
        return group

    return connect
