"""What a run makes of the machines that a cluster has; without Ray."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from elastic.on_ray.actors import see_gpus
from elastic.on_ray.placement import machines
from elastic.on_ray.placement.machines import Torch, choose_device, driver_lack, torch_here
from elastic.protocol.errors import WrongInput

CPU_BUILD = Torch("2.13.0+cpu", "is a build without CUDA")
CUDA_BUILD = Torch("2.13.0+cu128")


@pytest.mark.parametrize(
    "torches", [{}, {"10.0.0.1": CUDA_BUILD}, {"a": CPU_BUILD, "b": CUDA_BUILD}]
)
@pytest.mark.parametrize("wish", ["auto", "cuda"])
def test_gpus_are_used_where_a_torch_can_use_them_or_nobody_could_say(wish, torches):
    assert choose_device(wish, 2, torches) == ("cuda", "")


@pytest.mark.parametrize(("wish", "num_gpus"), [("cpu", 2), ("cpu", 0), ("auto", 0)])
def test_without_gpus_or_a_wish_for_them_a_run_trains_on_cpus(wish, num_gpus):
    assert choose_device(wish, num_gpus, {}) == ("cpu", "")


def test_gpus_that_no_torch_can_use_are_left_alone_with_a_line():
    torches = {"10.0.0.2": CPU_BUILD, "10.0.0.1": CPU_BUILD}
    assert choose_device("auto", 2, torches) == (
        "cpu",
        "the cluster has 2 GPUs, but torch 2.13.0+cpu on 10.0.0.1 is a build without CUDA: the "
        "run trains on CPUs",
    )


def test_who_asks_for_gpus_that_no_torch_can_use_is_refused_in_a_line():
    with pytest.raises(WrongInput, match=r"2\.13\.0\+cpu on 10\.0\.0\.1 is a build without CUDA"):
        choose_device("cuda", 2, {"10.0.0.1": CPU_BUILD})


def test_a_machine_says_which_build_of_torch_it_has_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = torch_here()
    assert found is not None
    assert found.version == torch.__version__
    if not (torch.version.cuda or torch.version.hip):
        assert found.lack == CPU_BUILD.lack
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch/version.py").write_text("__version__ = '9.0+cu1'\ncuda: str = '1.0'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(machines, "driver_version", lambda: 13000)
    assert torch_here() == Torch("9.0+cu1")


def test_a_driver_that_is_older_than_the_build_of_torch_means_cpus_and_says_so():
    old = Torch("2.13.0+cu130", driver_lack("13.0", 12040))
    device, note = choose_device("auto", 1, {"10.0.0.1": old})
    assert device == "cpu"
    assert note == (
        "the cluster has 1 GPU, but torch 2.13.0+cu130 on 10.0.0.1 was built for CUDA 13.0, and "
        "the driver knows 12.4 only: the run trains on CPUs"
    )
    assert driver_lack("13.0", None) == "was built for CUDA 13.0, and there is no driver"
    assert [driver_lack("12.8", v) for v in (12000, 12080, 13000)] == ["", "", ""]


def test_a_run_waits_for_gpus_that_the_cluster_can_add():
    device, note = choose_device("auto", 0, {}, can_add_gpus=True)
    assert (device, note.partition(":")[2]) == ("cuda", " the run waits for them")
    device, note = choose_device("auto", 0, {}, can_add_gpus=None)
    assert device == "cpu"
    assert note.endswith("trains on CPUs; --device cuda waits for GPUs")
    assert choose_device("cuda", 0, {}) == ("cuda", "")


@pytest.mark.parametrize(
    ("is_wanted", "given", "before", "after"),
    [
        (True, ["3"], "0,1,2,3", "3"),  # Ray was told to leave the variable alone
        (True, ["GPU-a"], None, "GPU-a"),
        (True, [], "2", "2"),
        (False, [], "0,1", ""),
        (False, [], None, ""),
    ],
)
def test_a_process_sees_the_gpus_that_ray_gave_it_or_none(
    is_wanted, given, before, after, monkeypatch
):
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": given})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    environment = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    monkeypatch.setattr(os, "environ", environment)
    see_gpus(is_wanted)
    assert environment == {"CUDA_VISIBLE_DEVICES": after}
