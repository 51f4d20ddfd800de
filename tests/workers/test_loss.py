"""What `loss` may return, and what is said of everything else."""

import math

import numpy as np
import pytest
import torch

from elastic.protocol.errors import WrongInput
from workers.step.vote import Microbatches, check_loss

ONE = torch.ones(1, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (0.5, "must return a scalar tensor .*, not float; reduce it"),
        (torch.ones(4, requires_grad=True), r"not a tensor of shape \(4,\); reduce it"),
        (ONE.sum() * 1j, "must return a real floating-point number, not complex64; take its real"),
        (ONE.sum().detach(), "without a gradient"),
        ((ONE, "many"), "weight must be a number, not str"),
        ((ONE, torch.ones(2)), r"weight must be a scalar, not of shape \(2,\)"),
        ((ONE, torch.tensor(1j)), "weight must be a real number, not complex64"),
        ((ONE, math.nan), "weight is nan; it must be a finite number, 0 or more"),
        ((ONE, torch.tensor(math.inf)), "weight is inf; it must be"),
        ((ONE, -1), "weight is -1; it must be"),
    ],
)
def test_what_a_loss_may_not_be_is_one_line(loss, said):
    with pytest.raises(WrongInput, match=said) as caught:
        check_loss(loss)
    assert "\n" not in str(caught.value)


def test_means_and_weighted_sums_pass_whatever_the_sum():
    assert check_loss(ONE) == (ONE.reshape(()), None)
    for weight in (4, 0.0, torch.tensor([3]), torch.tensor(True)):
        total, checked = check_loss((ONE * math.nan, weight))
        assert math.isnan(total.detach())
        assert float(checked) == float(weight)


def test_a_weight_that_was_still_on_its_way_is_looked_at_before_the_vote():
    """As one on a GPU is."""
    done = Microbatches()
    for weight in (2.0, math.nan):
        done.add(ONE.sum(), torch.tensor(weight), np.zeros(1, np.int64), {})
    with pytest.raises(WrongInput, match="weight of micro-batch 7 is nan"):
        done.records((3, 7), [(), ()], torch.Tensor.cpu)
