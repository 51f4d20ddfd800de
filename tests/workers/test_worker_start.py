"""What the first worker finds out about a workload before its first step."""

import os
import pickle
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from elastic.protocol import nccl_settings
from elastic.protocol.errors import UnfitNode, WrongInput
from tests.workers import where
from tests.workers.session_rig import CPU, FakeLink, Rig, Tiny, spec
from tests.workers.test_trial import Remembers
from workers.backup.backup import NoBackup
from workers.health import gpu
from workers.health.vitals import Vitals
from workers.parallel.build import build_strategy
from workers.parallel.pipeline.absent import Absent
from workers.parallel.pipeline.strategy import build_staged
from workers.worker import Worker


class Sheet(Tiny):
    """Its model has no buffers."""

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 1))


class OddGroups(Sheet):
    def build_optimizer(self, params):
        return torch.optim.AdamW([{"params": params, "seen": deque([1])}], lr=0.1)


class Warm:
    def __init__(self):
        self.seen = deque()

    def __call__(self, step):
        return 1.0


class OddScheduler(Sheet):
    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, Warm())


class OddState(Sheet):
    def build_optimizer(self, params):
        return Remembers(params, deque, lr=0.1)


class OddGroupsInParts(OddGroups):
    def init_weights(self, module, name):
        pass


def loading(workload, **changes) -> Worker:
    """A worker that has been told to load, without its process."""
    torch.set_num_threads(1)
    rig, worker = Rig("bitwise", workload, **changes), object.__new__(Worker)
    worker._spec, worker._built, worker._link = rig.spec, rig.built, rig.link
    worker._loader, worker._device, worker._vitals = rig.loader, where.HERE, rig.member.vitals
    return worker


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("workload", "says"),
    [
        (OddGroups(), "^state at 'groups/0/seen'"),
        (OddScheduler(), "^state at 'scheduler/lr_lambdas/0/seen'"),
        (OddState(), "^the state of optimizer Remembers .*'optimizer/0.weight/norms'"),
    ],
)
def test_what_nobody_could_take_over_is_refused_before_the_first_step(workload, says, tmp_path):
    worker = loading(workload)
    with pytest.raises(WrongInput, match=f"{says} is a collections.deque, which cannot be"):
        worker._load(str(tmp_path), 0)
    worker._loader.close()


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp:2"])
def test_a_sharded_worker_refuses_it_when_it_builds_the_model(parallel):
    with pytest.raises(WrongInput, match=r"^state at 'groups/0/seen' is a collections\.deque"):
        build_strategy(OddGroupsInParts(), spec(parallel=parallel), CPU)


@pytest.mark.usefixtures("place")
def test_a_workload_that_may_be_carried_is_loaded(tmp_path):
    worker = loading(Tiny())
    assert worker._load(str(tmp_path), 0) == []
    worker._loader.close()


class Broken(Tiny):
    def loss(self, model, batch):
        raise KeyError("labels")


@pytest.mark.parametrize("parallel", ["ddp", "pp:2"])
def test_what_the_loss_raises_comes_up_in_step_1_or_where_no_step_could_be_planned(
    parallel, tmp_path
):
    worker = loading(Broken(), parallel=parallel)
    if parallel == "ddp":
        worker._load(str(tmp_path), 0)
    else:
        with pytest.raises(KeyError, match="labels"):
            worker._load(str(tmp_path), 0)
    worker._loader.close()


class Threaded(Tiny):
    def build_model(self):
        torch.set_num_threads(2)
        return super().build_model()


def test_a_worker_looks_at_the_threads_that_the_workload_has_set():
    before, worker = torch.get_num_threads(), object.__new__(Worker)
    worker._spec, worker._pickled = spec(), pickle.dumps((Threaded(), None))
    worker._vitals, worker._link = Vitals(), FakeLink()
    worker._around = SimpleNamespace(open_feed=None, enter_child=lambda: None)  # pyright: ignore
    try:
        with pytest.raises(WrongInput, match="set 2 intra-op threads"):
            worker._train()
    finally:
        torch.set_num_threads(before)
        worker._loader._chosen.result(30).close()


def test_a_gpu_that_torch_cannot_use_is_the_nodes_fault_and_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", bool)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(
        UnfitNode,
        match=r"^torch .* on node 127.0.0.1 can use no GPU, .* there \(.+\); .* --device cpu$",
    ):
        gpu.prepare(replace(spec("fast"), device="cuda", host="127.0.0.1"))


def test_an_environment_in_which_torch_would_end_the_survivors_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_BLOCKING_WAIT": "0"})
    said = r"^on node 127.0.0.1 TORCH_NCCL_BLOCKING_WAIT=0 is set where .* must be 1: .*unset it$"
    with pytest.raises(WrongInput, match=said):
        gpu.prepare(replace(spec("fast"), device="cuda", host="127.0.0.1"))


def test_what_the_environment_says_of_nccl_counts_and_the_rest_is_set():
    told = nccl_settings.settings({"NCCL_SOCKET_IFNAME": "eth7"}, gpu.interface_of("127.0.0.1"), 30)
    assert told == {
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
    }
    assert (
        nccl_settings.settings({}, gpu.interface_of("127.0.0.1"), 30)["NCCL_SOCKET_IFNAME"] == "lo"
    )
    former = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    assert "PYTORCH_ALLOC_CONF" not in nccl_settings.settings(former, "", 30)


class Racing(Sheet):
    """Uses an operation that has no deterministic kernel, on any device."""

    def loss(self, model, batch):
        torch.zeros(1).put_(torch.zeros(1, dtype=torch.long), torch.ones(1))
        return super().loss(model, batch)


class Short(Sheet):
    """The whole model does not fit into this worker's memory: a pass over absent tensors does."""

    def loss(self, model, batch):
        if not isinstance(next(model.parameters()), Absent):
            raise torch.OutOfMemoryError("out of memory")
        return super().loss(model, batch)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("has_the_say", [True, False])
def test_the_blocks_are_found_where_the_whole_model_has_no_memory(has_the_say):
    work = Short()
    strategy = build_staged(work, spec("pp:2"), where.HERE, NoBackup(), 2)
    worker, rig = object.__new__(Worker), Rig("bitwise", work)
    worker._spec, worker._loader, worker._device = rig.spec, rig.loader, where.HERE
    worker._built = replace(rig.built, strategy=strategy)
    try:
        worker._try_microbatch(0, with_optimizer=has_the_say)
    finally:
        rig.loader.close()
    assert strategy.chain is not None


def test_an_operation_without_a_deterministic_kernel_is_refused_by_name_where_bits_count(
    monkeypatch,
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "1")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    worker, rig = object.__new__(Worker), Rig("bitwise", Racing())
    worker._spec, worker._loader, worker._built = rig.spec, rig.loader, rig.built
    worker._try_microbatch(0)
    gpu.make_deterministic()
    try:
        with pytest.raises(WrongInput, match=r"^put_ has no deterministic kernel .*'fast'$"):
            worker._try_microbatch(0)
    finally:
        torch.use_deterministic_algorithms(False)
        rig.loader.close()
