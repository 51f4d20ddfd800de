"""`Digits` without Ray: its loss is a (sum, weight), it has buffers, it learns."""

import builtins
import pickle

import pytest
import torch
from torch.utils.data import default_collate

from elastic.protocol.errors import WrongInput
from workers.workloads import digits
from workers.workloads.digits import Digits


def batch_of(dataset, size: int) -> list[torch.Tensor]:
    return list(default_collate([dataset[i] for i in range(size)]))


def test_all_images_are_in_one_of_the_two_parts():
    workload = Digits()
    assert len(workload.dataset()) + len(workload.validation()) == 1797
    image, label = workload.dataset()[0]
    assert image.shape == (1, 8, 8)
    assert 0 <= image.min() <= image.max() <= 1
    assert 0 <= label <= 9


def test_loss_is_a_sum_and_its_weight():
    workload = Digits()
    model = workload.build_model().eval()
    batch = batch_of(workload.dataset(), 6)
    total, weight = workload.loss(model, batch)
    parts = [workload.loss(model, [batch[0][i : i + 1], batch[1][i : i + 1]]) for i in range(6)]
    assert weight == 6
    assert total.item() == pytest.approx(sum(p.item() for p, _ in parts), rel=1e-5)


def test_it_learns_and_moves_its_buffers():
    torch.manual_seed(0)
    workload = Digits()
    model = workload.build_model()
    optimizer = workload.build_optimizer(list(model.parameters()))
    before = model.get_buffer("1.running_mean").clone()
    batch = batch_of(workload.dataset(), 64)
    for _ in range(30):
        total, weight = workload.loss(model, batch)
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    right, weight = workload.accuracy(model, batch)
    assert right / weight > 0.9
    assert not torch.equal(before, model.get_buffer("1.running_mean"))


def test_digits_travels_by_reference():
    assert pickle.loads(pickle.dumps(Digits(width=8))).width == 8


def test_missing_sklearn_is_one_clear_line(monkeypatch):
    def no_sklearn(name, *rest):
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_sklearn)
    digits.digits.cache_clear()
    with pytest.raises(WrongInput, match=r"needs scikit-learn.*\[examples\]") as caught:
        Digits().dataset()
    assert "\n" not in str(caught.value)
