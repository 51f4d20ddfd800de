"""Which backends connect the members of a generation.

Between GPUs there are two groups, formed one after the other: NCCL for data, and gloo for control,
whose waits block and raise. Elsewhere one group over gloo is both. Where ranks share a GPU data is
staged in host memory (tests/gpu).
"""

from dataclasses import replace
from functools import partial

import torch

from workers.distributed import gloo, nccl, staged
from workers.distributed.group_spec import GroupSpec
from workers.distributed.process_group import Connect, Group, leave


def connect_for(device: torch.device, host: str) -> Connect:
    """host: this worker's address that its peers can reach."""
    control = partial(gloo.connect, host)
    if device.type != "cuda":
        return control
    return with_control(partial(nccl.connect, device), control)


def connect_staged(host: str) -> Connect:
    """host: as in `connect_for`. Of ranks that may share a GPU."""
    return with_control(partial(staged.connect, host), partial(gloo.connect, host))


def with_control(data: Connect, control: Connect) -> Connect:
    """Both in one thread, control first: it notices a peer that is gone already."""

    def connect(spec: GroupSpec) -> Group:
        deciding = control(replace(spec, name=f"{spec.name}/control"))
        try:
            group = data(spec)
        except Exception:
            leave(deciding)
            raise
        group.take_control(deciding)
        return group

    return connect
