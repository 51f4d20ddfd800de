"""Replicas that diverge silently: a flipped bit is found, its rank and tensor are named."""

from types import SimpleNamespace

import pytest
import torch

from elastic.protocol.errors import PeerLost
from elastic.protocol.mesh import Mesh, Parallel
from tests.workers import where
from tests.workers.fake_groups import run_threads
from tests.workers.session_rig import FakeLink, Tiny, spec
from tests.workers.sharded_rig import build, enter, train
from workers.distributed.process_group import Alone
from workers.parallel.ddp import build_replica
from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.tensors.local import layout_of, local
from workers.train_state import serialization
from workers.verify import (
    Diverged,
    combined,
    compare,
    fingerprint,
    fingerprints,
    groups_alike,
    verify,
)

pytestmark = pytest.mark.usefixtures("place")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 7, 4096 * 8 + 5])
def test_any_flipped_bit_changes_the_fingerprint(dtype, size):
    tensor = torch.arange(size).to(dtype)
    raw = tensor.view(torch.uint8)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    for at in {0, len(raw) // 2, len(raw) - 1}:
        for bit in (1, 128):
            raw[at] ^= bit
            assert fingerprint(tensor) != before
            raw[at] ^= bit
    assert fingerprint(tensor) == before


def test_tensors_that_changed_places_and_odd_shapes_have_fingerprints():
    assert combined({"a": 1, "b": 2}) != combined({"a": 2, "b": 1})
    matrix = torch.randn(300, 40)
    assert fingerprint(matrix.T) == fingerprint(matrix.T.contiguous())
    assert fingerprint(torch.randn(9)[1:]) != 0, "not aligned to words"
    assert fingerprint(torch.empty(0)) == 0
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(-1.0))


def test_the_majority_decides_and_the_first_tensor_is_named():
    good, bad = {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 7, "c": 9}
    assert compare([good, bad, good]) == ([1], "b", 2)
    assert compare([good, bad]) == ([], "b", 2)
    assert compare([good, bad, good, bad]) == ([], "b", 2)
    assert compare([good, bad, {**good, "c": 0}]) == ([], "b", 2)


def stepped():
    """A replica after one step, so that the optimizer has state."""
    train_state = build_replica(Tiny(), spec(), where.HERE)
    for parameter in train_state.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    train_state.optimizer.step()
    train_state.step = 1
    return train_state


def verified(num_ranks, flip):
    """As `verified_of`, of whole replicas, one of them perhaps with another bit."""
    replicas = [stepped() for _ in range(num_ranks)]
    moment = replicas[1].optimizer.state[replicas[1].parameters["0.weight"]]["exp_avg"]
    if flip:
        moment.view(torch.int32)[1, 2] ^= 4
    return verified_of(replicas, Mesh(Parallel.of("ddp"), num_ranks))


def verified_of(replicas, mesh):
    """What each rank's verify raises, and what it tells the controller."""

    def body(group):
        link = FakeLink()
        member = SimpleNamespace(
            train_state=replicas[group.rank()],
            group=group,
            device=where.HERE,
            link=link,
            generation=4,
            spec=SimpleNamespace(worker=10 + group.rank()),
            mesh=mesh,
            layout=layout_of,
        )
        try:
            verify(member, 1)
        except (PeerLost, Diverged) as error:
            return type(error), str(error), link.of("diverged")
        return None

    return run_threads(len(replicas), body)


WHAT = "after step 1 in 'optimizer/0.weight/exp_avg' (one tensor in all)"


def test_rows_are_told_from_what_is_replicated():
    strategy = build("fsdp")
    enter(strategy, Alone(), 0)
    train(strategy, Alone(), "fsdp", 1)
    train_state = strategy.train_state
    found = fingerprints(train_state, layout_of)
    assert sorted(found) == [((), ()), (("dp_shard",), ())]
    whole, rows = found[(), ()], found[("dp_shard",), ()]
    names = [n for n in whole if not n.endswith("/step")]
    assert names == ["model/scale", "optimizer/scale/exp_avg", "optimizer/scale/exp_avg_sq"]
    trained = serialization.trained_tensors(train_state.model, train_state.optimizer)
    assert set(whole) | set(rows) == set(trained)
    assert not set(whole) & set(rows)


