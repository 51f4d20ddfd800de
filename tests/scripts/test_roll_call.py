"""Which ranks others wait for, and where in their script they are; who swallows a call's end."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic.control.reporting import missing
from elastic.controller.roll_call import RollCall as Told
from elastic.protocol.messages.to_controller import ScriptMove
from tests.workers.ranks import Ranks, run_ranks
from workers.scripts.default_group import DefaultGroup, as_default
from workers.scripts.roll_call import RollCall
from workers.scripts.unwinding import EXIT_NOT_UNWOUND, CannotBeCalledAgain, Unwinding, raised

WAITS = ScriptMove(3, 0, "report() number 4", 31.0, "train.py:90")
AT_87 = ScriptMove(3, 1, "", 0.0, "train.py:87")
LINE = (
    "ranks 1, 2 have not called report() number 4, for 31 s (rank 1 is at train.py:87); rank 0 has"
)


def test_who_has_not_come_and_where_it_is():
    assert missing({0: WAITS, 1: AT_87}, 3) == LINE


def test_who_waits_in_another_one_is_missed_too():
    other = replace(WAITS, rank=1, waits_in="barrier() number 1", waited_s=30.0, place="train.py:5")
    assert missing({0: WAITS, 1: other}, 2) == (
        "rank 1 has not called report() number 4, for 31 s (rank 1 is at train.py:5 in barrier() "
        "number 1); rank 0 has"
    )


@pytest.mark.parametrize(
    "said",
    [
        {},
        {0: AT_87},
        {0: replace(WAITS, waited_s=29.0), 1: AT_87},
        {0: WAITS, 1: replace(WAITS, rank=1, waited_s=6.0)},
    ],
    ids=["nothing said", "nobody waits", "not for long", "all wait in the same"],
)
def test_nobody_is_missed(said):
    assert missing(said, 2) == ""


def test_many_ranks_are_counted():
    line = missing({0: WAITS}, 100)
    assert line == "99 ranks have not called report() number 4, for 31 s; rank 0 has"


def test_it_is_told_once_for_each_time_and_an_older_generation_says_nothing():
    noted: list[dict[str, Any]] = []
    told = Told(noted.append)
    for said in (WAITS, AT_87):
        told.hear(said)
    told.look(3, 3)
    told.hear(replace(WAITS, waited_s=60.0))
    told.look(3, 3)
    assert (told.told, noted) == (LINE, [{"generation": 3, "reason": LINE}])
    assert "for 60 s" in told.reason
    told.hear(ScriptMove(2, 2, "", 0.0, "old.py:1"))
    told.look(3, 3)
    assert "old.py" not in told.reason
    told.hear(ScriptMove(3, 0, "", 0.0, "train.py:91"))
    told.look(3, 3)
    assert (told.reason, told.told) == ("", "")
    told.hear(replace(WAITS, generation=4))
    told.look(3, 3)
    assert told.reason == "", "the others have not heard of generation 4 yet"


def test_a_ranks_own_part_is_the_time_in_which_it_waits_for_nobody():
    began = time.monotonic()
    roll_call = RollCall(lambda move: None, lambda: (3, 1))
    with roll_call.waiting("report()"), roll_call.waiting("all_reduce"):
        waited = time.monotonic()
        while time.monotonic() < waited + 0.02:
            pass
    before = time.monotonic()
    own_s, data_s = roll_call.take_own_s()
    assert 0.0 == data_s <= own_s <= time.monotonic() - began - 0.02
    roll_call.data_s += 60.0
    own_s, data_s = roll_call.take_own_s()
    assert 0.0 <= own_s == data_s <= time.monotonic() - before, "no more than there was"
    assert roll_call.take_own_s()[1] == 0.0


def test_a_rank_says_that_it_waits_and_at_which_line_of_the_script():
    said: list[ScriptMove] = []
    heard = threading.Event()

    def send(move: ScriptMove) -> None:
        said.append(move)
        if len(said) >= 2:
            heard.set()

    with RollCall(send, lambda: (3, 1), every_s=0.01) as roll_call:
        with roll_call.waiting("report()"):
            pass
        with roll_call.waiting("report()"):
            assert heard.wait(30)
        num_said = len(said)
    assert [m.waits_in for m in said[:2]] == ["report() number 2"] * 2
    assert said[1].waited_s >= 0.0
    assert (said[0].generation, said[0].rank) == (3, 1)
    assert said[0].place.startswith("test_roll_call.py:")
    assert said[num_said - 1].waits_in == "", "that it waits no longer is said at once"


def test_who_swallows_the_end_of_its_call_twice_is_ended():
    def body(ranks: Ranks):
        ended: list[int] = []

        def end(status: int, why: str) -> Any:
            ended.append(status)
            raise SystemExit(why)

        inner = ranks.form(1, [0, 1])
        group = DefaultGroup(inner, on_refusal=Unwinding(end).tell)
        with as_default(group):
            inner.abandon()
            num_caught = 0
            deadline = time.monotonic() + 30
            try:
                while time.monotonic() < deadline:
                    try:
                        torch.distributed.all_reduce(torch.ones(1))
                    except Exception:
                        num_caught += 1
            except SystemExit as left:
                return num_caught, ended, "caught the end of its call 2 times" in str(left)

    assert run_ranks(2, body) == [(2, [EXIT_NOT_UNWOUND], True)] * 2


def test_what_fails_only_when_it_is_called_again_is_told_so():
    error = RuntimeError("context has already been set")
    again = raised(error, has_moved=False, has_moved_before=True)
    assert isinstance(again, CannotBeCalledAgain)
    assert again.__cause__ is error
    assert "called twice in one process: RuntimeError: context has already been set" in str(again)
    assert raised(error, has_moved=False, has_moved_before=False) is error, "of its first call"
    assert raised(error, has_moved=True, has_moved_before=True) is error
    other = FileNotFoundError(2, "No such file or directory", "data.csv")
    assert raised(other, has_moved=False, has_moved_before=True) is other, "it is not that"


def test_what_the_script_has_called_is_told_and_not_what_that_waits_in():
    said: list[ScriptMove] = []
    told = RollCall(said.append, lambda: (0, 0), every_s=0.01)
    with told, told.waiting("report()"), told.waiting("exchange"):
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)  # polling, bounded by the deadline
    assert said[0].waits_in == "report() number 1"
