"""What a worker makes of a device that fails."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.device import device
from tests.device.training import build
from tests.workers import session_rig
from tests.workers import sharded_rig as rig
from workers.checkpoint.saver import Saver
from workers.distributed.device_errors import CUDA_ERROR_MEMORY
from workers.health import gpu
from workers.script_loop import Call
from workers.train_state.out_of_memory import says_no_memory

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


def test_a_script_that_meets_a_failed_device_is_not_called_again():
    """Not even where its generation is over, and whatever it raises."""
    failed("unspecified launch failure")
    call = SimpleNamespace(device=HERE, _member=SimpleNamespace(is_cancelled=True), group=None)
    assert not Call.is_over_with(call, ValueError("no batch"))


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
    with pytest.raises(RuntimeError, match="could not be copied"):
        saver.after_step(strategy.train_state, by, is_asked=False)
    assert link.sent == [], "the storage has not failed"


def test_memory_that_a_library_or_a_copy_does_not_get_leaves_the_device(tmp_path):
    error = failed("out of memory", CUDA_ERROR_MEMORY)
    assert says_no_memory(error)
    assert gpu.fault_of(error, HERE) == ""
    link = session_rig.FakeLink()
    saver = Saver(link, session_rig.spec(has_checkpoints=True))
    saver.open(str(tmp_path))
    job = MagicMock(generation=1, rank=0, step=3)
    job.copy.side_effect = error
    saver._write(job)
    saver._check_device()
    assert [kind for kind, _, _ in link.sent] == ["part_failed"]
