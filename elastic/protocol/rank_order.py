"""Which rank takes which position of a plan: pipelines lie inside of nodes where they fit, and else
the fewest bytes of the state move. Pure, and the same on all who ask.

Which positions there are is pipeline.py's, what goes from whom to whom workers/resharding's.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TypeAlias

from elastic.protocol.pipeline import PipelinePlan

Blocks: TypeAlias = tuple[int, ...]
Counts: TypeAlias = Mapping[Blocks, int]
Taken: TypeAlias = dict[tuple[Blocks, Blocks], int]
"""How many ranks with some blocks take positions with some others."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank has before it takes its position."""

    node: str = ""
    """Empty where it is not known."""
    blocks: Blocks = ()
    """Whose state it has in memory."""
    position: int = 0
    """Where it has that: of those who have the same the order stays."""
    step: int = 0
    """Of that state."""


def order_ranks(
    plan: PipelinePlan,
    ranks: Sequence[Holding],
    sizes: Mapping[Blocks, int],
    before: Sequence[int] = (),
) -> tuple[int, ...]:
    """Of each rank its position, as `Mesh.order`.

    Pipelines are given to nodes first, each to the one that it leaves the least room on; deeper
    ones before others, or behind them if more fit so. Then a node's ranks share its positions, so
    that they lack the fewest bytes, and whoever is left of all nodes the other positions, likewise.
    sizes: of what the same blocks need. before: of each rank its place among those that have
    nothing; empty: its rank.
    """
    newest = max((has.step for has in ranks if has.blocks), default=0)
    # One step behind are those whose step was cut off: the others may have to go back to it.
    ranks = [has if has.step >= newest - 1 else Holding(has.node) for has in ranks]
    before = before or range(len(ranks))
    in_order = sorted(
        range(len(ranks)),
        key=lambda r: (0, ranks[r].position) if ranks[r].blocks else (1, before[r]),
    )
    on_node: dict[str, list[int]] = {}
    for rank in in_order:
        on_node.setdefault(ranks[rank].node, []).append(rank)
    assignment = _Assignment(plan.places(), ranks, sizes)
    ways = (_inside(plan, on_node, deepest_first=way) for way in (True, False))
    inside: dict[str, list[int]] = {}
    for node, positions in max(ways, key=len):
        inside.setdefault(node, []).extend(positions)
    for node, positions in inside.items():
        assignment.assign(on_node[node], positions)
    order, taken = assignment.order, set(assignment.order)
    ranks_left = [rank for rank in in_order if order[rank] < 0]
    assignment.assign(ranks_left, [at for at in range(len(ranks)) if at not in taken])
    return tuple(order)


def _inside(
    plan: PipelinePlan, on_node: Mapping[str, Sequence[int]], *, deepest_first: bool
) -> list[tuple[str, range]]:
    """The pipelines that lie on one node: its name, and their positions."""
    with_room: dict[int, deque[str]] = {}
    for node, ranks in on_node.items():
        with_room.setdefault(len(ranks), deque()).append(node)
    depths = [pipeline.depth for pipeline in plan.pipelines]
    firsts = list(accumulate(depths, initial=0))
    rooms, found = sorted(with_room), list[tuple[str, range]]()
    for number in sorted(range(len(depths)), key=lambda i: depths[i], reverse=deepest_first):
        first, depth = firsts[number], depths[number]
        least = bisect_left(rooms, depth)
        if least == len(rooms):
            continue
        room = rooms[least]
        node = with_room[room].popleft()
        found.append((node, range(first, first + depth)))
        if not with_room[room]:
            del rooms[least], with_room[room]
        if room - depth not in with_room:
            insort(rooms, room - depth)
        with_room.setdefault(room - depth, deque()).append(node)
    return found


