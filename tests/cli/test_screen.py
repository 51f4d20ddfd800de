"""The full view at 80 columns, and what plain logs say instead: speed, end, curve, recoveries."""

import io
import itertools
import json
import math
from typing import Any

import pytest
from rich.console import Console

from elastic.cli.course import MOST_LOSSES, Course, sampled
from elastic.cli.progress import Progress, View, step_line
from elastic.cli.screen import BLOCKS, screen
from elastic.cli.text import duration
from elastic.protocol.errors import WrongInput
from elastic.store.files import open_folder, write_json
from elastic.store.run_directory import check_status
from tests.cli.test_progress import STATUS, decision, look

RECOVERY: dict[str, Any] = {
    "cause": "process_died", "detect_s": 0.012, "fence_s": 0.03, "form_s": 0.02, "state_s": 0.0,
    "first_step_s": 0.1, "total_s": 0.162, "lost_steps": 0, "waiting_s": 0.0,
}  # fmt: skip
ACCOUNT: dict[str, Any] = {
    "goodput": 0.973, "idle": 0.021, "num_recoveries": 1, "lost_steps": 0, "recoveries": [RECOVERY],
}  # fmt: skip


def step(number: int, at: float, loss: float | None = 1.0) -> dict[str, Any]:
    return {"step": number, "time": at, "loss": loss, "step_s": 0.1, "generation": 3}


def course(*steps: dict[str, Any]) -> Course:
    made = Course()
    made.hear(steps)
    return made


def drawn(view: View, *decisions: str, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(view, decisions))
    return console.file.getvalue().splitlines()


def worker(number: int, rank: int | None, node: str | None, state: str) -> dict[str, Any]:
    own_s = None if rank is None else 0.0312
    return {"id": f"w{number}", "rank": rank, "node_ip": node, "state": state, "own_s": own_s}


def test_the_full_view_has_all_its_parts_in_80_columns():
    steps = [step(n, 1000 + n * 0.125, 3 * math.exp(-n / 40) + 1) for n in range(1, 131)]
    status = {
        **{**STATUS, "phase": "running", "step": 130, "steps": 1_000_000, "world_size": 3},
        "wanted": [2, 4],
        "workers": [worker(n, n, f"10.0.0.{n % 2 + 1}", "training") for n in range(3)],
        "standby": [worker(6, None, "10.0.0.2", "standby"), worker(7, None, None, "pending")],
        "account": {**ACCOUNT, "recoveries": [RECOVERY, {**RECOVERY, "cause": "hung"}, RECOVERY]},
        "reason": "w1 lost (process_died), 3 of 4 left",
    }
    lines = drawn(View(status, steps[-1], course(*steps)))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for part in (
        "step 130/1000000  running, 3 workers of 2 to 4",
        "0.100 s/step  8.0 steps/s  done in 1 day 10:43:04  at ",
        "goodput 97.3 %  idle 2.1 %  1 recovery  0 lost steps",
        "10.0.0.1     w0 w2    training  0 2    0.031",
        "             w6       standby   -      -",
        "no node yet  w7       pending   -      -",
        "recovered from  detect   fence    form   state first step   total lost",
        "hung           0.012 s 0.030 s 0.020 s 0.000 s    0.100 s 0.162 s    0",
        "reason: w1 lost (process_died), 3 of 4 left",
    ):
        assert part in text, part
    (curve,) = (line for line in lines if BLOCKS[-1] in line)
    assert curve.startswith(f"loss {BLOCKS[-1]}")
    heights = [BLOCKS.index(c) for c in curve if c in BLOCKS]
    assert heights == sorted(heights, reverse=True)
    assert set(heights) == set(range(len(BLOCKS)))


def test_a_run_that_only_begins_shows_what_there_is():
    status = {**STATUS, "phase": "starting", "world_size": 0, "workers": [], "reason": ""}
    lines = drawn(View(status, {}, Course()))
    assert len(lines) == 2
    assert "step 0/9  starting, 0 workers of 1 to 2" in lines[0]
    assert lines[1].rstrip() == "loss -  0.000 s/step"


def test_a_script_has_no_share_of_steps_that_nobody_knows():
    script = {**STATUS, "steps": 10**9, "step": 4, "level": 1, "account": ACCOUNT}
    lines = drawn(View(script, step(7, 5.0, None), Course()))
    assert lines[0].startswith("step 7  running")
    assert lines[1].rstrip() == "loss -  0.100 s/step"
    assert "lost report" in "\n".join(lines)
    reported = course()
    reported.report = {"metrics": {"loss": 0.25, "epoch": 3, "name": "x", "\x1b[2J": 1}}
    lines = drawn(View(script, step(7, 5.0, None), reported))
    assert lines[1].rstrip() == "loss 0.2500  epoch 3  \\x1b[2J 1  0.100 s/step"


def test_of_a_script_at_level_0_there_are_its_reports():
    script = {**STATUS, "steps": 10**9, "step": 4, "level": 0}
    reported = course()
    reported.report = {"metrics": {"loss": 0.25, "epoch": 3}, "time": 5.0}
    lines = drawn(View(script, {}, reported))
    assert lines[0].startswith("4 reports with a checkpoint  running")
    assert lines[1].rstrip() == "loss 0.2500  epoch 3"
    assert step_line(View(script, {}, reported)) == (
        "00:00:05 reports=4 loss=0.2500 epoch=3 world_size=2 generation=1"
    )
    assert step_line(View(script, {}, Course())) == "reports=4 world_size=2 generation=1"


