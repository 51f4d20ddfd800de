"""The plan of a pipeline: how many pipelines so many ranks form, how deep each is, where its blocks
are cut into stages, and how many micro-batches it computes. Pure, and the same on all who ask.

Costs are per block, in any unit. A pipeline takes a number of times its largest stage that follows
from its schedule (schedule.py); a step takes what its slowest pipeline takes.
Pipelines of several depths lie side by side, so that whoever survives a loss has work to do.

Which rank has which place is elastic/control/planning.py's; what a stage does, workers/parallel's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from elastic.protocol.membership import counted
from elastic.protocol.schedule import (
    least_wait,
    most_in,
    num_ranks_of,
    num_stages_of,
    num_thirds,
    place_of,
    stages_at,
    stages_per_rank,
)

MOST_IDLE = 0.3
"""An idle share above this is worth a warning."""


@dataclass(frozen=True, slots=True)
class Stages:
    """One pipeline: its stages, and its share of a step."""

    cuts: tuple[int, ...]
    """Stage s has the blocks cuts[s] to cuts[s + 1], that one excluded; never none."""
    ids: range
    """The micro-batches that it computes."""
    largest: float
    """Cost of its most expensive stage."""
    schedule: str = ""

    @property
    def num_stages(self) -> int:
        return len(self.cuts) - 1

    @property
    def depth(self) -> int:
        """Its ranks."""
        return num_ranks_of(self.num_stages, self.schedule)

    @property
    def time(self) -> float:
        """Of a step, in units of cost."""
        return num_thirds(len(self.ids), self.depth, self.schedule) * self.largest / 3

    def stages_at(self, place: int) -> tuple[int, ...]:
        """Those of one of its ranks."""
        return stages_at(place, self.num_stages, self.schedule)

    def blocks(self, stage: int) -> range:
        return range(self.cuts[stage], self.cuts[stage + 1])

    def stage_of(self, block: int) -> int:
        return next(s for s in range(self.num_stages) if block in self.blocks(s))

    def place_of(self, stage: int) -> int:
        """The rank of the pipeline that has a stage."""
        return place_of(stage, self.num_stages, self.schedule)


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a plan."""

    pipeline: int
    stage: int
    """The first of those that it has."""


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What so many ranks do in a step; by position, pipeline by pipeline, the stages in order."""

    num_ranks: int
    costs: tuple[float, ...]
    pipelines: tuple[Stages, ...]

    @property
    def num_active(self) -> int:
        """Positions behind these are inactive."""
        return sum(p.depth for p in self.pipelines)

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """As `Mesh.cuts`."""
        return tuple(p.cuts for p in self.pipelines)

    @property
    def time(self) -> float:
        """Of a step, in units of cost."""
        return max(p.time for p in self.pipelines)

    @property
    def idle_share(self) -> float:
        """Of the time of the ranks that are active, what they wait."""
        num_microbatches = sum(len(p.ids) for p in self.pipelines)
        return 1 - num_microbatches * sum(self.costs) / (self.num_active * self.time)

    @property
    def uneven_share(self) -> float:
        """Of the time of the ranks that are active, what they would wait with any number of
        micro-batches, as stages cost more or less."""
        busy = sum(len(p.ids) * p.num_stages * p.largest for p in self.pipelines)
        return 1 - sum(len(p.ids) for p in self.pipelines) * sum(self.costs) / busy

    def seat(self, position: int) -> Seat | None:
        """None: it is inactive."""
        for number, pipeline in enumerate(self.pipelines):
            if position < pipeline.depth:
                return Seat(number, position)
            position -= pipeline.depth
        return None

    def position(self, seat: Seat) -> int:
        return sum(p.depth for p in self.pipelines[: seat.pipeline]) + seat.stage

    def stages(self, position: int) -> list[range]:
        """The blocks of each stage of a position; none if it is inactive."""
        seat = self.seat(position)
        if seat is None:
            return []
        pipeline = self.pipelines[seat.pipeline]
        return [pipeline.blocks(stage) for stage in pipeline.stages_at(seat.stage)]

    def blocks(self, position: int) -> tuple[int, ...]:
        """That a position holds and computes; none if it is inactive."""
        return tuple(block for stage in self.stages(position) for block in stage)

    def places(self) -> list[tuple[int, ...]]:
        """`blocks` of all positions."""
        known: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        found: list[tuple[int, ...]] = []
        for pipeline in self.pipelines:
            if pipeline.cuts not in known:
                of_stages = [pipeline.blocks(stage) for stage in range(pipeline.num_stages)]
                known[pipeline.cuts] = [
                    tuple(
                        block for stage in pipeline.stages_at(place) for block in of_stages[stage]
                    )
                    for place in range(pipeline.depth)
                ]
            found += known[pipeline.cuts]
        return found + [()] * (self.num_ranks - len(found))

    def ids(self, position: int) -> range:
        """The micro-batches that a position computes its part of."""
        seat = self.seat(position)
        return range(0) if seat is None else self.pipelines[seat.pipeline].ids

    def segments(self) -> list[range]:
        """The longest runs of blocks that the same positions have."""
        cuts = sorted({cut for p in self.pipelines for cut in p.cuts})
        return [range(a, b) for a, b in pairwise(cuts)]

    def positions_with(self, block: int) -> list[int]:
        """The positions that hold a block, one in each pipeline."""
        found: list[int] = []
        first = 0
        for pipeline in self.pipelines:
            found.append(first + pipeline.place_of(pipeline.stage_of(block)))
            first += pipeline.depth
        return found

    def __str__(self) -> str:
        """ "2 pipelines of 2 and 3 stages, 5 and 11 micro-batches; 0.12 idle"."""
        depths, shares = zip(*((p.depth, len(p.ids)) for p in self.pipelines), strict=True)
        sizes = [p.num_stages for p in self.pipelines]
        words = f"{counted(len(depths), 'pipeline')} of {_listed(sizes, 'stage', 'stages')}"
        words += ", " if list(depths) == sizes else f" on {_listed(depths, 'rank', 'ranks')}, "
        words += f"{_listed(shares, 'micro-batch', 'micro-batches')}; {self.idle_share:.2f} idle"
        num_inactive = self.num_ranks - self.num_active
        if num_inactive:
            words += f"; {num_inactive} {'stands' if num_inactive == 1 else 'stand'} by"
        return words

    def warnings(self, wanted_depth: int, schedule: str = "") -> list[str]:
        """What a user should know before a run, one line each."""
        found: list[str] = []
        on_rank = stages_per_rank(schedule)
        if wanted_depth * on_rank > len(self.costs):
            each = f" ({on_rank} on a rank)" if on_rank > 1 else ""
            found.append(
                f"pp:{wanted_depth}: the model has {counted(len(self.costs), 'block')}, so a "
                f"pipeline has at most as many stages{each}, and the rest of the ranks stands by"
            )
        if self.idle_share > MOST_IDLE:
            slowest = max(self.pipelines, key=lambda p: p.time)
            uneven = f"{self.uneven_share:.0%}"
            why = "" if uneven == "0%" else f", {uneven} as some stages cost more than others"
            found.append(
                f"pp:{wanted_depth}: {counted(slowest.depth, 'stage')}, "
                f"{_listed([len(slowest.ids)], 'micro-batch', 'micro-batches')}: "
                f"{self.idle_share:.0%} idle{why}; give more micro-batches (a smaller micro_batch) "
                "or fewer stages"
            )
        return found


def _listed(numbers: Sequence[int], noun: str, nouns: str) -> str:
    """Each number once, in order of appearance: "2 and 3 stages"."""
    once = list(dict.fromkeys(numbers))
    if len(once) == 1:
        return f"{once[0]} {noun if once[0] == 1 else nouns}"
    return f"{', '.join(map(str, once[:-1]))} and {once[-1]} {nouns}"


@dataclass(frozen=True, slots=True)
class _Side:
    """So many pipelines of one depth. Times are in thirds of a cost here and below, so that they
    are whole numbers where costs are."""

    count: int
    depth: int
    largest: float
    schedule: str

    def num_thirds(self, num_microbatches: int) -> int:
        return num_thirds(num_microbatches, self.depth, self.schedule)

    def capacity(self, time: float) -> int:
        """Micro-batches that all of them can do in `time`, which is a multiple of a stage's."""
        return self.count * max(0, self.most(time))

    def most(self, time: float) -> int:
        """Micro-batches of one of them; below 1: it cannot do any."""
        thirds = int(time / self.largest)
        while (thirds + 1) * self.largest <= time:  # a quotient of floats may be off by one
            thirds += 1
        while thirds * self.largest > time:
            thirds -= 1
        return most_in(thirds, self.depth, self.schedule)


