"""What a pipeline's schedule decides of its plan: which stages a rank has, and how long a step
takes. A stage's forward counts as one third of its time, each half of its backward as another.

In which order a rank computes is workers/parallel/pipeline/schedule.py's.
"""

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""torch's names; "" is 1F1B."""
GPIPE, _, INTERLEAVED, ZERO_BUBBLE = SCHEDULES


def stages_per_rank(schedule: str) -> int:
    """Of a pipeline of several ranks; the one of a single rank is one stage."""
    return 2 if schedule in (INTERLEAVED, ZERO_BUBBLE) else 1


def num_stages_of(num_ranks: int, schedule: str) -> int:
    """Of a pipeline. A single rank has no neighbour to take turns with: one stage."""
    return 1 if num_ranks == 1 else num_ranks * stages_per_rank(schedule)


def num_ranks_of(num_stages: int, schedule: str) -> int:
    """The inverse of `num_stages_of`."""
    return 1 if num_stages == 1 else num_stages // stages_per_rank(schedule)


def stages_at(place: int, num_stages: int, schedule: str) -> tuple[int, ...]:
    """Those of one rank of a pipeline. Of p ranks the first has the stages 0 and p; with
    ZBVZeroBubble, where the second ones go back, the first and the last stage."""
    num_ranks = num_ranks_of(num_stages, schedule)
    if schedule == ZERO_BUBBLE and num_stages > 1:
        return (place, num_stages - 1 - place)
    return tuple(range(place, num_stages, num_ranks))


def place_of(stage: int, num_stages: int, schedule: str) -> int:
    """The rank of a pipeline that has a stage."""
    num_ranks = num_ranks_of(num_stages, schedule)
    if schedule == ZERO_BUBBLE and stage >= num_ranks:
        return num_stages - 1 - stage
    return stage % num_ranks


def num_thirds(num_microbatches: int, depth: int, schedule: str = "") -> int:
    """So many thirds of its largest stage's time a pipeline of `depth` ranks takes."""
    count = num_microbatches
    if depth == 1:
        return 3 * count
    if schedule == ZERO_BUBBLE:  # few micro-batches go down the stages and back all the same
        return max(6 * count + depth - 1, 4 * count + 4 * depth - 2)
    if schedule == INTERLEAVED:  # a micro-batch comes back when all ranks have had it
        return 3 * (max(count, depth) + count + depth - 1)
    return 3 * (count + depth - 1)


def most_in(thirds: int, depth: int, schedule: str) -> int:
    """Micro-batches whose `num_thirds` are at most `thirds`; below 1: none."""
    turns = thirds // 3 - depth + 1
    if depth == 1:
        return turns
    if schedule == ZERO_BUBBLE:
        return min((thirds - depth + 1) // 6, (thirds - 4 * depth + 2) // 4)
    if schedule == INTERLEAVED:
        return turns // 2 if turns // 2 >= depth else turns - depth
    return turns


def least_wait(depth: int, schedule: str) -> int:
    """Thirds of its largest stage that each rank waits at least."""
    return depth - 1 if schedule == ZERO_BUBBLE else 3 * (depth - 1)
