"""`elastic chaos` after a run: the time, reports of hand-made journals, the command line."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from elastic.chaos.page import merged, page
from elastic.chaos.record import Done, read_done, write_done
from elastic.chaos.report import read_story, report
from elastic.chaos.scenario import (
    shipped_names,
)
from elastic.chaos.timeline import DOWN, PRODUCTIVE, ROLLED_BACK, UNSETTLED, follow
from elastic.cli.app import main
from elastic.control.accounting import account, open_account
from elastic.control.events import (
    Adopted,
    Committed,
    DrainNotice,
    Ended,
    Event,
    Joined,
    Loaded,
    Paused,
    Suspended,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.events import Done as LoopDone
from elastic.control.replay import Entry, Started
from elastic.control.standing import Standing
from elastic.control.transition import start, transition
from elastic.protocol.encoding import encode
from elastic.store.files import open_folder
from tests.control.small_run import BEGIN, LIMITS

LOSS: list[Event] = [
    WorkerLost(1, "process_died", 8.25, 8.5),
    Suspended(2, 0, 2, False, False, 8.6),
    Joined(3, 0, 0.0, 8.7),
    Committed(3, 3, 1.0, 9.5),
    Committed(3, 4, 1.0, 10.5),
]
END: list[Event] = [LoopDone(3, 0, 4, 10.5), Ended(3, 0, "ab", 11.0)]
ALL_LOST: list[Event] = [
    WorkerLost(0, "process_died", 8.25, 8.5),
    WorkerLost(1, "process_died", 8.25, 8.5),
    WorkerStarted(2, 10.0),
    Loaded(2, 1, 10.5),
    Joined(3, 0, 0.0, 11.0),
    Committed(3, 2, 1.0, 12.0),
]

ADOPTED: list[Event] = [
    Adopted((Standing(0, "stopped", 2, 0, 2, 3),), 9.0),
    Suspended(7, 0, 3, False, False, 9.5),
    Joined(8, 0, 0.0, 10.0),
    Committed(8, 3, 0.5, 10.0),
    Committed(8, 4, 1.0, 11.0),
]
"""The controller dies, then rank 1, which has voted for step 3 at 8.0."""


def journal(events: list[Event], at: float = 0.0) -> list[Started | Entry]:
    """As the supervisor writes it."""
    decision = start(LIMITS, at)
    entries: list[Started | Entry] = [Started(LIMITS, at, decision.commands, decision.reason)]
    for event in events:
        decision = transition(decision.ledger, decision.phase, event, LIMITS)
        entries.append(Entry(event, decision.commands, decision.reason))
    return entries


def write_run(directory, events, done=()):
    """A run directory with what a report reads."""
    lines = [
        {"at": entry.at if isinstance(entry, Started) else entry.event.at, "entry": encode(entry)}
        for entry in journal(events)
    ]
    directory.mkdir()
    (directory / "journal.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    commits = [e for e in events if isinstance(e, Committed)]
    metrics = [{"step": e.step, "time": e.at, "loss": 1.0 / e.step} for e in commits]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in metrics))
    (directory / "config.json").write_text(json.dumps({"workers": [1, 2]}))
    if done:
        write_done(open_folder(str(directory)), list(done))
    return open_folder(str(directory))


KILLED = Done(
    strike="1.1",
    what="kill",
    whom="rank 1",
    at=8.3,
    step=2,
    generation=2,
    phase="running",
    worker="w1",
    rank=1,
    node_ip="127.0.0.1",
    pid=7,
    scenario="a kill",
)


# --- where the time went ---------------------------------------------------------
def spans_are_seamless(line):
    ends = [span.ended for span in line.spans[:-1]]
    return ends == [span.began for span in line.spans[1:]]


def test_every_second_of_every_rank_is_in_one_bucket():
    line = follow([journal([*BEGIN, *LOSS, *END])], 11.0)
    assert (line.began, line.ended, line.outcome) == (0.0, 11.0, "succeeded")
    assert spans_are_seamless(line)
    assert line.buckets() == pytest.approx(
        {
            "starting": 4.0,
            PRODUCTIVE: 3.0 + 1.8,
            "growing": 0.5,
            "retried": 0.75,
            "recovering": 0.25 + 0.2,
            "ending": 0.5,
        }
    )
    assert line.rank_buckets(0) == pytest.approx(line.buckets())
    assert line.rank_buckets(1) == pytest.approx(
        {"starting": 3.0, "growing": 0.5, "retried": 0.75, "recovering": 0.35, "absent": 6.4}
    )
    assert [sum(line.rank_buckets(rank).values()) for rank in (0, 1)] == pytest.approx([11, 11])


@pytest.mark.parametrize("tail", [[*LOSS, *END], ALL_LOST, ADOPTED])
def test_the_buckets_are_those_of_result_json(tail):
    decision, so_far = start(LIMITS, 0.0), open_account(0.0)
    for event in [*BEGIN, *tail]:
        before = decision
        decision = transition(before.ledger, before.phase, event, LIMITS)
        so_far = account(so_far, event, before, decision)
    expected = {**so_far.badput_s, PRODUCTIVE: so_far.goodput_s}
    line = follow([journal([*BEGIN, *tail])], so_far.since)
    assert sum(line.buckets().values()) == pytest.approx(sum(expected.values()))
    rest = {b: s for b, s in line.buckets().items() if b not in (PRODUCTIVE, ROLLED_BACK)}
    assert rest == pytest.approx({b: s for b, s in expected.items() if b in rest})


def test_a_step_that_is_told_late_was_productive_when_it_was_done():
    line = follow([journal([*BEGIN, *ADOPTED])], 11.0)
    assert spans_are_seamless(line)
    after = [(s.bucket, s.step, s.began, s.ended) for s in line.spans if s.began >= 7.5]
    assert after == [
        (PRODUCTIVE, 3, 7.5, 8.0),
        ("recovering", 0, 8.0, 9.0),
        ("recovering", 0, 9.0, 9.5),
        ("recovering", 0, 9.5, 10.0),
        (PRODUCTIVE, 4, 10.0, 11.0),
    ]


def test_a_fault_is_said_to_be_at_the_step_that_was_committed_by_then(tmp_path):
    """No controller had written the status since step 2."""
    folder = write_run(tmp_path / "run", [*BEGIN, *ADOPTED], [replace(KILLED, at=8.3)])
    write_metrics(tmp_path / "run", "metrics.jsonl", {1: 6.0, 2: 7.0, 3: 8.0, 4: 11.0})
    [fault] = report(read_story(folder))["faults"]
    assert fault["step"] == 3


def test_steps_that_were_fallen_back_behind_were_not_productive():
    line = follow([journal([*BEGIN, *ALL_LOST])], 12.0)
    steps = [(s.step, s.bucket) for s in line.spans if s.step]
    assert steps == [(1, PRODUCTIVE), (2, ROLLED_BACK), (2, PRODUCTIVE)]
    assert line.lost_steps == 1


def test_a_run_that_is_resumed_was_down_between():
    part = journal([WorkerStarted(0, 22.0), Loaded(0, 1, 23.0), Joined(1, 0, 0.0, 24.0)], at=20.0)
    line = follow([journal(BEGIN), part], 25.0)
    assert spans_are_seamless(line)
    assert [(s.bucket, s.began, s.ended) for s in line.spans if s.bucket in (DOWN, UNSETTLED)] == [
        (DOWN, 7.5, 20.0),
        (UNSETTLED, 24.0, 25.0),
    ]
    assert [(s.step, s.bucket) for s in line.spans if s.step] == [(1, PRODUCTIVE), (2, ROLLED_BACK)]


# --- the report ------------------------------------------------------------------
def test_a_fault_is_followed_from_the_signal_to_the_next_step(tmp_path):
    folder = write_run(tmp_path / "run", [*BEGIN, *LOSS, *END], [KILLED])
    found = report(read_story(folder))
    [fault] = found["faults"]
    times = {key: value for key, value in fault.items() if key.endswith("_s")}
    assert times == pytest.approx(
        {
            "at_s": 8.3,
            "detect_s": 0.2,
            "fence_s": 0.1,
            "waiting_s": 0.0,
            "form_s": 0.1,
            "restore_s": 0.0,
            "first_step_s": 0.8,
            "total_s": 1.2,
            "next_step_s": 1.2,
        }
    )
    assert (fault["result"], fault["cause"], fault["lost_steps"]) == (
        "recovered",
        "process_died",
        0,
    )
    assert found["goodput"] == pytest.approx({"time": 4.8 / 11, "capacity": 4.8 / 22})
    assert (found["outcome"], found["steps"], found["scenario"]) == ("succeeded", 4, "a kill")


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({"note": "gone already"}, "nothing happened"),
        ({"worker": "w0", "what": "stop"}, "no loss followed"),
        ({"at": 9.0}, "no loss followed"),
        ({"at": 10.6, "worker": None, "what": "kill"}, "no step followed"),
    ],
)
def test_a_fault_without_a_loss_says_so(change, result, tmp_path):
    done = replace(KILLED, **change)
    folder = write_run(tmp_path / "run", [*BEGIN, *LOSS, *END], [done])
    assert read_done(folder) == [done]
    assert report(read_story(folder))["faults"][0]["result"] == result


def test_a_worker_under_notice_leaves_as_planned(tmp_path):
    noticed = [
        DrainNotice(1, "SIGTERM", 12.0, 8.5),
        Paused(2, 0, 2, 10.5),
        Paused(2, 1, 2, 10.5),
        Joined(3, 0, 0.0, 10.7),
        Committed(3, 3, 1.0, 11.5),
        Committed(3, 4, 1.0, 12.5),
    ]
    end = [LoopDone(3, 0, 4, 12.5), Ended(3, 0, "ab", 13.0)]
    done = replace(KILLED, what="term")
    started = [WorkerStarted(2, 10.2)]
    folder = write_run(
        tmp_path / "run", [*BEGIN, *noticed[:1], *started, *noticed[1:], *end], [done]
    )
    [fault] = report(read_story(folder))["faults"]
    assert (fault["result"], fault["cause"]) == ("left as planned", "SIGTERM")
    assert fault["detect_s"] == pytest.approx(0.2)
    assert fault["left_s"] == pytest.approx(2.4)


def test_waiting_for_capacity_is_told_apart_from_the_fence(tmp_path):
    folder = write_run(tmp_path / "run", [*BEGIN, *ALL_LOST], [KILLED])
    found = report(read_story(folder))
    [fault], [recovery] = found["faults"], found["recoveries"]
    assert (fault["fence_s"], fault["waiting_s"]) == pytest.approx((0.0, 2.0))
    phases = ("detect_s", "fence_s", "form_s", "restore_s", "first_step_s")
    assert sum(fault[p] for p in phases) == pytest.approx(fault["total_s"])
    assert recovery["waiting_s"] == found["buckets"]["waiting"] == pytest.approx(2.0)
    text = page(read_story(folder), found)
    assert "<title>waiting 2.000 s</title>" in text
    assert "<th>waiting</th>" in text


def write_metrics(directory, name, times):
    """By step."""
    lines = [{"step": step, "time": at, "loss": 1.0} for step, at in times.items()]
    (directory / name).write_text("".join(json.dumps(x) + "\n" for x in lines))


def gaps_of(folder):
    found = report(read_story(folder))
    return found["longest_gap_s"], found["longest_gap_any_step_s"]


def test_steps_that_were_rolled_back_end_no_gap(tmp_path, capsys):
    """The run falls to its beginning: no line before that is left in metrics.jsonl."""
    directory = tmp_path / "run"
    folder = write_run(directory, [*BEGIN, *ALL_LOST, Committed(3, 3, 1, 12.25), *END])
    write_metrics(directory, "metrics.jsonl", {1: 21.5, 2: 21.75, 3: 22.0, 4: 22.5})
    assert gaps_of(folder) == (0.5, 0.5)
    write_metrics(directory, "metrics.rolledback.jsonl", {1: 4.0, 2: 9.0, 3: 14.25})
    assert gaps_of(folder) == (17.5, 7.25)
    text = page(read_story(folder), report(read_story(folder)))
    assert "a new step that lasted was 17.50 s, without any new step 7.25 s" in text
    assert main(["chaos", "report", str(directory)]) == 0
    assert "at most 17.50 s without a new step that lasted" in capsys.readouterr().out


def test_a_run_that_ended_otherwise_waited_for_its_next_step_until_then(tmp_path):
    folder = write_run(tmp_path / "run", [*BEGIN, *ALL_LOST[:-1]])
    assert gaps_of(folder) == (4.0, 4.0)


def test_a_loss_belongs_to_the_last_fault_before_it(tmp_path):
    frozen = replace(KILLED, strike="0.1", what="stop", at=7.9)
    folder = write_run(tmp_path / "run", [*BEGIN, *LOSS, *END], [frozen, KILLED])
    results = [fault["result"] for fault in report(read_story(folder))["faults"]]
    assert results == ["no loss followed", "recovered"]


def test_a_loss_long_after_a_fault_has_another_cause(tmp_path):
    early = replace(KILLED, what="stop", at=2.0, for_s=1.0)
    folder = write_run(tmp_path / "run", [*BEGIN, *LOSS, *END], [early])
    for detect_s, result in ((0.5, "no loss followed"), (3.0, "recovered")):
        (tmp_path / "run" / "config.json").write_text(json.dumps({"detect_s": detect_s}))
        assert [f["result"] for f in report(read_story(folder))["faults"]] == [result]


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_from_outside(tmp_path):
    folder = write_run(tmp_path / "run", [*BEGIN, *LOSS, *END], [KILLED])
    story = read_story(folder)
    text = page(story, report(story))
    tags = Tags()
    tags.feed(text)
    assert (tags.open, tags.links, tags.seen.count("svg")) == ([], [], 3)
    assert "<title>kill w1 at step 2</title>" in text
    assert "process died" in text


def test_steps_of_one_colour_are_one_rectangle(tmp_path):
    found = merged(follow([journal([*BEGIN, *LOSS, *END])], 11.0).spans)
    productive = [(s.began, s.ended) for s in found if s.bucket == PRODUCTIVE]
    assert productive == [(4.0, 7.0), (pytest.approx(8.7), 10.5)]


# --- the command line --------------------------------------------------------------
def test_a_report_is_written_without_any_fault(tmp_path, capsys):
    write_run(tmp_path / "run", [*BEGIN, *LOSS])
    assert main(["chaos", "report", str(tmp_path / "run"), "--report", str(tmp_path / "r")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["outcome"], found["faults"], len(found["recoveries"])) == ("unfinished", [], 1)
    assert (tmp_path / "r.html").exists()
    assert "unfinished: 4 steps, 0 lost" in capsys.readouterr().out


def test_a_dry_run_prints_the_plan_and_does_nothing(tmp_path, capsys):
    write_run(tmp_path / "run", BEGIN)
    assert main(["chaos", "double-fault", str(tmp_path / "run"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1.1 kill rank 0, at step 10",
        "2.1 kill a random rank, when forming of fault 1",
    ]
    assert not (tmp_path / "run" / "chaos.jsonl").exists()


def test_wrong_input_is_one_line_and_status_2(tmp_path, capsys):
    write_run(tmp_path / "run", BEGIN)
    assert main(["chaos", "nonsense", str(tmp_path / "run")]) == 2
    assert "there is no scenario 'nonsense'" in capsys.readouterr().err
    assert main(["chaos", "double-fault", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    for workers in ({}, {"workers": "two"}, {"workers": [1]}, {"workers": [1, 2**70, 3]}):
        (tmp_path / "config.json").write_text(json.dumps(workers))
        assert main(["chaos", "report", str(tmp_path)]) == 2
        assert "config.json is damaged: workers must be" in capsys.readouterr().err
    (tmp_path / "run" / "result.json").write_text("{}")
    assert main(["chaos", "double-fault", str(tmp_path / "run")]) == 2
    assert "the run has ended" in capsys.readouterr().err


def test_the_list_names_every_shipped_scenario(capsys):
    assert main(["chaos", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == shipped_names()


def test_a_seed_may_be_given_instead_of_the_scenarios(tmp_path, capsys):
    write_run(tmp_path / "run", BEGIN)
    (tmp_path / "s.yaml").write_text("faults: [{what: kill, when: {per_minute: 60, for_s: 9}}]\n")
    printed = []
    for seed in ("1", "1", "2"):
        command = ["chaos", str(tmp_path / "s.yaml"), str(tmp_path / "run"), "--dry-run"]
        assert main([*command, "--seed", seed]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