def plan_pipeline(
    wanted_depth: int,
    num_ranks: int,
    costs: Sequence[float],
    num_microbatches: int,
    schedule: str = "",
) -> PipelinePlan:
    """The fastest plan with depths from `wanted_depth` to less than twice that (deeper ones could
    be two), of at most two different depths; with fewer ranks than that, one pipeline of all.

    Of equally fast ones that with fewer pipelines, then that with fewer stages. A pipeline has at
    least one micro-batch, and a stage at least one block. ValueError for costs that are none.
    Depth counts ranks where the schedule gives each of them several stages.
    """
    if not costs or any(not 0 < cost < inf for cost in costs):
        raise ValueError(f"every block costs more than 0, got {list(costs)}")
    costs = tuple(costs)
    deepest = max(1, len(costs) // stages_per_rank(schedule))
    lowest = min(wanted_depth, num_ranks, deepest)
    highest = min(max(2 * wanted_depth - 1, lowest), num_ranks, deepest)
    of_stages = largest_stages(costs, num_stages_of(highest, schedule))
    kinds = {
        depth: (of_stages[num_stages_of(depth, schedule) - 1], schedule)
        for depth in range(1, highest + 1)
    }
    best: tuple[float, int, int, int] | None = None
    chosen: list[_Side] = []
    for bound, mix in sorted(_mixes(lowest, highest, num_ranks, kinds, num_microbatches)):
        if best is not None and bound > best[0] * (1 + 1e-9):
            break
        sides = [_Side(*side) for side in mix]
        time = _shortest(sides, num_microbatches, bound)
        used = _used(sides, time, num_microbatches)
        depths = [side.depth for side in used]
        num_stages = sum(side.count * side.depth for side in used)
        key = (time, sum(side.count for side in used), num_stages, max(depths))
        if best is None or key < best:
            best, chosen = key, used
    assert best is not None
    return PipelinePlan(num_ranks, costs, tuple(_pipelines(chosen, costs, num_microbatches)))


_Kind = tuple[int, int, float, str]
"""Count, depth, largest stage, schedule: as `_Side`."""


def _mixes(
    lowest: int,
    highest: int,
    num_ranks: int,
    kinds: dict[int, tuple[float, str]],
    num_microbatches: int,
) -> Iterator[tuple[float, tuple[_Kind, ...]]]:
    """(no less time than, each kind) of all mixes that one of them is the fastest of. kinds: by
    depth the largest stage, and the schedule.

    Of two depths a and b, a step of b pipelines fewer of the one for a more of the other leaves the
    ranks as they are, and what all can do in a given time changes evenly: the fastest is at an end.
    """
    quickest = inf
    for depth in range(lowest, highest + 1):
        sides = ((num_ranks // depth, depth, *kinds[depth]),)
        bound = _bound(sides, num_microbatches)
        quickest = min(quickest, _shortest([_Side(*sides[0])], num_microbatches, bound))
        yield bound, sides
    for a in range(lowest, highest + 1):
        for b in range(a + 1, highest + 1):
            each = (depth * _pace(depth, *kinds[depth])[1] for depth in (a, b))
            if num_microbatches / num_ranks * min(each) > quickest * (1 + 1e-9):
                continue
            most = num_ranks // b
            for count in {*range(1, min(a, most) + 1), *range(max(1, most - a), most + 1)}:
                others = (num_ranks - count * b) // a
                if others:
                    sides = ((others, a, *kinds[a]), (count, b, *kinds[b]))
                    bound = _bound(sides, num_microbatches)
                    if bound <= quickest * (1 + 1e-9):
                        yield bound, sides


def _bound(sides: tuple[_Kind, ...], num_microbatches: int) -> float:
    """The time if micro-batches could be divided: no share of whole ones takes less."""
    ordered = sorted((*_pace(*side[1:]), side[0]) for side in sides)
    time, rate, waited = inf, 0.0, 0.0
    for number, (waits, each, count) in enumerate(ordered):
        rate += count / each
        waited += count * waits / each
        time = (num_microbatches + waited) / rate
        if number + 1 == len(ordered) or time <= ordered[number + 1][0]:
            break
    return time


@lru_cache(maxsize=1024)
def _pace(depth: int, largest: float, schedule: str) -> tuple[float, float]:
    """What each rank waits at least, and what another micro-batch takes at least."""
    each = 3 * num_stages_of(depth, schedule) / depth * largest
    return least_wait(depth, schedule) * largest, each


def _shortest(sides: list[_Side], num_microbatches: int, bound: float) -> float:
    """The least time in which all of them together can do all micro-batches. bound: `_bound`'s."""

    def is_enough(time: float) -> bool:
        return sum(side.capacity(time) for side in sides) >= num_microbatches

    found = inf
    for side in sides:  # it is a multiple of one kind's largest stage, and soon after the bound
        low, step = int(bound * (1 - 1e-9) / side.largest), 1
        high = low
        while not is_enough(high * side.largest):
            low, high, step = high + 1, high + step, 2 * step
        while low < high:
            middle = (low + high) // 2
            if is_enough(middle * side.largest):
                high = middle
            else:
                low = middle + 1
        found = min(found, low * side.largest)
    return found


def _used(sides: list[_Side], time: float, num_microbatches: int) -> list[_Side]:
    """Those that are needed to be done in `time`: of the kind that does most, as few as do it."""
    left, used = num_microbatches, list[_Side]()
    for side in sorted(sides, key=lambda side: (-side.most(time), side.depth)):
        most = side.most(time)
        count = min(side.count, -(-left // most)) if most > 0 and left > 0 else 0
        if count:
            used.append(replace(side, count=count))
            left -= count * most
    return used


def _pipelines(
    sides: list[_Side], costs: tuple[float, ...], num_microbatches: int
) -> Iterator[Stages]:
    """Deeper ones first. Each gets its share of the shortest time; where that is more than there
    are, the pipelines of one kind have them evenly."""
    time = _shortest(sides, num_microbatches, 0.0)
    ordered = sorted(sides, key=lambda side: -side.depth)
    shares = _shares(ordered, time, num_microbatches)
    at = 0
    for side, of_side in zip(ordered, shares, strict=True):
        cuts = cuts_of(costs, num_stages_of(side.depth, side.schedule))
        for share in of_side:
            yield Stages(cuts, range(at, at + share), side.largest, side.schedule)
            at += share


def _shares(sides: list[_Side], time: float, num_microbatches: int) -> list[list[int]]:
    """Micro-batches of each pipeline, kind by kind; at least one each, none above `time`. What need
    not be done so late is taken from the kind that would be done last."""
    totals = [side.capacity(time) for side in sides]
    spare = sum(totals) - num_microbatches
    while spare:
        # The time that the slowest pipeline of a kind takes now.
        ends = [
            side.num_thirds(-(-total // side.count)) * side.largest if total > side.count else 0.0
            for total, side in zip(totals, sides, strict=True)
        ]
        last = max(range(len(sides)), key=lambda i: (ends[i], -i))
        side, total = sides[last], totals[last]
        above = total - (-(-total // side.count) - 1) * side.count  # those that are so slow
        taken = min(spare, above, total - side.count)
        totals[last] -= taken
        spare -= taken
    found: list[list[int]] = []
    for side, total in zip(sides, totals, strict=True):
        each, more = divmod(total, side.count)
        found.append([each + (i < more) for i in range(side.count)])
    return found


def largest_stages(costs: Sequence[float], deepest: int) -> list[float]:
    """Of 1, 2, ... `deepest` stages the least cost that the largest one can have."""
    return [row[-1] for row in _rows(costs, deepest)[0]]


def cuts_of(costs: Sequence[float], depth: int) -> tuple[int, ...]:
    """The borders of `depth` stages, none of them empty, whose largest one costs least."""
    arrows = _rows(costs, depth)[1]
    borders = [len(costs)]
    for row in reversed(arrows):
        borders.append(row[borders[-1]])
    return tuple(reversed(borders))


def _rows(costs: Sequence[float], depth: int) -> tuple[list[list[float]], list[list[int]]]:
    """By number of stages and of first blocks: the least cost of a largest stage, and where its
    last stage begins.

    The later it begins the less it costs, and the more those before it: the best is where the two
    meet, which moves on with the number of blocks.
    """
    sums = [0, *accumulate(costs)]
    num_blocks = len(costs)
    least: list[list[float]] = [[inf, *sums[1:]]]
    begins: list[list[int]] = [[0] * (num_blocks + 1)]
    for stages in range(2, depth + 1):
        before, row, begin = least[-1], [inf] * (num_blocks + 1), [0] * (num_blocks + 1)
        at = stages - 1
        for end in range(stages, num_blocks + 1):
            while at + 1 < end and before[at + 1] <= sums[end] - sums[at + 1]:
                at += 1
            for start in (at, at + 1):
                if start < end:
                    cost = max(before[start], sums[end] - sums[start])
                    if cost < row[end]:
                        row[end], begin[end] = cost, start
        least.append(row)
        begins.append(begin)
    return least, begins
