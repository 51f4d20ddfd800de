"""A device is looked at before its worker says that it has started."""

import pytest
import torch

from elastic.protocol.errors import UnfitNode
from tests.device import device
from workers.health import preflight

HERE = torch.device("sim", 0)
WHO = (HERE, "GPU-1 0000:01:00.0 Sim", "10.0.0.1")


def test_a_device_that_works_passes():
    preflight.check(*WHO)


def test_a_device_without_memory_is_told_with_what_to_do():
    device.limit_memory(1 << 20)
    try:
        with pytest.raises(UnfitNode) as raised:
            preflight.check(*WHO)
    finally:
        device.limit_memory(None)
    assert str(raised.value) == (
        "GPU-1 0000:01:00.0 Sim on node 10.0.0.1 has no 64 MiB left before anything is on it; end "
        "the process that holds its memory (nvidia-smi lists them), or leave the GPU out"
    )


def test_a_device_that_raises_has_failed():
    device.fail("uncorrectable ECC error encountered")
    with pytest.raises(torch.AcceleratorError, match="ECC"):
        preflight.check(*WHO)


class OneBitOff(torch.utils._python_dispatch.TorchDispatchMode):
    """Of each result of an operation on the device."""

    def __init__(self, operation):
        super().__init__()
        self._operation = operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == self._operation and found.device.type == "sim":
            found.view(-1)[6] += 1
        return found


@pytest.mark.parametrize(
    ("operation", "said"), [("mm", "adds integers wrongly"), ("bitwise_xor", "does not keep")]
)
def test_a_device_that_is_wrong_is_named(operation, said):
    with pytest.raises(UnfitNode, match=f"^GPU-1 .* on node 10.0.0.1 {said}"), OneBitOff(operation):
        preflight.check(*WHO)
