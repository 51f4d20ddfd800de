"""Parameters whose elements lie in another order than row by row: channels_last, transposed."""

import itertools
import json
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elastic.protocol.errors import WrongInput
from elastic.protocol.messages.to_worker import Sync
from tests.workers import where
from tests.workers.session_rig import Rig, obey
from tests.workers.sharded_rig import (
    NUM_MICROBATCHES,
    Work,
    build,
    catalogue_in,
    load,
    save_part,
    sha256,
    train,
)
from workers.distributed.process_group import Alone
from workers.tensors.strides import is_dense
from workers.train_state.digest import weights_sha256
from workers.train_state.serialization import capture, restore
from workers.train_state.train_state import TrainState

STEPS = 3


class Strided(nn.Module):
    """A convolution in each memory format, one of 1 x 1, and a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.point = nn.Conv2d(4, 6, 1).to(memory_format=torch.channels_last)
        self.deep = nn.Conv3d(2, 3, 2).to(memory_format=torch.channels_last_3d)
        self.head = nn.Linear(5, 7)
        self.head.weight = nn.Parameter(torch.randn(5, 7).t())

    def forward(self, x: Tensor, microbatch_id: int = 0) -> Tensor:
        x = self.point(torch.tanh(self.flat(x))).view(-1, 2, 3, 4, 4)
        return self.head(self.deep(x).flatten(1)[:, :5])


class Convolutions(Work):
    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.build_optimizer = make

    def build_model(self) -> nn.Module:
        return Strided()

    def batch(self, step: int, microbatch_id: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + microbatch_id)
        return torch.randn(2, 3, 6, 6, generator=generator)


class Rows(torch.optim.SGD):
    """Keeps what is as large as its parameter, but lies in another order."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            rows = self.state[p].setdefault("rows", torch.zeros(p.shape, device=p.device))
            rows.view(p.shape[0], -1).add_(p.grad.reshape(p.shape[0], -1))
            self.state[p]["square"] = torch.linalg.qr(rows.view(p.shape[0], -1) + 1.0)[0]
            p.data.sub_(0.1 * rows)


OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused_sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "plain": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "rows": lambda p: Rows(p),
}


def strides_of(train_state: TrainState) -> dict[str, tuple[int, ...]]:
    return {name: t.stride() for name, t in train_state.tensors().items()}


def by_torch_alone(work: Convolutions) -> dict[str, Tensor]:
    """The weights after so many steps, with nothing of ours but the initial ones."""
    strategy = build("ddp", workload=work)
    train_state = strategy.train_state
    model, optimizer = train_state.model, train_state.optimizer
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(NUM_MICROBATCHES):
            batch = work.batch(step, i).to(where.HERE)
            (model(batch).square().mean() / NUM_MICROBATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert train_state.scheduler is not None
        train_state.scheduler.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("place_slowly")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("reduction", ["fast", "bitwise"])
def test_every_optimizer_trains_as_torch_alone_does_at_every_world_size(kind, reduction) -> None:
    work = Convolutions(OPTIMIZERS[kind])
    expected = by_torch_alone(work)
    hashes: set[str] = set()
    for world_size in (1, 2, 3):
        devices = [where.of_rank(rank) for rank in range(world_size)]
        replicas = [build("ddp", reduction, work, device=device) for device in devices]

        def body(group, replicas=replicas):
            train(replicas[group.rank()], group, "ddp", STEPS, reduction, work)

        if world_size == 1:
            train(replicas[0], Alone(), "ddp", STEPS, reduction, work)
        else:
            where.run_threads(world_size, body)
        for train_state in [strategy.train_state for strategy in replicas]:
            hashes.add(weights_sha256(train_state.model))
            for name, p in train_state.model.named_parameters():
                found = p.detach().cpu()
                torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-4)
    assert len(hashes) == 1 or reduction == "fast"


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restored_state_lies_in_memory_as_it_did_and_trains_on_to_the_same_bits(kind) -> None:
    work = Convolutions(OPTIMIZERS[kind])
    source, target = build("ddp", workload=work), build("ddp", workload=work)
    train(source, Alone(), "ddp", 1, work=work)
    snapshot = source.train_state.snapshot()
    tensors = {name: snapshot.take(name) for name in snapshot.shapes}
    target.train_state.restore(json.loads(json.dumps(snapshot.header)), tensors)
    assert strides_of(target.train_state) == strides_of(source.train_state)
    for strategy in (source, target):
        train(strategy, Alone(), "ddp", STEPS, work=work)
    assert sha256(target) == sha256(source)


