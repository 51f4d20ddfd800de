"""When a step goes on record: at once, or once every rank's copy of it is held."""

from elastic.on_ray.record.progress import Commits
from elastic.protocol.messages.to_controller import Committed, Held
from elastic.protocol.step_record import VoteHead
from tests.control.fake_record import step_record


class Told:
    """A Commits, and what it has passed on."""

    def __init__(self):
        self.recorded = []
        self.commits = Commits(lambda g, record: self.recorded.append((g, record.step)))

    def commit(self, generation, *steps, world_size=2):
        said, vote = tuple(step_record(step, generation) for step in steps), VoteHead(steps[-1], ())
        self.commits.hear(Committed(generation, world_size, said, vote, b"content"))

    def held(self, generation, rank, step):
        self.commits.hear_held(Held(generation, rank, step))


def test_a_replicated_step_goes_on_record_at_once():
    told = Told()
    told.commit(1, 1, 2, world_size=0)
    assert told.recorded == [(1, 1), (1, 2)]


def test_a_sharded_step_waits_for_every_rank_whatever_comes_first():
    told = Told()
    told.held(1, 0, 1)
    told.commit(1, 1)
    assert told.recorded == []
    told.held(1, 1, 1)
    assert told.recorded == [(1, 1)]
    told.held(1, 0, 2)
    told.held(1, 1, 2)
    assert told.recorded == [(1, 1)]
    told.commit(1, 2)
    assert told.recorded == [(1, 1), (1, 2)]


def test_a_rank_whose_copies_are_held_sooner_puts_no_step_on_record_alone():
    told = Told()
    told.commit(1, 1, 2)
    told.held(1, 0, 2)
    told.held(1, 1, 1)
    assert told.recorded == [(1, 1)]


def test_a_generation_that_is_given_up_records_nothing_more_and_its_successor_says_it_again():
    told = Told()
    told.commit(1, 1)
    told.held(1, 0, 1)
    told.commits.give_up(1)
    told.held(1, 1, 1)
    assert told.recorded == []
    told.commit(2, 1, world_size=1)
    told.held(1, 0, 1)
    assert told.recorded == []
    told.held(2, 0, 1)
    assert told.recorded == [(2, 1)]


def test_what_is_said_again_at_the_end_is_held_already():
    told = Told()
    told.commits.end(3)
    told.commit(3, 1, 2)
    assert told.recorded == [(3, 1), (3, 2)]
    told.commit(4, 3)
    assert told.recorded == [(3, 1), (3, 2)]


def test_only_the_first_word_of_a_generation_tells_its_first_step():
    told = Told()
    assert told.commits.hear_joined(1)
    assert not told.commits.hear_joined(1)
    assert told.commits.hear_joined(3)
    assert not told.commits.hear_joined(2)
    told.commits.give_up(4)
    assert not told.commits.hear_joined(4)
    assert told.commits.hear_joined(5)


def test_what_is_said_of_a_generation_is_old_once_a_later_one_has_formed():
    told = Told()
    told.commits.give_up(2)
    assert told.commits.is_news(2), "its members answer"
    assert not told.commits.is_news(1)
    assert told.commits.hear_joined(3)
    assert not told.commits.is_news(2), "said again"
    told.commits.give_up(3)
    assert told.commits.is_news(3)


def test_the_newest_vote_is_kept_for_those_who_missed_it():
    told = Told()
    told.commit(1, 1, 2)
    told.commits.keep_vote(1, 1, VoteHead(1, ()), b"")
    told.commits.keep_vote(3, 1, None, b"")
    assert told.commits.vote_of(2, 1) == (VoteHead(2, ()), b"content")


def test_who_joins_after_a_step_of_the_generation_was_said_does_not_begin_it_again():
    """A new controller may hear them in that order: each comes over a link of its own."""
    told = Told()
    told.commit(6, 4, world_size=0)
    assert not told.commits.hear_joined(6)
    assert told.commits.hear_joined(7)
