"""The newest state that a generation's members can put together: from their live shards, from the
own copies that they keep of the steps before, and from the copies that holders keep of who is lost.

All shards must be of one step that one generation computed. What is kept is
workers/backup/client.py's, how shards travel among members is transfer.py's.
"""

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic.protocol.backup_assignment import BackupAddress
from elastic.protocol.encoding import decode, encode, registry
from elastic.protocol.layout import BlockSets, Position, TensorLayout
from elastic.protocol.mesh import Mesh, Parallel
from elastic.protocol.messages.backup import Copies, Describe, Described, Have
from workers.backup.server import CHECKED_BYTES_S, ask, connect, read_boxes
from workers.backup.store import DamagedCopy, Key
from workers.distributed.exchange import gather_json
from workers.distributed.keepalive import watch_host
from workers.distributed.pieces import Pieces
from workers.distributed.process_group import AnyGroup
from workers.resharding.memory import ShardMemory
from workers.resharding.moves import COPY, Move, gentle_order, moved_bytes, plan
from workers.resharding.transfer import Sources, Wanted, exchange
from workers.tensors.local import as_bytes

log = logging.getLogger(__name__)
HOLDER_S = 2.0
"""How long a holder may be silent before its copies count as lost."""
ANSWER_S = 0.25
"""The same where its copies are not needed, only good to know of."""


class ShardLost(Exception):
    """A part of the state is held by no member. Every member sees it."""


class StateVersion(NamedTuple):
    """A state: shards of the same version make one, whatever mesh they were cut for."""

    step: int
    origin: int
    """The generation that computed the step."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Shards that this rank has in memory."""

    version: StateVersion
    place: Position
    tensors: Mapping[str, Tensor]
    describe: Callable[[], tuple[dict[str, Any], Sequence[TensorLayout]]]
    is_live: bool = False
    """The model's own, and not a copy of them."""
    is_intact: Callable[[], bool] = lambda: True
    """A copy has the checksums that it was made with."""

    def to_json(self) -> list[Any]:
        return [*self.version, self.place.rank, *told_mesh(self.place.mesh)]


@dataclass(frozen=True, slots=True)
class _Source:
    version: StateVersion
    place: Position
    owner: int
    """A member's rank, or COPY."""
    index: int = 0
    """Among its owner's offers."""
    copy: tuple[BackupAddress, Key] | None = None
    size_bytes: int = 0
    """Of the copy."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """This rank's shards of a state."""

    version: StateVersion
    header: dict[str, Any]
    shards: dict[str, Tensor]
    layouts: tuple[TensorLayout, ...]
    memory: ShardMemory
    """Where they may be."""
    moved_bytes: int = 0
    """From one rank or holder to another, of all ranks."""
    is_held: bool = False
    """Holders have all of the state."""


