"""Whether a script goes on in place after a loss, by what its members say of themselves."""

from dataclasses import replace

from workers.scripts.in_place.call_state import (
    BARRIER,
    COLLECTIVE,
    COMMIT,
    EXCHANGE,
    SEND,
    SUM,
    UNIT,
    CallAgain,
    CallState,
    GoOn,
    InPass,
    judge,
)
from workers.scripts.in_place.dealing import Loss

ALL = (0, 1, 2)


def call_state(member: int, num_done: int, doing: str = "", **fields) -> CallState:
    said = CallState("call", member, ALL, 0, num_done, doing, -1, None, (), "")
    return replace(said, **fields)


def test_who_is_left_does_the_operation_again():
    for doing in (UNIT, EXCHANGE, BARRIER, COMMIT):
        verdict = judge(3, [call_state(0, 5, doing), call_state(2, 5)])
        assert verdict == GoOn((0, 2), 5, None, ())


def test_who_has_missed_its_end_takes_the_result_of_who_has_seen_it():
    ahead = call_state(2, 6, UNIT, result=[3.0, []])
    assert judge(3, [call_state(0, 5, UNIT), ahead]) == GoOn((0, 2), 6, [3.0, []], ())


def test_a_collective_of_the_scripts_own_is_not_done_without_the_lost():
    verdict = judge(3, [call_state(0, 5, COLLECTIVE), call_state(2, 5)])
    assert verdict == CallAgain("the lost rank was in a collective of the script's own")
    verdict = judge(3, [call_state(0, 5, COLLECTIVE), call_state(2, 6)])
    assert isinstance(verdict, CallAgain)


def test_a_broadcast_is_done_again_if_who_sends_is_left():
    first, second = (call_state(m, 5, SEND, source=0) for m in (0, 2))
    assert judge(3, [first, second]) == GoOn((0, 2), 5, None, ())
    lost = [call_state(0, 5, SEND, source=1), call_state(2, 5)]
    assert isinstance(judge(3, lost), CallAgain)
    moved = [call_state(0, 5, SEND, source=2), call_state(2, 5)]
    assert isinstance(judge(3, moved), CallAgain), "rank 1 is another one now"


def test_a_sum_is_one_of_the_survivors_where_the_script_says_so():
    assert judge(3, [call_state(0, 5, SUM), call_state(2, 5)]) == GoOn((0, 2), 5, None, ())


def test_who_has_missed_a_collective_takes_its_result_if_that_is_kept():
    for doing in (COLLECTIVE, SEND, SUM):
        ahead = call_state(2, 6, result=["AAAA"])
        assert judge(3, [call_state(0, 5, doing), ahead]) == GoOn((0, 2), 6, ["AAAA"], ())
        assert isinstance(judge(3, [call_state(0, 5, doing), call_state(2, 6)]), CallAgain)


def test_what_cannot_be_mended_calls_the_script_again():
    newcomer = judge(3, [call_state(0, 5), call_state(2, 5), None])
    assert newcomer == CallAgain("a newcomer begins with the others")
    another = judge(3, [call_state(0, 5), call_state(2, 5, call="another")])
    assert another == CallAgain("a newcomer begins with the others")
    refused = judge(3, [call_state(0, 5), call_state(2, 5, refusal="because")])
    assert refused == CallAgain("because")
    apart = judge(3, [call_state(0, 5), call_state(2, 7)])
    assert apart == CallAgain("ranks were more than one operation apart")
    different = judge(3, [call_state(0, 5, UNIT), call_state(2, 5, EXCHANGE)])
    assert different == CallAgain("ranks were in different operations: exchange, unit")
    few = judge(3, [call_state(2, 5)])
    assert few == CallAgain("1 of 3 ranks are left: batches would grow too large")
    unheard = judge(3, [call_state(0, 5, ""), call_state(2, 6)])
    assert isinstance(unheard, CallAgain)


def test_ranks_that_know_of_different_losses_are_called_again():
    """Of two losses close together, one has seen both regroupings and another only the second."""
    again = CallAgain("ranks know of different losses")
    assert judge(4, [call_state(0, 5, members=(0, 1, 2, 3)), call_state(2, 5)]) == again
    assert judge(3, [call_state(0, 5, num_losses=1), call_state(2, 5)]) == again


def test_without_rank_0_a_script_that_has_kept_its_rank_is_called_again():
    left = [call_state(1, 5, UNIT), call_state(2, 5, UNIT)]
    verdict = judge(3, [replace(of_rank, keeps_rank=True) for of_rank in left])
    assert isinstance(verdict, CallAgain)
    assert "rank 0, which may be who saves, was lost" in verdict.why
    assert judge(3, left) == GoOn((1, 2), 5, None, ())


def test_a_script_that_gathers_by_the_ranks_that_it_has_kept_is_called_again():
    def verdict(members: tuple[int, int], **fields) -> object:
        return judge(3, [call_state(member, 5, UNIT, **fields) for member in members])

    gathers = {"keeps_rank": True, "gathers": True}
    assert isinstance(verdict((0, 1), **gathers), GoOn), "both have the rank that they had"
    assert isinstance(verdict((0, 2), **gathers), CallAgain)
    assert isinstance(verdict((0, 2), gathers=True), GoOn), "it asks again"


def test_the_rest_of_a_pass_is_dealt_from_where_the_furthest_is():
    first = call_state(0, 5, UNIT, passes=(InPass(0, 2, 6, 5), InPass(3, 1, 9, 9)))
    second = call_state(2, 5, passes=(InPass(0, 2, 7, 5),))
    verdict = judge(3, [first, second])
    assert isinstance(verdict, GoOn)
    assert verdict.losses == (
        (0, 2, Loss(ALL, (0, 2), 7, 5)),
        (3, 1, Loss(ALL, (0, 2), 9, 9)),
    )


def test_who_is_in_the_pass_before_says_nothing_of_the_newest():
    first = call_state(0, 5, UNIT, passes=(InPass(1, 2, 9, 8),))
    second = call_state(2, 6, passes=(InPass(1, 3, -1, -1),))
    verdict = judge(3, [first, second])
    assert isinstance(verdict, GoOn)
    assert verdict.losses == ((1, 3, Loss(ALL, (0, 2), -1, -1)),)
