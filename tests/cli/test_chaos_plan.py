"""`elastic chaos` before a run: scenarios, traces, plans, victims."""

import random

import pytest

from elastic.chaos.plan import choose, make_plan
from elastic.chaos.scenario import (
    After,
    AtStep,
    Fault,
    InPhase,
    Whom,
    parse_scenario,
    read_scenario,
    shipped_names,
)
from elastic.chaos.traces import Drop, read_trace
from elastic.protocol.errors import WrongInput


# --- scenarios -----------------------------------------------------------------
def parse(fault, tmp_path):
    return parse_scenario({"faults": [fault]}, "s.yaml", tmp_path).faults[0]


def test_a_fault_says_what_whom_and_when(tmp_path):
    assert [
        parse({"what": "kill", "when": {"after_s": 0}}, tmp_path),
        parse({"what": "kill", "whom": {"rank": 2}, "when": {"step": 5}}, tmp_path),
        parse({"what": "stop", "for_s": 2, "when": {"phase": "forming"}}, tmp_path),
        parse({"what": "drain", "whom": {"node_of": "random"}, "when": {"step": 1}}, tmp_path),
        parse({"what": "lossy", "loss": 0.2, "for_s": 9, "when": {"step": 1}}, tmp_path),
        parse({"what": "corrupt", "when": {"step": 1}}, tmp_path),
        parse({"what": "fill", "for_s": 2, "at_most_gb": 0.5, "when": {"step": 1}}, tmp_path),
    ] == [
        Fault("kill", Whom("rank"), After(0.0)),
        Fault("kill", Whom("rank", 2), AtStep(5)),
        Fault("stop", Whom("rank"), InPhase("forming"), for_s=2.0),
        Fault("drain", Whom("node_of"), AtStep(1)),
        Fault("lossy", Whom("node_of"), AtStep(1), for_s=9.0, loss=0.2),
        Fault("corrupt", Whom("checkpoint"), AtStep(1)),
        Fault("fill", Whom("storage"), AtStep(1), for_s=2.0, at_most_gb=0.5),
    ]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", "fault 1 is 'kill', must be a mapping of at_most_gb, for_s, loss, slower, what,"),
        ({"what": "hug"}, "what is 'hug', must be one of kill, stop, slow, term, drain"),
        ({"what": "kill", "who": 1}, "'who' is none of at_most_gb, for_s, loss, slower, what,"),
        ({"what": "kill"}, "when is None, must be a mapping"),
        ({"what": "kill", "when": {}}, "when has nothing: give one of after_s; step;"),
        ({"what": "kill", "when": {"step": 1, "after_s": 1}}, "when has after_s, step: give one"),
        ({"what": "kill", "when": {"step": 0}}, "step is 0, must be a whole number from 1"),
        ({"what": "kill", "when": {"after_s": -1}}, "after_s is -1, must be a number above 0"),
        ({"what": "kill", "when": {"phase": "idle"}}, "phase is 'idle', must be one of waiting"),
        ({"what": "kill", "when": {"step": 1, "after_fault": 1}}, "must name an earlier fault"),
        (
            {"what": "kill", "for_s": 1, "when": {"step": 1}},
            "for_s goes with stop, slow, drain",
        ),
        ({"what": "kill", "whom": "bob", "when": {"step": 1}}, "whom is 'bob', must be a mapping"),
        ({"what": "kill", "slower": 3, "when": {"step": 1}}, "slower goes with slow"),
        ({"what": "slow", "slower": 1, "when": {"step": 1}}, "slower is 1, must be above 1"),
        ({"what": "drain", "when": {"step": 1}}, "drain is of a node: write whom: {node_of: 0}"),
        ({"what": "cut", "when": {"step": 1}}, "cut needs for_s: the seconds until it is undone"),
        ({"what": "fill", "when": {"step": 1}}, "fill needs for_s"),
        (
            {"what": "cut", "for_s": 1, "whom": {"rank": 0}, "when": {"step": 1}},
            "cut is of a node: write whom: {node_of: 0}",
        ),
        ({"what": "lossy", "for_s": 1, "loss": 1.5, "when": {"step": 1}}, "loss is 1.5, must be"),
        ({"what": "cut", "for_s": 1, "loss": 0.5, "when": {"step": 1}}, "loss goes with lossy"),
        ({"what": "corrupt", "whom": "random", "when": {"step": 1}}, "corrupt hits the checkpoint"),
        ({"what": "capacity", "when": {"step": 1}}, "capacity follows a trace: write when: {trace"),
        ({"what": "kill", "when": {"trace": "x"}}, "no trace 'x'; shipped are aws-p3, g4dn-us"),
    ],
)
def test_a_wrong_scenario_is_one_line_that_says_where(fault, message, tmp_path):
    with pytest.raises(WrongInput) as caught:
        parse(fault, tmp_path)
    assert str(caught.value).startswith("s.yaml: fault 1")
    assert message in str(caught.value)