class Regather:
    """One search for a state among members and holders. All of it is collective."""

    def __init__(
        self,
        group: AnyGroup,
        new: Mesh,
        offers: Sequence[Offer],
        holders: Sequence[BackupAddress],
        token: str,
        *,
        memory: ShardMemory,
        pieces: Pieces,
    ) -> None:
        """holders: all that this rank knows; rank 0 asks them. memory: of this rank's live shards,
        or unused. pieces: of this search."""
        self._group, self._new, self._offers = group, new, offers
        self._holders, self._token = holders, token
        self._memory, self._pieces = memory, pieces
        self._sources: list[_Source] = []
        self._damaged: set[int] = set()
        """Of this rank's offers."""
        self._why = "no member holds anything"

    def run(self, step: int, known_step: int, give_up: Callable[[], dict[str, Tensor]]) -> Gathered:
        """The newest state of at most `step` committed steps. Raises PeerLost and ShardLost.

        known_step: what this rank could report up to; rank 0's counts. give_up: gives the live
        shards away, once nothing that may still happen needs them.
        """
        self._give_up = give_up
        mine = {"offers": [o.to_json() for o in self._offers], "known": known_step}
        said = gather_json(self._group, mine)
        limit = min(step, said[0]["known"])
        for owner, of_rank in enumerate(said):
            for index, (at, origin, rank, *told) in enumerate(of_rank["offers"]):
                place = Position(mesh_told(self._new.parallel, told), rank)
                self._sources.append(_Source(StateVersion(at, origin), place, owner, index))
        newest = self._versions(limit)[:1]
        found = next(filter(None, map(self._try, newest)), None)
        self._ask_holders(HOLDER_S if found is None else ANSWER_S)
        if found is None:
            found = next(filter(None, map(self._try_hard, self._versions(limit))), None)
        if found is None:
            raise ShardLost(f"up to step {limit}: {self._why}")
        return replace(found, is_held=self._is_held(found.version))

    def _versions(self, limit: int) -> list[StateVersion]:
        """The newest first."""
        return sorted({s.version for s in self._sources if s.version.step <= limit}, reverse=True)

    def _ask_holders(self, timeout_s: float) -> None:
        found: list[Any] = []
        if self._group.rank() == 0:
            found = copies_in(self._holders, self._token, timeout_s)
        said = gather_json(self._group, found)[0]
        for at, generation, rank, step, origin, size_bytes, lacks, *told in said:
            place = Position(mesh_told(self._new.parallel, told), rank, block_sets(lacks))
            copy = BackupAddress(*at), Key(generation, rank, step)
            self._sources.append(
                _Source(StateVersion(step, origin), place, COPY, 0, copy, size_bytes)
            )

    def _try_hard(self, version: StateVersion) -> Gathered | None:
        """Again without the copies that could not be read, as long as there are others."""
        while True:
            before = len(self._sources)
            found = self._try(version)
            if found is not None or len(self._sources) == before:
                return found

    def _try(self, version: StateVersion) -> Gathered | None:
        """None if some shards are nobody's, or could not be read; then without who had them."""
        sources = [s for s in self._sources if s.version == version]
        knows = next((s for s in sources if not s.place.lacks), None)
        if knows is None:  # all were struck off, or have not all of their part
            return None
        described = self._describe(knows)
        if described is None:
            self._sources.remove(knows)
            return None
        header, layouts = described
        sources = [s for s in self._sources if s.version == version]
        held, owners = [s.place for s in sources], [s.owner for s in sources]
        try:
            plans = plan(layouts, held, self._new, owners)
        except LookupError as error:
            self._why = f"{error} at step {version.step}, no holder either"
            return None
        has_copies = any(owners[m.source] == COPY for moves in plans for m in moves)
        memory, freed = self._memory, None
        if not self._needs_live(version, has_copies) and (has_copies or memory.can_reuse):
            drop_shards(self._give_up(), layouts)
            memory.vacate()
        elif not has_copies:
            freed = self._give_up()
        else:  # a copy may turn out to be damaged
            memory = memory.beside()
        shards, failed = self._exchange(layouts, plans, sources, memory, freed)
        everywhere = gather_json(self._group, failed)
        bad = {i for of_rank in everywhere for i in of_rank}
        if bad:
            self._sources = [s for s in self._sources if s not in [sources[i] for i in sorted(bad)]]
            return None
        if freed is not None:
            memory = memory.beside()
        moved = moved_bytes(layouts, plans, owners)
        return Gathered(version, header, shards, layouts, memory, moved)

    def _needs_live(self, version: StateVersion, has_copies: bool) -> bool:
        """Whether there are live shards that nothing else has on this rank: of the state, or of an
        earlier one, to go back to if a copy turns out damaged."""
        live = next((o for o in self._offers if o.is_live), None)
        if live is None or self._twin(live) is not live:
            return False
        return live.version == version or (has_copies and live.version < version)

    def _twin(self, offer: Offer) -> Offer:
        """A copy on this rank that will do in its stead, or itself."""
        intact = [o for i, o in enumerate(self._offers) if i not in self._damaged]
        same = [o for o in intact if (o.version, o.place) == (offer.version, offer.place)]
        return min(same, key=lambda o: o.is_live, default=offer)

    def _is_held(self, version: StateVersion) -> bool:
        """Holders have said that they have a copy of every shard."""
        copies = {s.place for s in self._sources if s.version == version and s.owner == COPY}
        copies = {place for place in copies if not place.lacks}
        meshes = {place.mesh for place in copies}
        return any(m.is_covered_by({p.rank for p in copies if p.mesh == m}) for m in meshes)

    def _describe(self, source: _Source) -> tuple[dict[str, Any], tuple[TensorLayout, ...]] | None:
        """JSON part and tensors of a state, from one who holds some of it. Offers of it that were
        damaged in memory are sources no more."""
        speaker = max(source.owner, 0)
        said: Any = None
        for i, offer in enumerate(self._offers):
            self._pieces.begin()
            if offer.version == source.version and i not in self._damaged and not offer.is_intact():
                log.error(
                    "step=%d this rank's own copy is damaged and not used", offer.version.step
                )
                self._damaged.add(i)
        self._pieces.begin()
        if self._group.rank() == speaker:
            if source.copy is None:
                header, layouts = self._offers[source.index].describe()
                said = [header, encode(tuple(layouts))]
            else:
                said = self._described_copy(*source.copy)
        mine = {"damaged": sorted(self._damaged), "state": said}
        everywhere = gather_json(self._group, mine)
        damaged = {(r, i) for r, of_rank in enumerate(everywhere) for i in of_rank["damaged"]}
        self._sources = [s for s in self._sources if (s.owner, s.index) not in damaged]
        said = everywhere[speaker]["state"]
        return said and (said[0], decode(said[1], registry(TensorLayout)))

    def _described_copy(self, holder: BackupAddress, key: Key) -> list[Any] | None:
        with suppress(OSError), connect(holder[1:], self._token, HOLDER_S) as connection:
            copy = ask(connection, Describe(key))
            if isinstance(copy, Described) and copy.state is not None:
                return [copy.state, encode(tuple(s.layout for s in copy.slices))]
        return None

    def _exchange(
        self,
        layouts: Sequence[TensorLayout],
        plans: list[list[Move]],
        sources: list[_Source],
        memory: ShardMemory,
        freed: dict[str, Tensor] | None,
    ) -> tuple[dict[str, Tensor], list[int]]:
        """This rank's shards, and which copies it could not read."""
        failed: list[int] = []
        connections: dict[BackupAddress, socket.socket] = {}

        def read(index: int, wanted: list[Wanted]) -> None:
            copy = sources[index].copy
            assert copy is not None
            holder, key = copy
            try:
                if holder not in connections:
                    connections[holder] = connect(holder[1:], self._token, HOLDER_S)
                    watch_host(connections[holder], HOLDER_S, is_sender=False)
                connections[holder].settimeout(silence_s(sources[index].size_bytes))
                self._read_copy(connections[holder], key, wanted)
            except (OSError, LookupError, DamagedCopy) as error:
                log.error('a copy is not used reason="%s"', error)
                failed.append(index)

        me = self._group.rank()
        own = {i: self._offers[s.index] for i, s in enumerate(sources) if s.owner == me}
        mine: dict[int, Mapping[str, Tensor]] = {i: o.tensors for i, o in own.items()}
        if not freed:  # else nothing may refer to live shards, which are emptied on the way
            mine = {i: {**self._twin(o).tensors, **o.tensors} for i, o in own.items()}
        held, owners = [s.place for s in sources], [s.owner for s in sources]
        where = Sources(held, owners, mine, read)
        order = gentle_order(layouts, held, self._new, owners)
        try:
            shards = exchange(
                [(layouts[i], plans[i]) for i in order],
                where,
                Position(self._new, me),
                self._group,
                memory,
                freed=freed,
                begin_piece=self._pieces.begin,
            )
            if any(sources[m.source].owner == COPY for moves in plans for m in moves):
                self._pieces.wait_for_all()
        finally:
            for connection in connections.values():
                connection.close()
        return shards, failed

    def _read_copy(self, connection: socket.socket, key: Key, wanted: list[Wanted]) -> None:
        is_host = [w.into.device.type == "cpu" and w.into.is_contiguous() for w in wanted]
        hosted = [
            w.into if hosts else torch.empty(w.into.shape, dtype=w.into.dtype)
            for w, hosts in zip(wanted, is_host, strict=True)
        ]
        into = [as_bytes(t) if t.numel() else memoryview(b"") for t in hosted]
        asked = [(w.name, w.box) for w in wanted]
        read_boxes(connection, key, asked, into, self._pieces.begin_apart)
        for w, part in zip(wanted, hosted, strict=True):
            if part is not w.into:
                w.into.copy_(part)


