"""What NCCL and torch's group over it read of the environment, as runs on GPUs have it.

Torch starts threads of its own beside a group, which end the process some time after a peer is
lost, or block it. A survivor goes on here: its groups are ended by workers/distributed/nccl.py.
"""

from collections.abc import Mapping

REQUIRED = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Without it a loss ends the survivors: torch starts its watchdog and its monitor. With it a `wait`
of torch's blocks the host, so that nobody calls that."""
PREFERRED = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as nvidia-smi numbers them
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # shares change their size at every regroup
}
"""What the environment says otherwise counts."""
FORMER_NAMES = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}
"""Torch reads these, too, and which of the two counts is its version's business."""


def recorded(device: str) -> dict[str, dict[str, str]]:
    """For config.json."""
    return {"environment": {**PREFERRED, **REQUIRED}} if device == "cuda" else {}


def settings(
    environment: Mapping[str, str], interface: str, join_timeout_s: float
) -> dict[str, str]:
    """What is to be set before torch's first group. ValueError if the environment contradicts.

    interface: that has this host's address; "": it is not known. join_timeout_s: for forming.
    """
    for name, value in REQUIRED.items():
        if environment.get(name, value) != value:
            raise ValueError(
                f"{name}={environment[name]} is set where the worker runs, and must be {value}: "
                "torch would end the survivors of a loss; unset it"
            )
    given = {FORMER_NAMES.get(name, name) for name in environment}
    preferred = {**PREFERRED, "TORCH_NCCL_NONBLOCKING_TIMEOUT": f"{join_timeout_s:.0f}"}
    if interface:
        preferred["NCCL_SOCKET_IFNAME"] = interface
    return REQUIRED | {n: v for n, v in preferred.items() if n not in given}
