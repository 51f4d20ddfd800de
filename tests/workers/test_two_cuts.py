"""A state whose tensors two axes cut: moved to other meshes, kept in peer memory, saved, loaded,
hashed and measured, always with its bits. No strategy of the project has such tensors yet.
"""

import pytest
import torch

from elastic.protocol.backup_assignment import BackupAddress
from elastic.protocol.layout import Position, TensorLayout
from elastic.protocol.mesh import Mesh, Parallel
from elastic.protocol.messages.backup import Slice
from elastic.store.catalogue import file_name
from elastic.store.checkpoint_files import write_part
from tests.workers import where
from tests.workers.ranks import run_ranks
from tests.workers.sharded_rig import CPU, catalogue_in
from workers.backup.server import BackupServer
from workers.backup.store import Copy, Key, crc32
from workers.checkpoint.load import read_tensors
from workers.checkpoint.saver import share
from workers.distributed.pieces import Pieces
from workers.reduction.norm import norm_of_rows, row_squares, squares_of_shards
from workers.resharding import assemble
from workers.resharding.assemble import Offer, Regather, StateVersion
from workers.resharding.host_memory import HostMemory
from workers.resharding.memory import PlainMemory
from workers.resharding.whole import whole_on_first
from workers.tensors.local import as_bytes, part_of

BOTH = (("dp_shard", 0), ("tp", 1))
LAYOUTS = {
    layout.name: layout
    for layout in (
        TensorLayout("model/both", "float32", (7, 5), BOTH),
        TensorLayout("model/columns", "bfloat16", (3, 9), (("tp", 1),)),
        TensorLayout("model/odd", "float32", (3, 4, 5), (("tp", 2), ("dp_shard", 1))),
        TensorLayout("model/twice", "int8", (11,), (("tp", 0), ("dp_shard", 0))),
        TensorLayout("model/none", "float32", (0, 4), BOTH),
        TensorLayout("optimizer/step", "float32", ()),
        TensorLayout("optimizer/both/exp_avg", "float64", (7, 5), BOTH),
    )
}
STEP, HEADER = 7, {"step": 7}


def mesh_of(world_size: int) -> Mesh:
    return Mesh(Parallel.of("fsdp,tp:2"), world_size)


def whole_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: (100 * torch.rand(layout.shape, generator=generator)).to(getattr(torch, layout.dtype))
        for name, layout in LAYOUTS.items()
    }