def test_what_a_run_has_written_does_not_drive_the_terminal():
    hostile = "[/b]\x1b[2J"
    status = {
        **{**STATUS, "phase": hostile, "reason": hostile, "wanted": [hostile, 2]},
        "workers": [worker(0, 0, hostile, hostile)],
        "account": {**ACCOUNT, "recoveries": [{**RECOVERY, "cause": hostile}]},
    }
    text = "\n".join(drawn(View(status, {}, Course())))
    assert "\x1b" not in text
    assert text.count("[/b]") >= 5


def test_many_workers_of_a_node_are_counted():
    workers = [worker(n, n, "10.0.0.1", "training") for n in range(100)]
    lines = drawn(View({**STATUS, "world_size": 100, "workers": workers}, {}, Course()))
    assert max(map(len, lines)) <= 80
    assert "+92" in "\n".join(lines)


def test_plain_lines_have_a_time_a_speed_and_an_estimate_of_the_end():
    steps = [step(n, 3600 + n * 0.5) for n in range(1, 5)]
    view = View({**STATUS, "steps": 100, "step": 4}, steps[-1], course(*steps))
    assert step_line(view) == (
        "01:00:02 step=4/100 loss=1.0000 step_s=0.100 steps_per_s=2.0 left=0:48 world_size=2 "
        "generation=3"
    )


def test_a_recovery_is_a_line_of_a_plain_log_once(tmp_path):
    text, folder = io.StringIO(), open_folder(str(tmp_path))
    progress = Progress(Console(file=text, force_terminal=False))
    for number in (0, 0, 1, 1, 3):
        account = {**ACCOUNT, "num_recoveries": number, "recoveries": [RECOVERY] * number}
        write_json(folder, "status.json", {**STATUS, "account": account})
        look(progress, tmp_path)
    progress.close()
    told = [line for line in text.getvalue().splitlines() if line.startswith("recovered")]
    assert (
        told
        == [
            "recovered cause=process_died detect_s=0.012 fence_s=0.030 form_s=0.020 state_s=0.000 "
            "first_step_s=0.100 total_s=0.162 lost_steps=0"
        ]
        * 3
    )


def test_recoveries_of_before_are_no_news(tmp_path):
    text = io.StringIO()
    write_json(open_folder(str(tmp_path)), "status.json", {**STATUS, "account": ACCOUNT})
    progress = Progress(Console(file=text, force_terminal=False))
    look(progress, tmp_path)
    progress.close()
    assert "recovered" not in text.getvalue()


@pytest.mark.parametrize(
    "account", [[], {**ACCOUNT, "goodput": "x"}, {**ACCOUNT, "recoveries": [{"cause": 1}]}]
)
def test_a_damaged_account_is_refused(account):
    check_status({**STATUS, "account": ACCOUNT}, "status.json")
    with pytest.raises(WrongInput, match="is damaged"):
        check_status({**STATUS, "account": account}, "status.json")


def test_the_speed_is_that_of_the_last_half_minute():
    made = course(*(step(n, n * 10.0) for n in range(1, 11)))
    made.hear(step(n, 100 + (n - 10) * 0.1) for n in range(11, 1011))
    assert made.steps_per_s == pytest.approx(10.0)
    assert made.left_s(2010) == pytest.approx(100.0)
    assert course(step(1, 5.0)).left_s(9) is None


def test_steps_that_are_done_again_are_not_counted_twice():
    made = course(*(step(n, float(n)) for n in range(1, 11)))
    made.hear(step(n, 20.0 + n) for n in range(6, 9))
    assert made.steps_per_s == pytest.approx(7 / 27)
    assert [n for n, _ in made.losses] == list(range(1, 9))


def test_the_curve_of_a_long_run_is_of_all_of_it_and_bounded():
    made = course(*(step(n, n * 0.1, float(n)) for n in range(1, 20_001)))
    assert len(made.losses) <= MOST_LOSSES
    assert (made.losses[0][0], made.losses[-1][0] > 19_000) == (1, True)


def test_the_loss_before_the_end_of_a_long_file_is_sampled(tmp_path):
    lines = [json.dumps(step(n, float(n), float(n))) + "\n" for n in range(1, 20_001)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    found = [line["step"] for line in sampled(open_folder(str(tmp_path)), "metrics.jsonl", 1000)]
    assert (found[0], len(found)) == (1, 64)
    assert max(b - a for a, b in itertools.pairwise(found)) < 20_000 / 50
    assert sampled(open_folder(str(tmp_path)), "metrics.jsonl", 10**9) == []


def test_the_reason_of_the_last_decision_is_said_once():
    status = {**STATUS, "reason": "w1 lost"}
    text = "\n".join(drawn(View(status, {}, Course()), json.loads(decision(1, "w1 lost"))["phase"]))
    assert "reason: w1 lost" in text
    text = "\n".join(drawn(View(status, {}, Course()), 'step=1 reason="w1 lost"'))
    assert "reason: w1 lost" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7.4, "0:07"), (725, "12:05"), (10800, "3:00:00"), (90061, "1 day 1:01:01")],
)
def test_durations_are_read_like_a_clock(seconds, text):
    assert duration(seconds) == text