def test_the_host_reads_once_of_each_device():
    train_state, reads = stepped(), list[torch.Tensor]()

    def read(sums):
        reads.append(sums)
        return sums.cpu()

    found = fingerprints(train_state, layout_of, read)
    trained = serialization.trained_tensors(train_state.model, train_state.optimizer)
    devices = {tensor.device for tensor in trained.values()}
    assert sorted(str(sums.device) for sums in reads) == sorted(map(str, devices))
    assert found == fingerprints(train_state, layout_of)


def test_replicas_of_a_shard_must_agree_on_its_rows():
    hsdp, fsdp = Mesh(Parallel.of("hsdp:2"), 5), Mesh(Parallel.of("fsdp"), 2)
    assert groups_alike(hsdp, ()) == [[0, 1, 2, 3, 4]]
    assert groups_alike(hsdp, ("dp_shard",)) == [[0, 2], [1, 3]], "4 is inactive"
    assert groups_alike(fsdp, ("dp_shard",)) == [[0], [1]]
    grid = Mesh(Parallel.of("fsdp,tp:2"), 4)
    assert groups_alike(grid, ("tp",)) == [[0, 2], [1, 3]]
    assert groups_alike(grid, ("dp_shard", "tp")) == [[0], [1], [2], [3]]
    staged = Mesh(Parallel.of("pp:2"), 6, (5, 0, 1, 2, 3, 4), ((0, 2, 4), (0, 1, 3, 4)))
    assert groups_alike(staged, (), (1,)) == [[1, 4]], "at positions 0 and 3"
    assert groups_alike(staged, (), (0, 3)) == [[1, 2, 3, 5]], "tied; 0 is inactive"


def test_equal_replicas_say_nothing():
    assert verified(3, flip=False) == [None] * 3


def test_one_of_three_that_differs_is_named_by_all():
    why = f"its replica, rank 1, differs from the majority's {WHAT}"
    said = [({"generation": 4, "workers": (11,), "message": why}, b"")]
    assert verified(3, flip=True) == [(PeerLost, why, said)] * 3


def test_two_that_differ_are_both_named():
    why = (
        f"the replicas of ranks 0 and 1 differ {WHAT}, and no majority says who is right; "
        "resume from the newest checkpoint, and suspect the hardware of these nodes"
    )
    assert verified(2, flip=True) == [(Diverged, why, [])] * 2


def rows_of_a_layer(mesh, rank):
    """What verify looks at, of a sharded layer after one step."""
    model = torch.nn.Linear(8, 6, bias=False).to(where.HERE)
    sharded = ShardedModel(model, where.HERE, keeps_parameters=False)
    sharded.reshard(None if mesh.is_inactive(rank) else mesh.shard(rank), mesh.num_shards)
    rows = local(model.weight.detach())
    rows.copy_(torch.arange(rows.numel()).view(rows.shape) + mesh.shard(rank))
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()), step=1)


@pytest.mark.parametrize("flipped", [3, 4])
def test_of_three_replicas_of_a_shard_the_one_that_differs_is_named(flipped):
    mesh = Mesh(Parallel.of("hsdp:2"), 7)
    replicas = [rows_of_a_layer(mesh, rank) for rank in range(7)]
    assert verified_of(replicas, mesh) == [None] * 7
    local(replicas[flipped].model.weight.detach()).view(torch.int32)[1, 2] ^= 4
    why = (
        f"its replica, rank {flipped}, differs from the majority's after step 1 in 'model/weight' "
        "(one tensor in all)"
    )
    said = [({"generation": 4, "workers": (10 + flipped,), "message": why}, b"")]
    assert verified_of(replicas, mesh) == [(PeerLost, why, said)] * 7


def test_two_replicas_of_a_shard_that_differ_are_both_named():
    mesh = Mesh(Parallel.of("hsdp:2"), 4)
    replicas = [rows_of_a_layer(mesh, rank) for rank in range(4)]
    local(replicas[3].model.weight.detach()).view(torch.int32)[0, 0] ^= 4
    found = verified_of(replicas, mesh)
    assert {kind for kind, *_ in found} == {Diverged}
    assert {why[:38] for _, why, _ in found} == {"the replicas of ranks 1 and 3 differ a"}
