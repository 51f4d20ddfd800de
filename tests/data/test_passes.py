"""Passes over data sets without Ray: which rows each rank has, through any number of ranks."""

import asyncio
import itertools
import threading
from collections import Counter

import numpy as np
import pytest

from elastic.data.dealt import Deal, Rows, ahead
from elastic.data.passes import AHEAD, ALL, Block, CallOver, End, PassServer, Piece, Reading
from elastic.data.portions import Behind, Portion, length
from elastic.data.rounds import LocalShuffle, TooFewRows

NOTHING = Block(0, Piece(None, 0, 0, 0))
PATIENCE_S = 10.0


class Arrays:
    """Blocks are arrays."""

    def slice(self, block, first, stop):
        return block[first:stop]

    def take(self, block, rows):
        return block[rows]

    def join(self, blocks):
        return np.concatenate(blocks)


class DataSet:
    """Rows 0, 1, ... in blocks of these sizes, as pieces of larger blocks."""

    def __init__(self, *sizes):
        self.sizes, self.executed, self.pieces = sizes, 0, 0
        self.has_closed, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def execute(self, _name):
        self.executed += 1
        try:
            first = 0
            for size in self.sizes:
                assert self.goes_on.wait(PATIENCE_S)
                self.pieces += 1
                yield Piece(np.arange(first - 3, first + size + 2), 3, size, 8 * size)
                first += size
        finally:
            self.has_closed.set()

    def rows(self, first=0):
        """One rank's own view of it, without a server; each answer is of one block."""
        blocks = itertools.accumulate(
            self.execute(""), lambda at, piece: Block(at.stop, piece), initial=NOTHING
        )
        behind = (block for block in blocks if block.stop > first and block.piece.num_rows)

        def fetch(row):
            block = next(behind, None)
            return End(row) if block is None else [block]

        return Rows(fetch, Arrays(), first)


