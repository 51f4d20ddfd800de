"""Which samples of a pass each member uses: a pure function of the pass and of the losses in it.

Without a loss these are the sampler's batches. After one, what is left of the pass is dealt
again over who is left, in the same number of iterations. Who loads the samples is loader.py's.

Members are named by the rank that they had when the script was called; it stays theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from elastic.data.portions import MAX_GROWTH, Loss


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a pass, by the script's sampler and batch size."""

    num_positions: int
    """Of all replicas, padding included."""
    replicas: int
    batch_size: int
    drop_last: bool
    num_carried: int = 0
    """Samples of an earlier pass that had no place in it: at the positions behind the others."""
    is_in_blocks: bool = False
    """A replica's positions in an iteration follow one another; else there are those of all others
    between two of them."""

    @property
    def iterations(self) -> int:
        of_replica = self.num_positions // self.replicas
        if self.drop_last:
            return of_replica // self.batch_size
        return -(-of_replica // self.batch_size)

    @property
    def num_dealt(self) -> int:
        """Positions that are not dropped."""
        return min(self.num_positions, self.iterations * self.batch_size * self.replicas)


@dataclass(frozen=True, slots=True)
class Regular:
    """The sampler's own batches."""

    first: int
    iterations: int
    members: tuple[int, ...]
    shape: Shape

    def whole(self, iteration: int) -> range:
        """Of all members."""
        size = self.shape.batch_size * self.shape.replicas
        return range(iteration * size, min((iteration + 1) * size, self.shape.num_dealt))

    def share(self, iteration: int, member: int) -> Sequence[int]:
        replica, size = self.members.index(member), self.shape.batch_size
        if self.shape.is_in_blocks:
            return self.whole(iteration)[replica * size : (replica + 1) * size]
        return self.whole(iteration)[replica :: self.shape.replicas]


@dataclass(frozen=True, slots=True)
class Even:
    """Positions in their order, evenly over iterations and members."""

    first: int
    iterations: int
    members: tuple[int, ...]
    positions: Sequence[int]

    def whole(self, iteration: int) -> Sequence[int]:
        """Of all members."""
        return part(self.positions, iteration - self.first, self.iterations)

    def share(self, iteration: int, member: int) -> Sequence[int]:
        return part(self.whole(iteration), self.members.index(member), len(self.members))


Stretch: TypeAlias = Regular | Even
SPARE = 4
"""Beyond MAX_GROWTH a batch may become larger by one part in so many of the script's own, for what
the lost had under way. Where half of the ranks are lost there is no place for it else."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Of a pass."""

    shape: Shape
    stretches: tuple[Stretch, ...]
    left_over: tuple[int, ...] = ()
    """Positions for which there is no place in this pass."""

    @property
    def iterations(self) -> int:
        return self.shape.iterations

    @property
    def members(self) -> tuple[int, ...]:
        return self.stretches[-1].members

    def stretch_of(self, iteration: int) -> Stretch:
        return next(s for s in reversed(self.stretches) if s.first <= iteration)

    def share(self, iteration: int, member: int) -> Sequence[int]:
        """The positions that a member uses in an iteration."""
        return self.stretch_of(iteration).share(iteration, member)

    def usual(self, iteration: int) -> float:
        """Samples of a member in an iteration, without a loss: fewer in the last one."""
        stretch = self.stretch_of(iteration)
        if isinstance(stretch, Regular):
            return len(stretch.whole(iteration)) / len(stretch.members)
        return self.shape.batch_size

    def num_used(self, iteration: int, members: Sequence[int]) -> int:
        """The positions that these use in an iteration, of those that it was dealt for."""
        stretch = self.stretch_of(iteration)
        lost = [] if members == stretch.members else set(stretch.members).difference(members)
        missed = sum(len(stretch.share(iteration, member)) for member in lost)
        return len(stretch.whole(iteration)) - missed


def part(positions: Sequence[int], index: int, num_parts: int) -> Sequence[int]:
    begin, end = (len(positions) * i // num_parts for i in (index, index + 1))
    return positions[begin:end]


def plan_of(shape: Shape, members: tuple[int, ...], losses: Sequence[Loss] = ()) -> Plan:
    """Of a pass that these members have begun, after these losses."""
    plan = begun(shape, members)
    for loss in losses:
        plan = dealt_again(plan, loss)
    return plan


def begun(shape: Shape, members: tuple[int, ...]) -> Plan:
    if len(members) == shape.replicas and not shape.num_carried:
        return Plan(shape, (Regular(0, shape.iterations, members, shape),))
    carried = range(shape.num_positions, shape.num_positions + shape.num_carried)
    positions = [*range(shape.num_dealt), *carried]
    if not shape.iterations:
        return Plan(shape, (Even(0, 0, members, ()),), tuple(positions))
    return Plan(shape, (Even(0, shape.iterations, members, positions),))


def dealt_again(plan: Plan, loss: Loss) -> Plan:
    """What the lost had of iterations that have not counted, and all that nobody has drawn."""
    lost = [member for member in loss.before if member not in loss.after]
    furthest = max(loss.furthest, plan.stretches[-1].first - 1)  # who was further may be lost, too
    positions = [
        position
        for i in range(loss.counted + 1, furthest + 1)
        for member in lost
        for position in plan.share(i, member)
    ]
    for i in range(furthest + 1, plan.iterations):
        for member in plan.stretch_of(i).members:
            positions += plan.share(i, member)
    first = furthest + 1
    iterations = plan.iterations - first
    size = plan.shape.batch_size
    room = iterations * (MAX_GROWTH * size + size // SPARE) * len(loss.after)
    stretch = Even(first, iterations, loss.after, positions[:room])
    kept = tuple(s for s in plan.stretches if s.first < first)
    left_over = (*plan.left_over, *positions[room:])
    return replace(plan, stretches=(*kept, stretch), left_over=left_over)
