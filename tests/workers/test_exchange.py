"""JSON values of all ranks: short ones in one collective, long ones whole."""

from tests.workers.ranks import Ranks, run_ranks
from workers.distributed.exchange import SMALL_BYTES, gather_json
from workers.distributed.process_group import Alone


def test_values_of_any_length_come_from_all_ranks_in_their_order():
    short, longest_short, long = "x", "y" * (SMALL_BYTES - 2), "z" * (SMALL_BYTES - 1)

    def body(ranks: Ranks):
        group = ranks.form(1, [0, 1, 2])
        mine = [
            [ranks.index, None, {"a": 1.5}],
            [short, longest_short, short][ranks.index],
            [short, long, longest_short][ranks.index],
            [long, long, long][ranks.index],
        ]
        found, launched = [], []
        for value in mine:
            before = group._num_launched["all"]
            found.append(gather_json(group, value))
            launched.append(group._num_launched["all"] - before)
        return found, launched

    expected = [
        [[rank, None, {"a": 1.5}] for rank in range(3)],
        [short, longest_short, short],
        [short, long, longest_short],
        [long, long, long],
    ]
    assert run_ranks(3, body) == [(expected, [1, 1, 2, 2])] * 3


def test_a_lone_rank_has_its_own():
    assert gather_json(Alone(), {"a": (1, 2)}) == [{"a": [1, 2]}]
