"""What a step keeps of its micro-batches until it ends."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.workers import where
from tests.workers.session_rig import Rig
from workers.data.loader import LoadedBatch
from workers.data.step_batches import StepBatches
from workers.parallel.strategy import NoPasses
from workers.step.vote import Microbatches, kept


def test_logging_a_tensor_does_not_wait_for_its_device():
    rig = Rig("fast")
    rig.session.log(size=torch.ones((), device="meta"))  # reading it raises
    assert list(rig.session._logged) == ["size"]
    rig.loader.close()


class OfAnotherStage(NoPasses):
    has_loss = False


def test_what_is_logged_in_the_forward_of_a_stage_without_the_loss_is_not_kept():
    rig = Rig("fast")
    rig.session._passes = OfAnotherStage()
    rig.session.log(between=1.0)
    rig.session._open = object()  # pyright: ignore[reportAttributeAccessIssue]
    rig.session.log(inside=2.0)
    assert rig.session._logged == {"between": 1.0}
    rig.loader.close()


def test_a_batch_of_several_forwards_is_loaded_once_and_is_the_same_in_each():
    asked: list[int] = []

    class Loader:
        def next(self, step: int, microbatch_id: int, is_cancelled: object) -> LoadedBatch:
            asked.append(microbatch_id)
            return LoadedBatch(step, microbatch_id, np.arange(2), {"x": torch.ones(2)})

    loader: Any = Loader()
    batches = StepBatches(loader, 3, [4, 5, 4, 5], lambda: False)
    for microbatch_id in (4, 5, 4, 5):
        assert batches.coming().microbatch_id == microbatch_id
        loaded = batches.take()
        assert loaded.microbatch_id == microbatch_id
        assert loaded.batch.pop("x").add_(1).tolist() == [2, 2]
    assert asked == [4, 5]


@pytest.mark.usefixtures("place")
def test_a_value_counts_as_it_was_when_it_was_logged():
    here, done = where.HERE, Microbatches()
    total = torch.tensor([2.0], requires_grad=True, device=here)
    logged = {"total": kept(total), "count": kept(3)}
    done.add(torch.tensor(0.5, device=here), None, np.zeros(1, np.int64), logged)
    done.log_late({"late": kept(torch.tensor(True, device=here))})
    with torch.no_grad():
        total += 1
    (record,) = done.records([0], [()], torch.Tensor.cpu)
    assert record.logged == {"total": 2.0, "count": 3.0, "late": 1.0}
    assert {type(value) for value in record.logged.values()} == {float}


@pytest.mark.parametrize("value", [torch.zeros(2), torch.tensor(1j), "much"])
def test_what_is_no_number_is_refused_where_it_is_logged(value):
    with pytest.raises((RuntimeError, ValueError)):
        kept(value)