def drop_shards(live: dict[str, Tensor], layouts: Sequence[TensorLayout]) -> None:
    """What is not cut stays: it takes little, and is described as it is here."""
    for layout in layouts:
        if layout.is_cut:
            live.pop(layout.name, None)


def told_mesh(mesh: Mesh) -> list[Any]:
    """What JSON tells of the mesh that shards were cut for."""
    return [mesh.world_size, mesh.cuts]


def mesh_told(parallel: Parallel, told: Sequence[Any]) -> Mesh:
    world_size, cuts = told
    return Mesh(parallel, world_size, (), tuple(tuple(of_pipeline) for of_pipeline in cuts))


def block_sets(told: Sequence[Sequence[int]]) -> BlockSets:
    """From JSON."""
    return tuple(tuple(blocks) for blocks in told)


def silence_s(size_bytes: int) -> float:
    """How long a holder may take over a copy of this size: it checks it, and adds up what it
    sends."""
    return HOLDER_S + 2 * size_bytes / CHECKED_BYTES_S


def copies_in(holders: Sequence[BackupAddress], token: str, timeout_s: float) -> list[list[Any]]:
    """What the holders have: where, generation, rank, step, origin, bytes, what it lacks, and as
    `told_mesh`."""

    def ask_one(holder: BackupAddress) -> list[list[Any]]:
        try:
            with connect(holder[1:], token, timeout_s) as connection:
                have = ask(connection, Have())
        except OSError as error:
            log.warning('holder=%s:%d lost reason="%s"', *holder[1:], error)
            return []
        copies = have.copies if isinstance(have, Copies) else ()
        return [
            [list(holder), *c.key, c.origin, c.size_bytes, c.lacks, c.world_size, c.cuts]
            for c in copies
        ]

    with ThreadPoolExecutor(max(1, len(holders))) as pool:
        return [copy for of_holder in pool.map(ask_one, holders) for copy in of_holder]


def newest_whole(
    holders: Sequence[BackupAddress], token: str, parallel: Parallel, at_most: int
) -> int | None:
    """The newest step of which the holders alone have every shard."""
    ranks: dict[tuple[int, int, Mesh], set[int]] = {}
    for _, _, rank, step, origin, _, lacks, *told in copies_in(holders, token, HOLDER_S):
        if not lacks:
            ranks.setdefault((step, origin, mesh_told(parallel, told)), set()).add(rank)
    whole = [step for (step, _, mesh), found in ranks.items() if mesh.is_covered_by(found)]
    return max((step for step in whole if step <= at_most), default=None)
