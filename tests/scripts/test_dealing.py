"""What each member uses of a pass: DistributedSampler's batches, and each sample once through any
losses."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from workers.scripts.in_place.dealing import (
    MAX_GROWTH,
    SPARE,
    Loss,
    Plan,
    Shape,
    begun,
    dealt_again,
)


def shape_of(samples: int, replicas: int, batch: int, drop_last: bool) -> Shape:
    per_replica = -(-samples // replicas)
    return Shape(per_replica * replicas, replicas, batch, drop_last)


@given(
    samples=st.integers(1, 60),
    replicas=st.integers(1, 5),
    batch=st.integers(1, 7),
    drop_last=st.booleans(),
)
@settings(deadline=None)
def test_without_a_loss_the_batches_are_those_of_distributed_sampler(
    samples, replicas, batch, drop_last
):
    order = [i % samples for i in range(-(-samples // replicas) * replicas)]
    shape = shape_of(samples, replicas, batch, drop_last)
    plan = begun(shape, tuple(range(replicas)))
    for rank in range(replicas):
        sampler = DistributedSampler(range(samples), replicas, rank, shuffle=False)
        batches = list(BatchSampler(sampler, batch, drop_last))
        assert len(batches) == plan.iterations
        shares = [[order[p] for p in plan.share(i, rank)] for i in range(plan.iterations)]
        assert shares == batches
        assert [plan.usual(i) for i in range(plan.iterations)] == [len(b) for b in batches]


class Member:
    """Uses what it is dealt; its samples count when its unit does."""

    def __init__(self) -> None:
        self.drawn = -1
        self.waiting: list[int] = []


@st.composite
def stories(draw):
    replicas = draw(st.integers(2, 5))
    shape = shape_of(draw(st.integers(replicas, 60)), replicas, draw(st.integers(1, 5)), False)
    num_carried = draw(st.integers(0, 3))
    shape = Shape(shape.num_positions, replicas, shape.batch_size, False, num_carried)
    every = draw(st.integers(1, 3))  # iterations that one step adds up
    kills = draw(
        st.lists(
            st.tuples(st.integers(0, shape.iterations - 1), st.integers(0, 9), st.booleans()),
            max_size=replicas - 1,
        )
    )
    return shape, every, sorted(kills, key=lambda kill: kill[0])


@given(stories())
@settings(deadline=None, max_examples=300)
def test_each_sample_counts_once_through_any_losses(story):
    """Members run in step; a kill comes after some have drawn an iteration, before it counts."""
    shape, every, kills = story
    members = tuple(range(shape.replicas))
    at = {member: Member() for member in members}
    plan = begun(shape, members)
    used: Counter[int] = Counter()
    counted = -1
    for iteration in range(shape.iterations):
        now = [kill for kill in kills if kill[0] == iteration]
        for num, (_, whom, has_drawn) in enumerate(now):
            lost = members[whom % len(members)]
            if has_drawn:  # one of the survivors is ahead
                ahead = next(m for m in members if m != lost)
                take(plan, at[ahead], ahead, iteration)
            after = tuple(m for m in members if m != lost)
            furthest = max(at[m].drawn for m in after)
            before, plan = plan, dealt_again(plan, Loss(members, after, furthest, counted))
            members = after
            assert [before.share(i, m) for i in range(furthest + 1) for m in after] == [
                plan.share(i, m) for i in range(furthest + 1) for m in after
            ], f"kill {num} changed what was drawn"
            check_sizes(plan)
        for member in members:
            take(plan, at[member], member, iteration)
        if (iteration + 1) % every == 0 or iteration == shape.iterations - 1:
            counted = iteration
            for member in members:
                used.update(at[member].waiting)
                at[member].waiting = []
    used.update(plan.left_over)
    positions = [*range(shape.num_dealt)]
    positions += range(shape.num_positions, shape.num_positions + shape.num_carried)
    assert used == Counter(positions)


def take(plan: Plan, member: Member, name: int, iteration: int) -> None:
    if member.drawn < iteration:
        share = plan.share(iteration, name)
        assert len(share) > 0, "nobody is without a sample"
        member.waiting += share
        member.drawn = iteration


def check_sizes(plan: Plan) -> None:
    for i in range(plan.stretches[-1].first, plan.iterations):
        sizes = [len(plan.share(i, m)) for m in plan.members]
        assert max(sizes) - min(sizes) <= 1
        size = plan.shape.batch_size
        assert max(sizes) <= MAX_GROWTH * size + size // SPARE


def test_what_is_left_over_is_only_what_does_not_fit():
    shape = shape_of(24, 3, 4, False)  # two iterations of 12
    first = dealt_again(begun(shape, (0, 1, 2)), Loss((0, 1, 2), (0, 2), 0, -1))
    assert first.left_over == ()
    assert [len(first.share(1, m)) for m in (0, 2)] == [8, 8]
    last = dealt_again(begun(shape, (0, 1, 2)), Loss((0, 1, 2), (0, 2), 1, 0))
    assert last.left_over == tuple(range(13, 24, 3))


def test_if_half_of_the_ranks_are_lost_what_they_had_is_spread_over_the_rest_of_the_pass():
    plan = dealt_again(begun(shape_of(80, 2, 4, False), (0, 1)), Loss((0, 1), (0,), 0, -1))
    assert plan.left_over == ()
    sizes = [len(plan.share(i, 0)) for i in range(1, plan.iterations)]
    assert (sum(sizes), max(sizes)) == (80 - 4, 9)
