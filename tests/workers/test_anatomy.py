"""Where a rank's steps spend their time: parts that add up, and rows that all ranks make alike."""

from dataclasses import replace

import pytest

from tests.workers.fake_groups import ThreadGroup, run_threads
from tests.workers.test_vote import LAYOUT, said_by
from workers.health.anatomy import PARTS, ROW_EVERY_S
from workers.health.vitals import Vitals
from workers.step.timing import Pace, Timing, pace_of
from workers.step.vote import add_up, decode, encode


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rank:
    """Takes steps with phases of given lengths; nobody else is there."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.clock, self.rank, self.world_size = Clock(), rank, world_size
        self.vitals = Vitals(self.clock)
        self.vitals.generation = 1
        self.step, self.is_wanted = 0, False

    def take_step(self, pace: Pace | None = None, **phases: float) -> float:
        """pace: what the vote says of all ranks, by default of this one alone."""
        anatomy = self.vitals.anatomy
        self.vitals.begin_step()
        timing = Timing()
        for phase, seconds in (phases if "vote" in phases else {**phases, "vote": 0.0}).items():
            self.vitals.enter(phase)
            if phase == "vote":
                timing = anatomy.timing(self.rank, self.world_size)
            self.clock.now += seconds
        own = pace_of([timing.gather_s], [timing.reduce_s], wants_row=timing.wants_row)
        self.step += 1
        return anatomy.end(pace or own, self.step, self.rank, lambda: None)

    def rows(self) -> tuple[dict, ...]:
        return self.vitals.anatomy.take(is_last=True)


def parts_of(row: dict) -> dict[str, float]:
    return {part: row[f"{part}_s"] for part in PARTS}


def test_the_parts_of_a_step_add_up_to_it():
    rank = Rank()
    pace = Pace(gather_s=0.0, reduce_s=0.1, idle_s=0.0, wants_row=False)
    phases = {"data": 0.1, "compute": 0.5, "reduce": 0.4, "vote": 0.05, "apply": 0.2}
    assert rank.take_step(pace, **phases) == pytest.approx(1.25)
    (row,) = rank.rows()
    assert parts_of(row) == pytest.approx(
        {
            "data": 0.1,
            "compute": 0.5,
            "gather": 0.0,
            "reduce": 0.1,
            "wait": 0.3,
            "vote": 0.05,
            "apply": 0.2,
        }
    )
    assert sum(parts_of(row).values()) == pytest.approx(row["step_s"]) == pytest.approx(1.25)
    assert (row["step"], row["steps"], row["generation"], row["rank"]) == (1, 1, 1, 0)
    assert row["memory_bytes"] > 1 << 20
    spans = [("compute", 0.0), *phases.items(), ("user", 0.0)]
    assert [phase for phase, _ in row["spans"] if phase != "starting"] == [
        phase for phase, _ in spans[1:-1]
    ]
    assert sum(seconds for _, seconds in row["spans"]) == pytest.approx(1.25)


def test_what_is_aside_of_a_phase_is_no_part_of_it():
    rank = Rank()
    rank.vitals.begin_step()
    rank.vitals.enter("compute")
    rank.clock.now += 0.5
    with rank.vitals.gathering():
        rank.clock.now += 0.25
    rank.clock.now += 0.5
    rank.vitals.anatomy.end(Pace(0.25, 0.0, 0.0, False), 1, 0, lambda: None)
    (row,) = rank.rows()
    assert (row["compute_s"], row["gather_s"], row["wait_s"]) == (1.0, 0.25, 0.0)
    spans = [(phase, seconds) for phase, seconds in row["spans"] if seconds]
    assert spans == [("compute", 0.5), ("gather", 0.25), ("compute", 0.5)]


def test_an_attempt_that_was_given_up_and_what_is_between_steps_are_in_no_row():
    rank = Rank()
    rank.vitals.begin_step()
    rank.vitals.enter("compute")
    rank.clock.now += 5.0
    rank.vitals.enter("pool")
    rank.clock.now += 7.0
    rank.take_step(compute=1.0)
    (row,) = rank.rows()
    assert row["step_s"] == 1.0


def test_each_slow_step_is_a_row_and_fast_ones_share_it():
    slow, fast = Rank(), Rank()
    for _ in range(5):
        slow.take_step(compute=1.0)
    assert [(row["step"], row["steps"]) for row in slow.rows()] == [(n, 1) for n in range(1, 6)]
    for _ in range(1000):
        fast.take_step(compute=0.001)
    rows = fast.rows()
    assert len(rows) <= 1.0 / ROW_EVERY_S + 2
    assert sum(row["steps"] for row in rows) == rows[-1]["step"]
    assert sum(row["step_s"] for row in rows) == pytest.approx(0.001 * rows[-1]["step"])


def test_a_new_generation_begins_a_row():
    rank = Rank()
    for _ in range(4):
        rank.take_step(compute=0.001)
    rank.vitals.generation = 2
    rank.take_step(compute=0.001)
    assert [(row["generation"], row["step"], row["steps"]) for row in rank.rows()] == [
        (1, 1, 1),
        (2, 5, 1),
    ]


def test_rows_are_sent_once_a_second_at_most():
    rank, sent = Rank(), 0
    for _ in range(40):
        rank.take_step(compute=0.25)
        sent += bool(rank.vitals.anatomy.take())
    assert sent == 10


def test_all_ranks_learn_who_waited_and_make_their_rows_at_the_same_step():
    timings = Timing(0, 0.0, 0.1, wants_row=True), Timing(1, 0.02, 0.5)

    def vote(group: ThreadGroup) -> Pace:
        ballot = replace(said_by(group.rank()), timing=timings[group.rank()])
        return decode(LAYOUT, add_up(group, encode(LAYOUT, ballot))).pace

    first, second = run_threads(2, vote)
    assert first == second
    assert first == Pace(0.0, 0.1, pytest.approx((0.02 + 0.4) / 2), wants_row=True)


def test_of_two_passes_of_which_one_rank_alone_does_both_a_third_is_idle():
    """V = 4 on W = 3: 4 of 6 passes are used."""
    pace = pace_of([0.0] * 3, [0.1, 1.1, 1.1], wants_row=False)
    assert pace.idle_s / 2.0 == pytest.approx(1 / 3)
