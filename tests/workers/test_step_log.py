"""Committed steps that are not on record: who says which of them, and to whom."""

from collections.abc import Iterable

from elastic.protocol.step_record import KnownSteps, VoteHead
from tests.control.fake_record import step_record
from tests.workers.session_rig import FakeLink
from workers.membership.state import Seat
from workers.membership.step_log import Records

LOWEST = Seat(generation=2, rank=0, world_size=2)
VOTE_OF_3 = VoteHead(3, ())


def known(
    steps: Iterable[int], vote: VoteHead | None = None, content: str = "", generation: int = 1
) -> KnownSteps:
    return KnownSteps(tuple(step_record(step, generation) for step in steps), vote, content)


def steps_told(link: FakeLink) -> list[list[int]]:
    return [[s.step for s in fields["steps"]] for fields, _ in link.of("committed")]


def test_the_lowest_rank_tells_the_last_step():
    link = FakeLink()
    records = Records(link, 12)
    records.take(known((1, 2, 3), VOTE_OF_3))
    records.tell(LOWEST)
    assert steps_told(link) == [[3]]


def test_whoever_learns_from_the_lowest_rank_can_say_every_step_in_order():
    """A newcomer may be the last one of a generation that knows them."""
    link = FakeLink()
    records = Records(link, 12)
    records.take(known((3, 4)))
    records.learn(known((1, 2, 3), VOTE_OF_3))
    records.repeat(LOWEST, recorded_step=1)
    assert records.known_step == 4
    assert steps_told(link) == [[2, 3, 4]]


def test_of_a_step_that_both_know_the_lowest_ranks_line_counts():
    """This one may have fallen back, and the step was done again without it."""
    link = FakeLink()
    records = Records(link, 12)
    mine, theirs = known((2, 3), generation=1), known((1, 2), VOTE_OF_3, generation=4)
    records.take(mine)
    records.learn(theirs)
    records.repeat(LOWEST, recorded_step=0)
    ((fields, _),) = link.of("committed")
    assert fields["steps"] == (*theirs.steps, mine.steps[1])


def test_a_vote_is_said_of_its_own_step_only():
    """A worker that has gone back to a checkpoint has no vote of the step that it stands at."""
    link = FakeLink()
    records = Records(link, 12)
    records.take(known((1, 2, 3), VOTE_OF_3, "AAAA"))
    assert records.vote_of(3) == (VOTE_OF_3, bytes(3))
    assert records.vote_of(2) == (None, b"")
    records.go_back(2)
    assert (records.last_vote, records.vote_of(3)) == (None, (None, b""))
    records.repeat(LOWEST, recorded_step=0)
    ((fields, payload),) = link.of("committed")
    assert (len(fields["steps"]), fields["vote"], payload) == (2, None, b"")