def shards_of(at: Position, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    """As a rank holds them, each in memory of its own."""
    state = whole_state()
    parts = {name: part_of(state[name], t.box(at)).clone() for name, t in LAYOUTS.items()}
    return {name: part.to(device) for name, part in parts.items()}


@pytest.fixture
def holder():
    """It has a copy of each shard of 2 x 2 ranks."""
    server = BackupServer("127.0.0.1", "t")
    for rank in range(4):
        at = Position(mesh_of(4), rank)
        shards = {name: as_bytes(t) if t.numel() else b"" for name, t in shards_of(at).items()}
        slices = tuple(Slice(t, t.box(at), len(shards[t.name])) for t in LAYOUTS.values())
        sums = tuple(crc32(memoryview(shard)) for shard in shards.values())
        content = bytearray(b"".join(shards.values()))
        server.store.put(Copy(Key(1, rank, STEP), 1, 4, HEADER, slices, content, sums))
    yield BackupAddress("elsewhere", *server.address)
    server.close()


class Rank:
    """One process, which may hold a shard."""

    def __init__(self, ranks, memory) -> None:
        self.ranks, self.memory, self.offers = ranks, memory, []

    def hold(self, shards, at) -> None:
        label, layouts = StateVersion(STEP, 1), tuple(LAYOUTS.values())
        self.offers = [Offer(label, at, shards, lambda: (HEADER, layouts), is_live=True)]

    def gather(self, generation, members, holders) -> bool:
        """Whether this rank has its shard then, with its bits."""
        group = self.ranks.form(generation, members)
        new = mesh_of(group.size())
        pieces = Pieces(group, lambda: None, round_s=60.0)
        search = Regather(group, new, self.offers, holders, "t", memory=self.memory, pieces=pieces)
        live = dict(self.offers[0].tensors) if self.offers else {}
        found = search.run(STEP, STEP, lambda: live)
        assert found.header == HEADER
        at, self.memory = Position(new, group.rank()), found.memory
        self.hold(found.shards, at)
        expected = shards_of(at)
        assert found.shards.keys() == expected.keys()
        return all(torch.equal(found.shards[name].cpu(), expected[name]) for name in expected)


@pytest.mark.usefixtures("place_slowly")
def test_quarters_become_halves_and_quarters_again(holder):
    compare_quarters(lambda: PlainMemory(where.HERE), holder)


def test_quarters_in_memory_that_is_used_again_become_halves_and_quarters_again(holder):
    compare_quarters(HostMemory, holder)


def compare_quarters(memory, holder):
    """2 x 2 ranks of which two are lost, then 1 x 2, then 2 x 2, then one more that is inactive."""

    def body(ranks):
        assemble.HOLDER_S = assemble.ANSWER_S = 60.0
        rank = Rank(ranks, memory())
        if ranks.index in (0, 3):
            at = Position(mesh_of(4), ranks.index)
            rank.hold(shards_of(at, rank.memory.device), at)
        found = [rank.gather(1, [3, 0], [holder])] if ranks.index in (0, 3) else []
        if ranks.index < 4:
            found.append(rank.gather(2, [0, 1, 2, 3], []))
        return [*found, rank.gather(3, [4, 3, 2, 1, 0], [])]

    assert run_ranks(5, body) == [[True] * n for n in (3, 2, 2, 3, 1)]


def test_all_of_a_state_comes_from_copies(holder):
    def body(ranks):
        assemble.HOLDER_S = 60.0
        return Rank(ranks, HostMemory()).gather(1, [0, 1], [holder])

    assert run_ranks(2, body) == [True, True]


def test_a_checkpoint_of_boxes_loads_into_any_others(tmp_path):
    """Saved by 2 x 2 ranks; loaded by meshes of other sizes, of other axes, and as a whole."""
    catalogue, parts = catalogue_in(str(tmp_path)), []
    for rank in range(4):
        at = Position(mesh_of(4), rank)
        pieces = share(shards_of(at), at, lambda name, _: LAYOUTS[name])
        contents = [as_bytes(t.contiguous()) if t.numel() else memoryview(b"") for _, t in pieces]
        name = file_name(1, rank, 4)
        parts.append(write_part(catalogue.prepare(STEP), name, [b for b, _ in pieces], contents))
    manifest = catalogue.publish(STEP, 1, parts, HEADER, {})
    state = whole_state()
    assert sum(c.size for t in manifest.tensors for c in t.chunks) == sum(
        t.numel() for t in state.values()
    ), "each element once"
    meshes = [mesh_of(2), mesh_of(4), mesh_of(7), Mesh(Parallel.of("tp:3"), 3)]
    places = [Position(mesh, rank) for mesh in meshes for rank in range(mesh.world_size)]
    for at in places:
        boxes = {name: layout.box(at) for name, layout in LAYOUTS.items()}
        found = read_tensors(catalogue, manifest, boxes=boxes)
        for name, box in boxes.items():
            assert torch.equal(found[name], part_of(state[name], box)), (at, name)
    found = read_tensors(catalogue, manifest)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_the_first_rank_puts_whole_tensors_together(world_size):
    mesh, state = mesh_of(world_size), whole_state()

    def body(group):
        here = where.current()
        shards = shards_of(Position(mesh, group.rank()), here)
        found = {n: whole_on_first(shards[n], t, mesh, group, here) for n, t in LAYOUTS.items()}
        return group.rank() or all(torch.equal(found[name].cpu(), state[name]) for name in state)

    assert where.run_threads(world_size, body)[0] is True


@pytest.mark.usefixtures("place")
def test_the_norm_is_that_of_all_boxes_however_many_ranks_cut_the_rows():
    """The columns are cut by as many ranks in each of these meshes, and no row by dp_shard."""
    gradients = [LAYOUTS[name] for name in ("model/both", "model/columns", "optimizer/step")]
    found = set()
    for world_size in (2, 4, 5, 6):
        mesh = mesh_of(world_size)

        def body(group, mesh=mesh):
            here = where.current()
            shards = shards_of(Position(mesh, group.rank()), here)
            mine = [(layout, shards[layout.name]) for layout in gradients]
            squares = squares_of_shards(mine, mesh, group, group.read, here)
            return norm_of_rows(torch.cat(squares))

        found |= set(where.run_threads(world_size, body))
    state = whole_state()
    assert len(found) == 1
    expected = norm_of_rows(row_squares([state[t.name] for t in gradients]))
    assert found.pop() == pytest.approx(expected)
