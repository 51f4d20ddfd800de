"""Which place in the mesh each member of a generation has, or why so many workers make no mesh.

Who is to be a member is scaling.py's; what a mesh is, elastic/protocol/mesh.py's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.protocol.membership import counted
from elastic.protocol.mesh import Mesh, Parallel

CHUNK = 256
"""Workers per tuple of a Nodes."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The node of each worker, "" where it is not known: an immutable list by worker number.

    In chunks, so that adding to 100,000 copies a few hundred references.
    """

    chunks: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, nodes: Iterable[tuple[int, str]]) -> "Nodes":
        """From (worker, node)."""
        by_chunk: dict[int, list[str]] = {}
        for worker, node in nodes:
            chunk = by_chunk.setdefault(worker // CHUNK, [""] * CHUNK)
            chunk[worker % CHUNK] = node
        last = max(by_chunk, default=-1)
        return cls(tuple(tuple(by_chunk.get(i, ())) for i in range(last + 1)))

    def add(self, worker: int, node: str) -> "Nodes":
        index, at = divmod(worker, CHUNK)
        chunks = [*self.chunks, *(() for _ in range(len(self.chunks), index + 1))]
        chunk = list(chunks[index] or [""] * CHUNK)
        chunk[at] = node
        chunks[index] = tuple(chunk)
        return Nodes(tuple(chunks))

    def node(self, worker: int) -> str:
        index, at = divmod(worker, CHUNK)
        return self.chunks[index][at] if index < len(self.chunks) and self.chunks[index] else ""

    def only(self, workers: Iterable[int]) -> "Nodes":
        """Without those who are no more."""
        return Nodes.of((w, node) for w in workers if (node := self.node(w)))


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everybody is in the mesh of one generation."""

    order: tuple[int, ...] = ()
    """As `Mesh.order`."""
    note: str = ""
    """What is not as it was wanted; empty if all is."""


def wants_nodes(parallel: Parallel) -> bool:
    """Whether it matters who is on which node: groups smaller than all ranks stay inside of one."""
    return parallel.dp_shard is not None or parallel.ranks_per_microbatch > 1


def shortage(parallel: Parallel, num_workers: int, at_least: int = 1) -> str:
    """Why so many workers make no generation; empty if they do.

    at_least: that the user wants.
    """
    needed = parallel.fewest_ranks
    if num_workers < needed:
        are_there = f"{num_workers} {'is' if num_workers == 1 else 'are'} there"
        return f"parallel='{parallel}' needs {counted(needed, 'worker')}, and {are_there}"
    if num_workers < at_least:
        return f"{num_workers} of at least {at_least} workers left"
    return ""


def plan(parallel: Parallel, workers: Sequence[int], nodes: Nodes) -> Plan:
    """For members by rank, of whom there is no shortage.

    Whole replicas lie inside of nodes as far as possible, in the order of the first rank of each
    node, then what shares a layer. What is left of the nodes lies across them, or stands by. Of a
    pipeline whoever is on one node are neighbours. How deep it is, and who has which blocks, the
    members know alone: from this order they make theirs (elastic/protocol/rank_order.py).
    """
    mesh = Mesh(parallel, len(workers))
    if not wants_nodes(parallel):
        return Plan()
    left: dict[str, list[int]] = {}
    for rank, worker in enumerate(workers):
        left.setdefault(nodes.node(worker), []).append(rank)
    by_position: list[int] = []
    layer = parallel.cp * parallel.tp
    # Stages share their state across pipelines, once in a step; neighbours exchange all the time.
    replica = parallel.pp if parallel.pp > 1 else mesh.num_shards
    for size in (replica * layer, layer, parallel.tp, 1):
        for node, ranks in left.items():
            count = len(ranks) - len(ranks) % size
            by_position += ranks[:count]
            left[node] = ranks[count:]
    order = [0] * len(workers)
    for position, rank in enumerate(by_position):
        order[rank] = position
    is_plain = order == list(range(len(workers)))
    return Plan(() if is_plain else tuple(order), _note(mesh))


def _note(mesh: Mesh) -> str:
    wanted, found = mesh.parallel.dp_shard, mesh.num_shards
    if wanted is not None and found < wanted:
        return f"hsdp:{wanted} over {counted(found, 'worker')} becomes fsdp over {found}"
    num_inactive = mesh.world_size - mesh.num_active
    if num_inactive and mesh.parallel.pp == 1:
        stand = "stands" if num_inactive == 1 else "stand"
        return f"{num_inactive} {stand} by, which {mesh.parallel} has no place for"
    return ""
