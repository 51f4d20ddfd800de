"""Every test begins with a device that nothing has been asked of."""

import pytest
import torch

from tests.device import device
from workers.distributed import device_wait


@pytest.fixture(autouse=True)
def fresh_device():
    """What the test has not looked at itself must have been in order.

    Module.to() makes new parameters for a device of PrivateUse1, and tied ones come apart; on a GPU
    they stay, as they do here where they are swapped.
    """
    torch.set_num_threads(1)
    device.reset()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)
    device.release()
    device.check()
    device.reset()


@pytest.fixture
def quick_looks(monkeypatch):
    """Where hosts are far ahead, a device runs only once its host has looked often."""
    monkeypatch.setattr(device_wait, "FIRST_S", 1e-6)
    monkeypatch.setattr(device_wait, "LONGEST_S", 1e-6)