def test_shipped_scenarios_are_sound_and_each_explained():
    scenarios = [read_scenario(name) for name in shipped_names()]
    assert len(scenarios) >= 6
    assert all(s.about and make_plan(s, 4) for s in scenarios)


def test_a_trace_is_its_losses(tmp_path):
    (tmp_path / "t.csv").write_text("# seconds,count\n0,0\n5,0\n5,8\n60,8\n60,6\n90,8\n120,4\n")
    assert read_trace(tmp_path / "t.csv") == (Drop(0.0, 0.25), Drop(60.0, 0.5))
    trace = {"what": "kill", "when": {"trace": "t.csv", "faster": 60}}
    plan = make_plan(parse_scenario({"faults": [trace]}, "s", tmp_path), num_workers=4)
    assert [(s.trigger, s.num_victims) for s in plan] == [(After(0.0), 1), (After(1.0), 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,4\n1,x\n", "line 2 is '1,x', must be seconds,count"),
        ("5,4\n1,3\n", "times must not decrease"),
        ("0,4\n1,5\n", "the trace has no loss"),
    ],
)
def test_a_damaged_trace_says_what_is_wrong(text, message, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(WrongInput, match=message):
        read_trace(tmp_path / "t.csv")


# --- plans ---------------------------------------------------------------------
def rate(seed):
    fault = {"what": "kill", "when": {"per_minute": 30, "for_s": 60}}
    return parse_scenario({"seed": seed, "faults": [fault]}, "s", None)


def test_a_plan_is_fixed_by_its_seed():
    plan = make_plan(rate(1), 4)
    assert plan == make_plan(rate(1), 4)
    assert plan != make_plan(rate(2), 4)
    times = [strike.trigger.seconds for strike in plan]
    assert times == sorted(times)
    assert 15 < len(times) < 45
    assert times[-1] < 60


def test_every_so_often_means_so_many_strikes():
    fault = {"what": "term", "when": {"every_s": 10, "times": 3}}
    plan = make_plan(parse_scenario({"faults": [fault]}, "s", None), 4)
    assert [str(strike) for strike in plan] == [
        "1.1 term a random rank, after 10.00 s",
        "1.2 term a random rank, after 20.00 s",
        "1.3 term a random rank, after 30.00 s",
    ]


def test_victims_are_those_that_are_there():
    rows = [
        {"id": f"w{rank}", "rank": rank, "pid": 100 + rank, "node_id": "ab"[rank > 1]}
        for rank in range(4)
    ]
    dice = random.Random(0)
    assert choose(Whom("rank", 2), 1, rows, dice) == [rows[2]]
    assert choose(Whom("rank", 9), 1, rows, dice) == []
    assert choose(Whom("node_of", 0), 1, rows, dice) == rows[:2]
    assert len(choose(Whom("rank"), 3, rows, dice)) == 3
    assert choose(Whom("rank"), 9, rows, dice) == rows
    again = [choose(Whom("rank"), 1, rows, random.Random(5)) for _ in range(2)]
    assert again[0] == again[1]
