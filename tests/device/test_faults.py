"""What a worker makes of a device that fails."""

from types import SimpleNamespace

import pytest
import torch

from tests.device import device
from tests.device.training import build
from tests.workers import session_rig
from tests.workers import sharded_rig as rig
from workers.checkpoint.saver import Saver
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


def test_a_device_that_fails_in_the_last_save_is_met_by_the_worker(tmp_path):
    """And not only by the thread that copies, whose save has failed."""
    strategy = build(0, "ddp", "bitwise", rig.Dense())
    link = session_rig.FakeLink()
    saver = Saver(link, session_rig.spec(has_checkpoints=True))
    saver.open(str(tmp_path))
    by = SimpleNamespace(
        generation=1, rank=0, world_size=1, position=strategy.position(0, 1), layout=strategy.layout
    )

    device.stick("copy_ to the host")
    saver.begin(strategy.train_state, by)
    device.fail("uncorrectable ECC error encountered")
    with pytest.raises(RuntimeError, match="could not be copied") as met:
        saver.save_now(strategy.train_state, by)
    assert gpu.fault_of(met.value, HERE) == "CUDA error: uncorrectable ECC error encountered"
    assert [kind for kind, _, _ in link.sent] == ["part_failed"]