class _Assignment:
    """Of ranks to positions, some after others."""

    def __init__(
        self, places: Sequence[Blocks], ranks: Sequence[Holding], sizes: Mapping[Blocks, int]
    ) -> None:
        """places: the blocks of each position."""
        self._places, self._ranks = places, ranks
        self.order = [-1] * len(ranks)
        self._sizes = list(sizes.values())
        self._needs: dict[int, int] = {}
        """What each block needs, a bit for each of the sizes."""
        for bit, blocks in enumerate(sizes):
            for block in blocks:
                self._needs[block] = self._needs.get(block, 0) | 1 << bit
        self._bits: dict[Blocks, int] = {}
        self._common: dict[tuple[Blocks, Blocks], int] = {}
        self._known: dict[tuple[object, object], Taken] = {}

    def assign(self, ranks: Sequence[int], positions: Sequence[int]) -> None:
        """A rank to each position, of at least as many.

        Whoever has just what a position needs takes such a one: of two who took each other's, both
        together would lack at least as much.
        """
        have, need = dict[Blocks, deque[int]](), dict[Blocks, deque[int]]()
        for rank in ranks:
            have.setdefault(self._ranks[rank].blocks, deque()).append(rank)
        for position in positions:
            need.setdefault(self._places[position], deque()).append(position)

        def take(blocks: Blocks, place: Blocks, count: int) -> None:
            for _ in range(count):
                self.order[have[blocks].popleft()] = need[place].popleft()

        for place in need:
            take(place, place, min(len(have.get(place, ())), len(need[place])))
        supply = {blocks: len(left) for blocks, left in have.items() if blocks and left}
        demand = {place: len(left) for place, left in need.items() if place and left}
        for (blocks, place), count in self._kept(supply, demand).items():
            take(blocks, place, count)
        positions_left = (at for left in need.values() for at in left)
        ranks_left = (rank for rank in ranks if self.order[rank] < 0)
        for rank, position in zip(ranks_left, sorted(positions_left), strict=False):
            self.order[rank] = position

    def _kept(self, supply: Counts, demand: Counts) -> Taken:
        """Who takes what, for the rest nothing is gained. Nodes with the same are many."""
        key = tuple(supply.items()), tuple(demand.items())
        if key not in self._known:
            gains: dict[Blocks, dict[Blocks, int]] = {}
            for blocks in supply:
                of_each = ((place, self._common_bytes(blocks, place)) for place in demand)
                gains[blocks] = {place: gain for place, gain in of_each if gain}
            self._known[key] = assign_counts(supply, demand, gains)
        return self._known[key]

    def _common_bytes(self, one: Blocks, other: Blocks) -> int:
        """Of what the blocks of both need."""
        if (one, other) not in self._common:
            common, total = self._bits_of(one) & self._bits_of(other), 0
            while common:
                low = common & -common
                total += self._sizes[low.bit_length() - 1]
                common ^= low
            self._common[one, other] = total
        return self._common[one, other]

    def _bits_of(self, blocks: Blocks) -> int:
        if blocks not in self._bits:
            bits = 0
            for block in blocks:
                bits |= self._needs.get(block, 0)
            self._bits[blocks] = bits
        return self._bits[blocks]


def assign_counts(
    supply: Counts, demand: Counts, gains: Mapping[Blocks, Mapping[Blocks, int]]
) -> Taken:
    """The assignment that gains most (successive best paths).

    supply, demand: how many have, or need, the same blocks. gains: of one, above 0.
    """
    has, needs, taken = dict(supply), dict(demand), Taken()
    while path := _best_path(has, needs, gains, taken):
        takes = list(zip(path[::2], path[1::2], strict=True))
        leaves = list(zip(path[2::2], path[1:-1:2], strict=True))
        count = min(has[path[0]], needs[path[-1]], *(taken[pair] for pair in leaves))
        has[path[0]] -= count
        needs[path[-1]] -= count
        for pair in takes:
            taken[pair] = taken.get(pair, 0) + count
        for pair in leaves:
            taken[pair] -= count
            if not taken[pair]:
                del taken[pair]
    return taken


def _best_path(
    has: Counts, needs: Counts, gains: Mapping[Blocks, Mapping[Blocks, int]], taken: Taken
) -> list[Blocks]:
    """From one who has no place, to the place that it takes, to one who leaves that, and so on to a
    place that is free. Empty: nothing is to be gained."""
    takers: dict[Blocks, list[Blocks]] = {}
    for blocks, place in taken:
        takers.setdefault(place, []).append(blocks)
    gained = {blocks: 0 for blocks, count in has.items() if count}
    by_place: dict[Blocks, int] = {}
    taker: dict[Blocks, Blocks] = {}
    left: dict[Blocks, Blocks] = {}
    changed = deque(gained)
    while changed:
        blocks = changed.popleft()
        for place, gain in gains[blocks].items():
            total = gained[blocks] + gain
            if total <= by_place.get(place, 0):
                continue
            by_place[place], taker[place] = total, blocks
            for other in takers.get(place, ()):
                without = total - gains[other][place]
                if without > gained.get(other, -inf):
                    gained[other], left[other] = without, place
                    changed.append(other)
    ends = [place for place, count in needs.items() if count and place in by_place]
    if not ends:
        return []
    path = [max(ends, key=lambda place: by_place[place])]
    while True:
        path.append(taker[path[-1]])
        if path[-1] not in left:
            return path[::-1]
        path.append(left[path[-1]])