def batches(data, rank, ranks, batch_size, *, first=0, shuffle=None, **options):
    """Of one rank, each with how far the pass is then."""
    rows = data.rows((shuffle and shuffle[0] * (first // shuffle[0])) or first)
    local = LocalShuffle(*shuffle, rows.ends_before) if shuffle else None
    deal = Deal(reader=rank, ranks=ranks, batch_size=batch_size, shuffle=local, **options)
    last = Portion(-1, (), tuple(range(ranks)), first)
    *found, end = deal.batches(rows, Behind(last=last, uncounted={}))
    assert (end.block, end.of.spans, end.of.missing) == (None, (), ())
    return [(dealt.block.tolist(), dealt.of.stop) for dealt in found]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4, 7, None])
@pytest.mark.parametrize("sizes", [(50,), (1,) * 23, (5, 0, 13, 2, 40), (8, 4)])
@pytest.mark.parametrize("shuffle", [None, (9, 1, 0)])
def test_each_row_is_one_ranks_and_all_have_as_many_batches(sizes, batch_size, ranks, shuffle):
    data = DataSet(*sizes)
    of_rank = [batches(data, rank, ranks, batch_size, shuffle=shuffle) for rank in range(ranks)]
    used = [row for found in of_rank for rows, _ in found for row in rows]
    assert sorted(used) == list(range(sum(sizes)))
    assert len({len(found) for found in of_rank}) == 1
    assert len({tuple(stop for _, stop in found) for found in of_rank}) == 1
    assert all(rows for found in of_rank for rows, _ in found)
    most = max(len(rows) for found in of_rank for rows, _ in found)
    assert batch_size is None or most <= batch_size + 1


def test_what_does_not_divide_evenly_is_shared_evenly():
    found = [[rows for rows, _ in batches(DataSet(10), rank, 3, 2)] for rank in range(3)]
    assert found == [[[0, 1], [6]], [[2, 3], [7]], [[4, 5], [8, 9]]]
    found = [[rows for rows, _ in batches(DataSet(13), rank, 3, 2)] for rank in range(3)]
    assert [len(rows) for rows in found[2]] == [2, 3], "one row has no round of its own"


def test_with_drop_last_all_batches_are_whole():
    for total in range(6, 20):
        for rank in range(3):
            found = batches(DataSet(total), rank, 3, 2, drop_last=True)
            assert [len(rows) for rows, _ in found] == [2] * (total // 6)
    blocks = [batches(DataSet(4, 4, 1), rank, 2, None, drop_last=True) for rank in range(2)]
    assert [[len(rows) for rows, _ in found] for found in blocks] == [[2, 2]] * 2


def test_fewer_rows_than_ranks_are_an_error_that_says_so():
    with pytest.raises(TooFewRows, match="2 of 2 rows are left for 3 ranks to share"):
        batches(DataSet(2), 0, 3, 4)
    assert batches(DataSet(), 0, 3, 4) == []


@pytest.mark.parametrize("shuffle", [None, (9, 1, 0)])
@pytest.mark.parametrize("ranks_after", [1, 2, 4])
def test_a_pass_goes_on_at_its_row_with_other_ranks(ranks_after, shuffle):
    data = DataSet(11, 3, 30, 9)
    before = [batches(data, rank, 3, 4, shuffle=shuffle)[:2] for rank in range(3)]
    (reached,) = {found[-1][1] for found in before}
    after = [
        batches(data, rank, ranks_after, 4, first=reached, shuffle=shuffle)
        for rank in range(ranks_after)
    ]
    used = Counter(row for found in before + after for rows, _ in found for row in rows)
    assert used == dict.fromkeys(range(53), 1)


def test_a_pass_ends_where_it_was_left_at_its_end():
    assert batches(DataSet(12), 0, 3, 4, first=12) == []


def test_rows_one_by_one_are_dealt_in_turn():
    found = [batches(DataSet(4, 7), rank, 2, 3, is_row_by_row=True) for rank in range(2)]
    assert [rows for rows, _ in found[0]] == [[0, 2, 4], [6, 8, 10]]
    assert [rows for rows, _ in found[1]] == [[1, 3, 5], [7, 9]]


def test_local_shuffle_is_of_seed_pass_and_position_and_stays_in_its_window():
    def rows(*shuffle):
        found = batches(DataSet(40), 0, 1, 5, shuffle=shuffle)
        return [row for batch, _ in found for row in batch]

    assert rows(10, 7, 0) == rows(10, 7, 0)
    assert rows(10, 7, 0) != rows(10, 8, 0)
    assert rows(10, 7, 0) != rows(10, 7, 1)
    assert rows(10, 7, 0) != list(range(40))
    for window in range(4):
        assert {row // 10 for row in rows(10, 7, 0)[window * 10 : window * 10 + 10]} == {window}
    of_two = [batches(DataSet(40), rank, 2, 5, shuffle=(10, 7, 0)) for rank in range(2)]
    mixed = [rows for both in zip(*of_two, strict=True) for batch, _ in both for rows in batch]
    assert mixed == rows(10, 7, 0), "it does not see how many ranks there are"


def test_shares_differ_by_one_row_at_most():
    for size in range(3, 30):
        portion = Portion(0, (range(5, 5 + size),), (0, 1, 2), 5 + size)
        of_rank = [length(portion.share(rank)) for rank in range(3)]
        assert (sum(of_rank), max(of_rank) - min(of_rank) <= 1) == (size, True)


# --- the server -----------------------------------------------------------------------------
def reading(rank, *, call=1, number=0, first=0, reader=ALL, readers=(0, 1)):
    return Reading(call, "train", reader, number, first, rank, readers)


@pytest.fixture
def ask():
    """Of a server, in one event loop: what is found at a row, and the walk that it is of."""
    loop = asyncio.new_event_loop()

    def asked(server, reading, row, lost=None, **needed):
        answer = server.blocks_at(reading, row, lost, **needed)
        return loop.run_until_complete(asyncio.wait_for(answer, PATIENCE_S))

    yield asked
    loop.close()


def rows_in(found):
    """That the blocks hold, which follow on each other."""
    assert all(a.stop == b.first for a, b in itertools.pairwise(found))
    return range(found[0].first, found[-1].stop)


def test_ranks_share_one_execution_and_what_all_have_had_is_forgotten(ask):
    data = DataSet(4, 4, 4)
    server = PassServer(data.execute)
    assert rows_in(ask(server, reading(0), 0).found).start == 0
    assert rows_in(ask(server, reading(0), 9).found) == range(8, 12)
    assert rows_in(ask(server, reading(1), 0).found) == range(12)
    assert ask(server, reading(0), 12).found == End(12)
    assert (data.executed, server.num_walks) == (1, 1)
    server.leave(reading(0))
    assert rows_in(ask(server, reading(1), 9).found) == range(8, 12)
    assert rows_in(ask(server, reading(1), 0).found).start == 0
    assert data.executed == 2, "anew, as what all have had is forgotten"
    server.leave(reading(1))
    assert server.num_walks == 0


def test_an_execution_is_ahead_of_the_furthest_rank_by_some_blocks_and_ends_with_its_pass(ask):
    data = DataSet(*[4] * 1000)
    server = PassServer(data.execute)
    ask(server, reading(0, readers=(0,)), 40)
    ask(server, reading(0, readers=(0,)), 80)
    assert data.pieces <= 21 + 2 * AHEAD
    server.leave(reading(0, readers=(0,)))
    assert data.has_closed.wait(PATIENCE_S)


def test_a_new_call_ends_the_passes_of_the_one_before(ask):
    data = DataSet(4, 4)
    server = PassServer(data.execute)
    ask(server, reading(0), 0)
    assert rows_in(ask(server, reading(0, call=2, first=4), 4).found) == range(4, 8)
    with pytest.raises(CallOver):
        ask(server, reading(1), 0)
    assert (data.executed, server.num_walks) == (2, 1)
    server.end()


def test_who_waits_when_its_call_ends_hears_of_it(ask):
    data = DataSet(4, 4)
    data.goes_on.clear()
    server = PassServer(data.execute)

    async def waits():
        waiting = asyncio.ensure_future(server.blocks_at(reading(0), 4, None))
        await asyncio.sleep(0)
        data.goes_on.set()
        found = await server.blocks_at(reading(0, call=2), 0, None)
        with pytest.raises(CallOver):
            await waiting
        return found

    assert asyncio.run(asyncio.wait_for(waits(), PATIENCE_S)).found[0].first == 0
    server.end()


def test_what_is_lost_is_executed_again_once_from_the_slowest_rank(ask):
    data = DataSet(*[4] * 80)
    server = PassServer(data.execute)
    walk = ask(server, reading(0), 300).walk
    ask(server, reading(1), 8)
    again = ask(server, reading(0), 300, walk)
    assert (again.found[0].first, again.walk != walk) == (300, True)
    also = ask(server, reading(1), 8, walk)
    assert (also.found[0].first, also.walk) == (8, again.walk)
    assert data.executed == 2
    server.end()


def test_who_asks_ahead_and_has_left_begins_no_pass_again():
    async def left_by_all():
        data = DataSet(2, 2)
        data.goes_on.clear()
        server = PassServer(data.execute)
        asked = asyncio.ensure_future(server.blocks_at(reading(0, readers=(0,)), 0, None))
        await asyncio.sleep(0)
        server.leave(reading(0, readers=(0,)))
        answer = await asyncio.wait_for(asked, PATIENCE_S)
        data.goes_on.set()
        return answer.found, server.num_walks, data.executed

    assert asyncio.run(left_by_all()) == (End(0), 0, 1)


def test_what_the_execution_raises_all_ranks_hear(ask):
    def broken(_):
        yield Piece(np.arange(4), 0, 4, 32)
        raise KeyError("mine")

    server = PassServer(broken)
    assert rows_in(ask(server, reading(0), 0).found) == range(4)
    for rank in (0, 1):
        with pytest.raises(KeyError, match="mine"):
            ask(server, reading(rank), 4)
    server.end()


def test_each_rank_has_a_pass_of_its_own_over_what_is_not_split(ask):
    data = DataSet(4)
    server = PassServer(data.execute)
    mine = [reading(rank, reader=rank) for rank in (0, 1)]
    assert [rows_in(ask(server, each, 0).found) for each in mine] == [range(4), range(4)]
    assert data.executed == 2
    for each in mine:
        server.leave(each)
    assert server.num_walks == 0


def test_a_lost_rank_is_neither_waited_for_nor_are_its_rows_dropped(ask):
    """The rows that it had, and did not count, are kept as long as others need them."""
    data = DataSet(*[4] * 6)
    server = PassServer(data.execute)
    for rank in (0, 1, 2):
        ask(server, reading(rank, readers=(0, 1, 2)), 0)
    ask(server, reading(1, readers=(0, 1, 2)), 4)  # and is lost
    for rank in (0, 2):
        ask(server, reading(rank, readers=(0, 1, 2)), 16, needed=8)
    assert rows_in(ask(server, reading(0, readers=(0, 2)), 8, needed=8).found).start == 8
    walk = ask(server, reading(2, readers=(0, 2)), 20, needed=16).walk
    assert ask(server, reading(0, readers=(0, 2)), 20, needed=20).walk == walk
    assert data.executed == 1
    assert server._shared["train", ALL, 0].walk._wanted == 16, "the lost one is not waited for"
    for rank in (0, 2):
        server.leave(reading(rank, readers=(0, 2)))
    assert server.num_walks == 0


def test_passes_that_only_the_lost_had_not_left_are_over(ask):
    data = DataSet(4, 4)
    server = PassServer(data.execute)
    for rank in (0, 1):
        ask(server, reading(rank), 0)
        ask(server, reading(rank, reader=rank), 0)
    server.leave(reading(0))
    assert server.num_walks == 3
    server.hear(1, (0,))
    assert server.num_walks == 1, "that of the rank that is left, over what is not split"
    server.hear(1, (0, 1))  # of one who has not heard of the loss
    assert ask(server, reading(0, number=1), 0).found[0].first == 0
    server.leave(reading(0, number=1))
    assert server.num_walks == 1
    with pytest.raises(CallOver):
        server.hear(0, (0, 1))
    server.end()


def test_rows_that_are_kept_no_more_are_executed_again(ask):
    data = DataSet(*[4] * 6)
    server = PassServer(data.execute)
    walk = ask(server, reading(0, readers=(0,)), 16).walk
    again = ask(server, reading(0, readers=(0,)), 4, needed=4)
    assert (again.found[0].first, again.walk != walk, data.executed) == (4, True, 2)
    server.end()


# --- ahead ----------------------------------------------------------------------------------
def readers():
    return {thread for thread in threading.enumerate() if thread.name == "rows ahead"}


def test_what_is_ahead_comes_in_order_and_its_thread_ends_with_it():
    before = readers()
    assert list(ahead(lambda _: iter(range(50)), 3, lambda: None)) == list(range(50))
    for depth in (0, 2):
        some = ahead(lambda _: iter(range(50)), depth, lambda: None)
        assert next(some) == 0
        some.close()
    assert readers() == before


def test_what_raises_ahead_raises_here_and_so_does_the_check():
    def broken(_):
        yield 1
        raise KeyError("mine")

    found = ahead(broken, 2, lambda: None)
    assert next(found) == 1
    with pytest.raises(KeyError, match="mine"):
        next(found)

    waiting = threading.Event()

    def slow(stay):
        while True:
            waiting.wait(0.01)
            stay()
        yield

    def over():
        raise InterruptedError

    before = readers()
    with pytest.raises(InterruptedError):
        next(ahead(slow, 2, over))
    assert readers() == before
