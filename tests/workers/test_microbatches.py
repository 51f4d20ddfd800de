"""What a step keeps of its micro-batches until it ends."""

import numpy as np
import pytest
import torch

from tests.workers.session_rig import Rig
from workers.step.microbatches import Microbatches, kept


def test_logging_a_tensor_does_not_wait_for_its_device():
    rig = Rig("fast")
    rig.session.log(size=torch.ones((), device="meta"))  # reading it raises
    assert list(rig.session._logged) == ["size"]
    rig.loader.close()


def test_a_value_counts_as_it_was_when_it_was_logged():
    total, done = torch.tensor([2.0], requires_grad=True), Microbatches()
    logged = {"total": kept(total), "count": kept(3)}
    done.add(torch.tensor(0.5), None, np.zeros(1, np.int64), logged)
    done.log_late({"late": kept(torch.tensor(True))})
    with torch.no_grad():
        total += 1
    (record,) = done.records([0], [()], torch.Tensor.cpu)
    assert record.logged == {"total": 2.0, "count": 3.0, "late": 1.0}
    assert {type(value) for value in record.logged.values()} == {float}


@pytest.mark.parametrize("value", [torch.zeros(2), torch.tensor(1j), "much"])
def test_what_is_no_number_is_refused_where_it_is_logged(value):
    with pytest.raises((RuntimeError, ValueError)):
        kept(value)