@pytest.mark.usefixtures("place")
def test_a_checkpoint_gives_back_strides_and_bits(tmp_path) -> None:
    work = Convolutions(OPTIMIZERS["fused"])
    source = build("ddp", workload=work)
    train(source, Alone(), "ddp", 2, work=work)
    part, header = save_part(source, Alone(), str(tmp_path), 1)
    catalogue_in(str(tmp_path)).publish(2, 1, [part], header, {})
    target = load("ddp", Alone(), str(tmp_path), 2, work)
    assert (target.train_state.step, strides_of(target.train_state)) == (
        2,
        strides_of(source.train_state),
    )
    for strategy in (source, target):
        train(strategy, Alone(), "ddp", STEPS, work=work)
    assert sha256(target) == sha256(source)


@pytest.mark.usefixtures("place")
def test_a_state_that_was_written_without_strides_gets_those_of_its_parameters() -> None:
    """By 0.1.0, or imported from a file in which every tensor is in plain order."""
    work = Convolutions(OPTIMIZERS["fused"])
    source, target = build("ddp", workload=work), build("ddp", workload=work)
    train(source, Alone(), "ddp", 1, work=work)
    header, tensors = capture(
        source.train_state.model, source.train_state.optimizer, source.train_state.scheduler
    )
    for pairs in header["optimizer"]["state"].values():
        for _, value in pairs["dict"]:
            value.pop("strides", None)
    plain = {name: t.contiguous() for name, t in tensors.items()}
    restore(
        target.train_state.model,
        target.train_state.optimizer,
        target.train_state.scheduler,
        header,
        plain,
    )
    assert strides_of(target.train_state) == strides_of(source.train_state)


class Images(Convolutions):
    loader_processes = 1

    def dataset(self):
        return [(self.batch(0, i)[0], float(i)) for i in range(41)]

    def loss(self, model, batch):
        images, wanted = batch
        return (model(images).sum(1) - wanted.float()).square().mean()


@pytest.mark.usefixtures("place_slowly")
@pytest.mark.parametrize("reduction", ["bitwise", "fast"])
def test_a_newcomer_that_copies_and_follows_has_the_bits_of_its_source(reduction) -> None:
    torch.set_num_threads(1)
    source, newcomer = (Rig(reduction, Images(OPTIMIZERS["fused"])) for _ in range(2))
    source.form(generation=1, step=0)
    assert source.step().committed
    obey(newcomer.member, Sync(0, source.member.peers.address))
    deadline = time.monotonic() + 120
    while not newcomer.link.of("synced"):
        assert time.monotonic() < deadline
        source.member._take_on_newcomers()
        newcomer.member._copying.apply_received()
        time.sleep(0.001)  # polling, bounded by the deadline
    for _ in range(STEPS):
        assert source.step().committed
    newcomer.member._copying.catch_up(1 + STEPS, 1, lambda: False)
    assert strides_of(newcomer.train_state) == strides_of(source.train_state)
    newcomer.form(generation=2, step=1 + STEPS)
    for rig in (newcomer, source):
        assert rig.step().committed
        rig.loader.close()
    assert weights_sha256(newcomer.train_state.model) == weights_sha256(source.train_state.model)


def test_weights_have_one_hash_whatever_their_strides() -> None:
    model = Strided()
    plain = {name: t.contiguous() for name, t in model.state_dict().items()}
    assert weights_sha256(model) == weights_sha256(plain)
    assert any(not t.is_contiguous() for t in model.state_dict().values())


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (torch.zeros(1, 3).expand(4, 3), r"strides \(0, 1\), so that elements share memory"),
        (torch.zeros(4, 6)[:, ::2], r"strides \(6, 2\), so that elements share memory or lie"),
        (torch.zeros(16).as_strided((4, 3), (2, 1)), r"strides \(2, 1\)"),
    ],
)
def test_a_parameter_whose_elements_do_not_fill_its_memory_is_refused(weight, says) -> None:
    class Own(Convolutions):
        def build_model(self):
            model = nn.Linear(3, 4)
            model.weight = nn.Parameter(weight)
            return model

    with pytest.raises(WrongInput, match=rf"^parameter 'weight' of shape \[4, 3\] has {says}"):
        build("ddp", workload=Own(OPTIMIZERS["plain"]))


@pytest.mark.parametrize("parallel", ["fsdp", "fsdp-grad-op", "hsdp:2"])
@pytest.mark.parametrize("name", ["flat", "point", "deep", "head"])
def test_sharded_strategies_refuse_such_parameters_with_what_to_do(parallel, name) -> None:
    class Own(Convolutions):
        def build_model(self):
            return getattr(Strided(), name)

    with pytest.raises(
        WrongInput, match=r"^parameter 'weight' has strides .*, or use parallel='ddp'$"
    ):
        build(parallel, workload=Own(OPTIMIZERS["plain"]))


def test_dense_is_what_fills_its_memory_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        assert is_dense(torch.zeros(2, 3, 4).permute(order))
    assert is_dense(torch.zeros(()))
    assert is_dense(torch.zeros(0, 3).t())
    assert is_dense(torch.zeros(1).expand(1, 1))
    assert not is_dense(torch.zeros(1).expand(2, 1))
