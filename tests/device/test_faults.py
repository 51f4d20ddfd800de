"""What a worker makes of a device that fails."""

import pytest
import torch

from tests.device import device
from workers.health import gpu

HERE = torch.device("sim", 0)


def failed(text, code=999):
    """What a host meets next."""
    device.fail(text, code)
    with pytest.raises(torch.AcceleratorError) as met:
        torch.ones(2).to(HERE)
    return met.value


def test_a_failed_device_is_known_by_its_error():
    error = failed("uncorrectable ECC error encountered")
    assert gpu.fault_of(error, HERE) == "CUDA error: uncorrectable ECC error encountered"


def test_a_failed_device_is_known_whatever_was_made_of_its_error():
    failed("unspecified launch failure")
    assert gpu.fault_of(ValueError("no batch"), HERE) == "CUDA error: unspecified launch failure"


def test_an_assertion_in_a_kernel_is_the_programs():
    error = failed("device-side assert triggered", gpu.CUDA_ERROR_ASSERT)
    assert gpu.fault_of(error, HERE) == ""
    assert gpu.fault_of(IndexError("of the user's"), HERE) == ""


def test_an_error_on_a_device_that_works_is_the_programs():
    assert gpu.fault_of(ValueError("no batch"), HERE) == ""
