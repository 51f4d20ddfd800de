"""A pass whose readers are lost, one after the other: each row counts once, in iterations that all
who are left have alike."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from elastic.data.dealt import Deal
from elastic.data.portions import MAX_GROWTH, Behind, Loss, Portion, Standing, cut, length
from elastic.data.rounds import LocalShuffle
from tests.data.test_passes import DataSet

RANKS = 4


class Reader:
    """Of a pass, by its number when the pass began."""

    def __init__(self, data, number, options, shuffle):
        self._data, self._number = data, number
        self._options: Any = options
        self._shuffle: Any = shuffle
        self.standing = Standing(Portion(-1, (), tuple(range(RANKS)), 0))
        self.drawn = self.counted = -1
        self._batches, self._num_losses = None, 0

    def draw(self):
        """The rows of its next batch; None: it has come to the end."""
        if self.standing.end is not None:
            return None
        if self._batches is None or self._num_losses != self.standing.num_losses:
            self._num_losses, self._batches = self.standing.num_losses, self._dealt()
        block, portion = next(self._batches)
        self.drawn = portion.iteration
        if block is None:
            self.standing.end = portion
            return None
        self.standing.deliver(portion)
        return block.tolist()

    def count(self, until):
        self.counted = until
        self.standing.count(until)

    def _dealt(self):
        behind = self.standing.behind
        window, seed, number = self._shuffle
        shuffle = None
        if window:
            shuffle = LocalShuffle(window, seed, number, lambda row: rows.ends_before(row))
        deal = Deal(reader=self._number, ranks=RANKS, shuffle=shuffle, **self._options)
        rows = self._data.rows(deal.oldest_row(behind.oldest))
        yield from deal.batches(rows, behind)


class Run:
    """Readers that use what they draw in steps, of which each counts for all or for none."""

    def __init__(self, sizes, seed, options, shuffle):
        self.random = Random(seed)
        self.readers = {n: Reader(DataSet(*sizes), n, options, shuffle) for n in range(RANKS)}
        self.used = Counter()
        self.ahead = {}
        """By reader: what it has drawn although others are in the step before."""
        self.sizes = []

    def lose(self, victims):
        """counted and drawn: of those who are left, as they say it to each other."""
        before = tuple(self.readers)
        after = tuple(n for n in before if n not in victims)
        left = [self.readers[n] for n in after]
        drawn, counted = max(r.drawn for r in left), max(r.counted for r in left)
        self.readers = {n: self.readers[n] for n in after}
        for reader in left:
            reader.standing.lose(Loss(before, after, drawn, counted))

    def victims(self, chance):
        if len(self.readers) * MAX_GROWTH // RANKS < MAX_GROWTH or self.random.random() > chance:
            return []
        num = self.random.randint(1, len(self.readers) - RANKS // MAX_GROWTH)
        return self.random.sample(list(self.readers), num)

    def iterate(self, iteration, chance):
        """Whether there was one."""
        has_drawn = {}
        order = self.random.sample(list(self.readers), len(self.readers))
        for turn, number in enumerate(order):
            if number not in self.readers:
                continue
            if self.readers[number].drawn < iteration:
                self.draw(number, has_drawn)
            if turn == self.random.randrange(RANKS) and (victims := self.victims(chance)):
                self.lose(victims)
        drawn = {n: self.ahead.pop(n, None) or has_drawn.get(n) for n in self.readers}
        if None in drawn.values():
            assert set(drawn.values()) == {None}, "all come to the end alike"
            return False
        self.step(iteration, drawn, chance)
        return True

    def draw(self, number, into):
        into[number] = self.readers[number].draw()

    def step(self, iteration, drawn, chance):
        victims = self.victims(chance)
        saw = [n for n in drawn if self.random.random() < 0.5] if victims else list(drawn)
        counts = set(saw) - set(victims) or not victims
        if counts:
            for number in saw:
                self.readers[number].count(iteration)
                if number not in victims and victims and self.random.random() < 0.5:
                    self.ahead[number] = self.readers[number].draw()
        if victims:
            self.lose(victims)
        for number, rows in drawn.items():
            if counts or number not in victims:
                self.used.update(rows)
        self.sizes.append([len(rows) for n, rows in drawn.items() if n in self.readers])
        for reader in self.readers.values():
            reader.count(iteration)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("sizes", [(97,), (5, 0, 13, 2, 40)])
def test_each_row_counts_once_through_any_losses(sizes, batch_size, window, drop_last):
    total = sum(sizes)
    options = {"batch_size": batch_size, "drop_last": drop_last}
    whole = total // (RANKS * batch_size) * RANKS * batch_size
    least = RANKS // MAX_GROWTH
    num_left_over = 0
    for seed in range(30):
        run = Run(sizes, seed, options, (window, 1, 0))
        iteration = 0
        while run.iterate(iteration, chance=0.1):
            iteration += 1
        (end,) = {reader.standing.end for reader in run.readers.values()}
        assert end is not None
        left_over = length(end.missing)
        assert left_over < max(len(run.readers), least + 1), "there was an iteration for more"
        assert set(run.used.values()) <= {1}
        assert len(run.used) == (whole if drop_last else total) - left_over
        num_left_over += bool(left_over)
        for of_readers in run.sizes:  # the last round is longer by less than a row for each rank
            assert max(of_readers) <= MAX_GROWTH * (batch_size + 1) + 1
        assert all(size for of_readers in run.sizes for size in of_readers)
    assert num_left_over < 15


def test_what_a_lost_reader_had_and_did_not_count_is_in_the_next_iterations():
    standing = Standing(Portion(-1, (), (0, 1, 2), 0))
    rows = DataSet(40)

    def rest():
        found = rows.rows(standing.behind.oldest)
        return [d.of for d in Deal(reader=0, ranks=3, batch_size=2).batches(found, standing.behind)]

    first, second, third, *_ = rest()
    assert (first.spans, third.spans) == ((range(6),), (range(12, 18),))
    standing.deliver(first)
    standing.count(0)
    standing.deliver(second)
    standing.lose(Loss((0, 1, 2), (0, 2), furthest=1, counted=0))
    assert standing.behind.missing == (range(8, 10),), "which a checkpoint has to say"
    again = rest()[0]
    assert (again.spans, again.readers, again.missing) == (
        (range(12, 18), range(8, 10)),
        (0, 2),
        (),
    )
    assert [again.share(0), again.share(2)] == [(range(12, 16),), (range(16, 18), range(8, 10))]
    standing.deliver(again)
    assert standing.behind.losses == ()
    assert standing.needed == 6, "the second has not counted"


def test_who_was_behind_draws_what_the_furthest_had_before_it_deals_again():
    standing = Standing(Portion(-1, (), (0, 1, 2), 0))
    rows = DataSet(40)
    standing.lose(Loss((0, 1, 2), (0, 2), furthest=0, counted=-1))
    behind = standing.behind
    deal = Deal(reader=0, ranks=3, batch_size=2)
    first, second, *_ = [d.of for d in deal.batches(rows.rows(), behind)]
    assert (first.spans, first.readers) == ((range(6),), (0, 1, 2))
    assert (second.spans, second.readers) == ((range(6, 12), range(2, 4)), (0, 2))


def test_a_pass_that_is_over_for_another_reader_goes_without_what_the_lost_had():
    standing = Standing(Portion(-1, (), (0, 1, 2), 0))
    deal = Deal(reader=0, ranks=3, batch_size=2)
    first, second, end = [d.of for d in deal.batches(DataSet(12).rows(), standing.behind)]
    standing.deliver(first)
    standing.deliver(second)
    standing.lose(Loss((0, 1, 2), (0, 2), furthest=end.iteration, counted=-1))
    ((_, standing.end),) = deal.batches(DataSet(12).rows(), standing.behind)
    assert (standing.end.spans, length(standing.end.missing)) == ((), 4)
    assert standing.is_over_elsewhere


def test_few_missing_rows_join_the_last_iteration_and_many_have_one_of_their_own():
    def rest(missing):
        last = Portion(-1, (), (0, 2), 6, missing)
        deal = Deal(reader=0, ranks=3, batch_size=2)
        behind = Behind(last=last, uncounted={})
        found = [d.of for d in deal.batches(DataSet(12).rows(), behind)]
        return [length(portion.spans) for portion in found], length(found[-1].missing)

    assert rest((range(3),)) == ([9, 0], 0)
    assert rest((range(5),)) == ([8, 3, 0], 0)


def test_cut():
    spans = (range(3), range(10, 12))
    assert cut(spans, 1, 4) == (range(1, 3), range(10, 11))
    assert cut(spans, 3, 5) == (range(10, 12),)
    assert cut(spans, 2, 2) == ()
