"""What a person sees: plain lines, the live view, curves."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from elastic.cli.checkpoint import progress_bar
from elastic.cli.progress import Progress, told, worker_table
from elastic.controller.curves import Curves
from elastic.observe.anatomy import PARTS, Shares, peaks_of, shares
from elastic.store.files import open_folder, write_json

STATUS: dict[str, Any] = {
    "layout": "", "wanted": [1, 2],
    "phase": "running", "generation": 1, "world_size": 2, "step": 0, "steps": 9,
    "committed_checkpoint": None, "standby": [], "reason": "2 of 2 joined",
    "controller": {"pid": 1, "node_ip": "127.0.0.1"},
    "workers": [
        {"id": i, "rank": i, "node_id": "n", "node_ip": "127.0.0.1", "pid": 100 + i,
         "device": "cpu", "state": "training", "step": 0}
        for i in range(2)
    ],
}  # fmt: skip
METRICS: dict[str, Any] = {
    "step": 1, "time": 5.0, "loss": 0.25, "generation": 1, "world_size": 2, "samples": 8,
    "step_s": 0.1, "applied": True, "user": {"accuracy": 0.5, "broken": None},
}  # fmt: skip


def look(progress: Progress, place: Any) -> None:
    progress._looked_at = -10.0  # as if some time had gone by
    progress(str(place))


def decision(step: int, reason: str, *workers: int) -> str:
    form = {"type": "Form", "membership": {"workers": workers}, "step": step}
    entry = {"type": "Entry", "commands": [form] if workers else [], "reason": reason}
    line = {"at": 1.0, "phase": "forming", "generation": 2, "step": step, "entry": entry}
    return json.dumps(line) + "\n"


def test_plain_lines_tell_each_decision_and_the_last_step(tmp_path):
    folder, text = open_folder(str(tmp_path)), io.StringIO()
    progress = Progress(Console(file=text, force_terminal=False, width=40))
    look(progress, tmp_path)  # nothing there yet
    (tmp_path / "journal.jsonl").write_text(
        decision(0, "", 0, 1) + decision(2, "w1 [SIGKILL] lost, 1 of 2 left", 0) + '{"at":1.5}\n'
    )
    look(progress, tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step":1,"loss":0.25,"step_s":0.1}\n{"step":2,"loss":null,"step_s":0.2}\n'
    )
    write_json(folder, "status.json", {**STATUS, "world_size": 1, "generation": 2, "step": 2})
    look(progress, tmp_path)
    with (tmp_path / "journal.jsonl").open("a") as journal:
        journal.write(decision(2, "all paused"))
    look(progress, tmp_path)
    progress.close()
    assert text.getvalue().splitlines() == [
        '00:00:01 generation=2 step=2 size=1 phase=forming reason="w1 [SIGKILL] lost, 1 of 2 left"',
        "step=2/9 loss=not finite step_s=0.200 world_size=1 generation=2",
        '00:00:01 generation=2 step=2 phase=forming reason="all paused"',
    ]


def started(at: float, earlier_generations: int) -> str:
    entry = {"type": "Started", "commands": [], "reason": "the run starts: 1 to 2 workers"}
    entry["earlier_generations"] = earlier_generations
    line = {"at": at, "phase": "waiting", "generation": earlier_generations, "step": 0}
    return json.dumps({**line, "entry": entry}) + "\n"


def test_a_line_parts_the_starts_of_a_run(tmp_path):
    (tmp_path / "journal.jsonl").write_text(
        started(0.0, 0) + decision(2, "SIGINT at the driver") + started(86400.0, 2)
    )
    text = io.StringIO()
    look(Progress(Console(file=text, force_terminal=False)), tmp_path)
    assert text.getvalue().splitlines() == [
        '00:00:00 generation=0 step=0 phase=waiting reason="the run starts: 1 to 2 workers"',
        '00:00:01 generation=2 step=2 phase=forming reason="SIGINT at the driver"',
        "--- the run was started again, 1970-01-02 00:00:00 UTC ---",
        '00:00:00 generation=2 step=0 phase=waiting reason="the run starts: 1 to 2 workers"',
    ]


def test_the_last_line_tells_the_world_size_that_the_run_ended_with(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(METRICS) + "\n")
    ended = {**STATUS, "phase": "finished", "world_size": 0, "generation": 3, "step": 1}
    write_json(open_folder(str(tmp_path)), "status.json", ended)
    shown = {}
    for is_terminal in (False, True):
        text = io.StringIO()
        progress = Progress(Console(file=text, force_terminal=is_terminal, width=120))
        look(progress, tmp_path)
        progress.close()
        shown[is_terminal] = text.getvalue()
    assert shown[False] == "00:00:05 step=1/9 loss=0.2500 step_s=0.100 world_size=2 generation=1\n"
    assert "finished, 2 workers" in shown[True]


def test_a_script_s_steps_have_a_speed_and_neither_loss_nor_end(tmp_path):
    lines = [{**METRICS, "step": n, "time": 5.0 + n / 4, "loss": None} for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    script = {**STATUS, "steps": 10**9, "level": 1, "level_reason": ""}
    write_json(open_folder(str(tmp_path)), "status.json", script)
    text = io.StringIO()
    progress = Progress(Console(file=text, force_terminal=False, width=200))
    look(progress, tmp_path)
    progress.close()
    assert text.getvalue() == (
        "00:00:05 step=3 loss=- step_s=0.100 steps_per_s=4.0 world_size=2 generation=1\n"
    )


def test_each_report_of_a_script_at_level_0_is_a_line(tmp_path):
    folder, text = open_folder(str(tmp_path)), io.StringIO()
    progress = Progress(Console(file=text, force_terminal=False, width=200))
    script = {**STATUS, "steps": 10**9, "level": 0, "level_reason": "own process groups"}
    for number in range(3):
        write_json(folder, "status.json", {**script, "step": number})
        look(progress, tmp_path)
        progress._line_at = -10.0  # as if some time had gone by
        with (tmp_path / "reports.jsonl").open("a") as file:
            line = {"report": number, "metrics": {"epoch": number}, "time": 5.0 + number}
            file.write(json.dumps(line) + "\n")
    look(progress, tmp_path)  # the last one has no checkpoint
    progress.close()
    assert text.getvalue().splitlines() == [
        "00:00:05 reports=1 epoch=0 world_size=2 generation=1",
        "00:00:06 reports=2 epoch=1 world_size=2 generation=1",
        "00:00:07 reports=2 epoch=2 world_size=2 generation=1",
    ]


def test_what_is_read_is_shown_without_a_total_where_none_is_known(capsys):
    for size_bytes, said in ((None, "38.4 kB"), (38_400, "38.4/38.4 kB")):
        with progress_bar("step 3", size_bytes) as on_bytes:
            on_bytes(38_400)
        assert f" {said}" in capsys.readouterr().err


def test_the_live_view_shows_numbers_workers_and_decisions(tmp_path):
    write_json(open_folder(str(tmp_path)), "status.json", STATUS)
    (tmp_path / "metrics.jsonl").write_text('{"step":3,"loss":0.25,"step_s":0.1}\n')
    (tmp_path / "journal.jsonl").write_text(decision(0, "2 of 2 joined", 0, 1))
    text = io.StringIO()
    progress = Progress(Console(file=text, force_terminal=True, width=120))
    look(progress, tmp_path)
    progress.close()
    shown = text.getvalue()
    for part in ("step 3/9", "loss 0.2500", "0.100 s/step", "w1", "training", "2 of 2 joined"):
        assert part in shown


def test_the_live_view_shows_all_of_a_reason_in_a_narrow_terminal(tmp_path):
    write_json(open_folder(str(tmp_path)), "status.json", STATUS)
    reason = "w1 lost (SIGKILL): " + ", ".join(f"word{n}" for n in range(30))
    (tmp_path / "journal.jsonl").write_text(decision(0, reason, 0, 1))
    text = io.StringIO()
    progress = Progress(Console(file=text, force_terminal=True, width=40, height=50))
    look(progress, tmp_path)
    progress.close()
    assert all(f"word{n}" in text.getvalue() for n in range(30))


def test_looking_again_at_once_reads_nothing(tmp_path):
    progress = Progress(Console(file=io.StringIO(), force_terminal=False))
    assert progress(str(tmp_path)) is None
    write_json(open_folder(str(tmp_path)), "status.json", STATUS)
    assert progress(str(tmp_path)) is None


def test_curves_are_written_for_loss_speed_and_what_the_user_logged(tmp_path):
    curves = Curves(tmp_path / "tensorboard")
    curves.record(METRICS)
    curves.record({**METRICS, "step": 2, "loss": None, "learning_rate": 0.5, "gradient_norm": 2.0})
    row = {**dict.fromkeys((f"{part}_s" for part in PARTS), 0.1), "memory_bytes": 1 << 30}
    rows = [{**row, "gpu_memory_bytes": None}]
    curves.record_shares(Shares(2, 1.0, shares(rows), peaks_of(rows)))
    curves.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    counts = {tag: content.count(tag) for tag in (b"loss", b"step_s", b"user/accuracy", b"broken")}
    assert counts == {b"loss": 1, b"step_s": 2, b"user/accuracy": 2, b"broken": 0}
    tags = (b"learning_rate", b"gradient_norm", b"samples_per_s", b"memory/process_gib", b"/gpu")
    assert [content.count(tag) for tag in tags] == [1, 1, 2, 1, 0]


def test_the_last_learning_rate_and_gradient_norm_are_shown(tmp_path):
    scalars = {"learning_rate": 0.00025, "gradient_norm": 1.5}
    write_json(open_folder(str(tmp_path)), "status.json", STATUS)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**METRICS, **scalars}) + "\n")
    text = io.StringIO()
    progress = Progress(Console(file=text, force_terminal=True, width=80))
    look(progress, tmp_path)
    progress.close()
    assert "learning rate 0.00025  gradient norm 1.5000" in text.getvalue()


def test_the_own_seconds_of_each_rank_are_shown_once_they_are_measured():
    def shown(status):
        console = Console(file=io.StringIO(), width=200)
        console.print(worker_table(status))
        return [line.split() for line in console.file.getvalue().splitlines()]

    assert shown(STATUS)[0][-1] == "device"
    slow = {**STATUS["workers"][1], "own_s": 0.51234}
    measured = shown({**STATUS, "workers": [STATUS["workers"][0], slow]})
    assert [line[-1] for line in measured] == ["s/micro-batch", "-", "0.512"]


def test_what_others_have_written_does_not_drive_the_terminal(tmp_path):
    text = io.StringIO()
    status = {**STATUS, "workers": [{**STATUS["workers"][0], "device": "[/b]\x1b[2J"}]}
    write_json(open_folder(str(tmp_path)), "status.json", status)
    (tmp_path / "journal.jsonl").write_text(decision(1, "\x1b[2Jlost\x07", 0))
    progress = Progress(Console(file=text, force_terminal=False))
    look(progress, tmp_path)
    console = Console(file=text, width=200)
    console.print(worker_table(status))
    shown = text.getvalue()
    assert 'reason="\\x1b[2Jlost\\x07"' in shown
    assert "[/b]\\x1b[2J" in shown
    assert "\x1b" not in shown


DAMAGED = [
    ("status.json", '{"step": "x"}'),
    ("status.json", "[]"),
    ("status.json", json.dumps({**STATUS, "workers": [7]})),
    ("metrics.jsonl", '{"step": null}\n'),
    ("metrics.jsonl", json.dumps({**METRICS, "loss": "low"}) + "\n"),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_damaged_file_is_one_line_and_the_next_look_may_succeed(
    tmp_path, name, content, is_terminal
):
    text = io.StringIO()
    progress = Progress(Console(file=text, force_terminal=is_terminal, width=150))
    write_json(open_folder(str(tmp_path)), "status.json", STATUS)
    (tmp_path / name).write_text(content)
    look(progress, tmp_path)
    look(progress, tmp_path)
    assert text.getvalue().count("the run cannot be looked at now") == 1
    assert f"{name}" in text.getvalue()
    write_json(open_folder(str(tmp_path)), "status.json", STATUS)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(METRICS) + "\n")
    look(progress, tmp_path)
    progress.close()
    assert "0.2500" in text.getvalue()


@pytest.mark.parametrize("entry", [[], {"reason": 1}, {"reason": "x", "commands": 3}, "no"])
def test_a_damaged_decision_is_left_out(tmp_path, entry):
    text = io.StringIO()
    (tmp_path / "journal.jsonl").write_text(
        json.dumps({"at": 1.0, "entry": entry}) + "\n" + decision(2, "w1 lost", 0)
    )
    look(Progress(Console(file=text, force_terminal=False)), tmp_path)
    assert text.getvalue().count("reason=") == 1


def test_the_layout_of_pipelines_is_told_with_its_warnings():
    planned = {"generation": 2, "layout": "1 pipeline of 3 stages", "warnings": ["47% idle"]}
    line = {"at": 5.0, "planned": planned}
    wanted = ['generation=2 layout="1 pipeline of 3 stages"', "warning: 47% idle"]
    assert told(line, 4.0) == wanted
    assert told(line, 6.0) == []
    assert told({**line, "planned": {"generation": 2}}, 4.0) == [], "damaged"
