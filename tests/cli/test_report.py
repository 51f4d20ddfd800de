"""`elastic report`: one page of any run directory, in which nothing of its files is markup."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.fs
import pytest

from elastic.chaos.timeline import follow
from elastic.cli.app import main
from elastic.cli.report import command_of
from elastic.control.events import (
    Committed,
    Event,
    Joined,
    Loaded,
    Paused,
    Suspended,
    Synced,
    Tick,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.replay import JOURNAL_TYPES, Entry, Started
from elastic.control.state import Running
from elastic.control.transition import start, transition
from elastic.observe import charts
from elastic.observe.report_page import how_far, lost, reports
from elastic.observe.run_record import RunRecord, Samples, Steps, read_record
from elastic.observe.series import seconds_in, thinned
from elastic.protocol.encoding import decode, encode
from elastic.store.files import Folder, open_folder
from elastic.store.journal import segment_name
from tests.cli.test_profile import row
from tests.control import small_run

LIMITS = replace(small_run.LIMITS, steps=10**6, max_failures=8)
CONFIG = {
    "workers": [1, 2],
    "steps": 40,
    "target": "job.py:Job",
    "arguments": {"width": 3},
    "storage": "/runs",
    "name": "r",
    "seed": 7,
    "detect_s": None,
    "offload": False,
    "versions": {"elastic": "0.1.0"},
}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u2028\ud800`${x}"

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Run:
    """A run directory that is written event by event; the times are seconds of the run."""

    def __init__(self, at: Path, *, name: str = "run", why: str = "SIGKILL") -> None:
        self.path, self.why = at / name, why
        self.path.mkdir()
        self.step, self.generation, self.now, self.newest = 0, 1, 4.0, 1
        self.decision = start(LIMITS, 0.0)
        head = Started(LIMITS, 0.0, self.decision.commands, self.decision.reason)
        self.lines: dict[str, list[str]] = {name: [] for name in ("journal", "metrics", "samples")}
        self.lines["journal"].append(self.line(0.0, head))
        for event in (WorkerStarted(0, 2.0), Loaded(0, 0, 3.0), Joined(1, 0, 0.0, 4.0)):
            self.happen(event)

    def line(self, at: float, entry: object) -> str:
        about = {"at": at, "generation": self.generation, "step": self.step, "phase": "running"}
        return json.dumps({**about, "entry": encode(entry)})

    def happen(self, event: Event) -> None:
        self.decision = transition(self.decision.ledger, self.decision.phase, event, LIMITS)
        entry = Entry(event, self.decision.commands, self.decision.reason)
        self.lines["journal"].append(self.line(event.at, entry))

    def train(self, steps: int, **user: float) -> None:
        for _ in range(steps):
            self.step, self.now = self.step + 1, self.now + 0.1
            self.happen(Committed(self.generation, self.step, 0.1, self.now, idle_s=0.01))
            metrics = {
                **{"step": self.step, "time": self.now, "loss": 1 / self.step, "step_s": 0.1},
                **{"generation": self.generation, "world_size": 2, "samples": 8 * self.step},
                **{"applied": True, "user": user, "learning_rate": 0.1, "gradient_norm": 2.0},
            }
            self.lines["metrics"].append(json.dumps(metrics))
            samples = {"step": self.step, "first": 8 * self.step - 8, "count": 8, "sha256": "0"}
            self.lines["samples"].append(json.dumps(samples))

    def grow(self) -> None:
        """A second worker is let in."""
        self.happen(Tick(self.now))
        self.happen(WorkerStarted(self.newest, self.now))
        self.happen(Synced(self.newest, self.now))
        self.train(1)
        self.happen(Paused(self.generation, 0, self.step, self.now))
        self.generation += 1
        self.now += 0.1
        for rank in (0, 1):
            self.happen(Joined(self.generation, rank, 0.02, self.now, self.step))
        assert isinstance(self.decision.phase, Running), self.decision

    def lose(self) -> None:
        """And is lost in a step."""
        at = self.now
        self.happen(WorkerLost(self.newest, "process_died", at + 0.05, at + 0.3, self.why))
        self.happen(Suspended(self.generation, 0, self.step, False, False, at + 0.35))
        self.generation, self.newest, self.now = self.generation + 1, self.newest + 1, at + 0.5
        self.happen(Joined(self.generation, 0, 0.0, self.now, self.step))
        assert isinstance(self.decision.phase, Running), self.decision
        self.train(1)

    def write(self, **config: object) -> str:
        for name, lines in self.lines.items():
            (self.path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        rows = [json.dumps(row(n, n % 2, time=4.0 + n / 10)) for n in range(1, self.step + 1)]
        (self.path / "anatomy.jsonl").write_text("\n".join(rows) + "\n")
        (self.path / "config.json").write_text(json.dumps({**CONFIG, **config}))
        return str(self.path)


class Tags(HTMLParser):
    """The elements of a page, its scripts, and its text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.attributes: set[str] = set()
        self.scripts: list[str] = []
        self.text = ""
        self.in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes |= {name for name, _ in attrs}
        self.in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script:
            self.scripts.append(data)
        else:
            self.text += data


def reported(run: str, out: Path, *options: str) -> Tags:
    assert main(["report", run, "--out", str(out), *options]) == 0
    return Tags(out.read_text())


def a_run(at: Path, **about: str) -> Run:
    run = Run(at, **about)
    run.train(5)
    run.grow()
    run.train(5)
    run.lose()
    run.train(5, accuracy=0.5)
    return run


def test_a_report_tells_of_workers_curves_recoveries_time_samples_and_how_to_do_it_again(tmp_path):
    page = reported(a_run(tmp_path).write(), tmp_path / "out.html")
    assert page.tags["script"] == 2
    for told in (
        "just begun, step 17 of 40",
        "1 recovery; 0 lost steps",
        "1. at 5.25 s: w1 process_died",
        "0.550 s = detect 0.250 s + fence 0.050 s + form 0.150 s + state 0.000 s + first step 0.1",
        "w1: process_died, SIGKILL, last heard 0.250 s before",
        "every step begins where the step before it ended: none twice, none left out",
        "accuracy",
        "elastic run job.py:Job --workers 1..2 --set width=3 --steps 40 --seed 7 --detect-s none",
    ):
        assert told in page.text, told
    for title in ("Workers", "Loss", "Where the time went", "Anatomy of a step", "Configuration"):
        assert title in page.text
    assert "Learning rate" in page.text
    assert "Gradient norm" in page.text


def test_nothing_that_a_run_names_or_says_is_markup(tmp_path):
    harmless = reported(a_run(tmp_path, name="a").write(arguments={"k": "v"}), tmp_path / "1.html")
    name = EVIL.replace("/", "-").replace("\ud800", "")
    run = a_run(tmp_path, name=name, why=EVIL)
    for line in ("metrics", "journal", "samples"):
        assert run.lines[line]
    run.lines["metrics"] = [
        m.replace("accuracy", "a" + json.dumps(EVIL)[1:-1]) for m in run.lines["metrics"]
    ]
    place = run.write(
        **{"arguments": {EVIL: EVIL}, "target": EVIL, EVIL: EVIL, "versions": {EVIL: EVIL}},
        target_file=EVIL,
        name=EVIL,
    )
    status = {"phase": EVIL, "reason": EVIL}
    (run.path / "status.json").write_text(json.dumps(status))
    (run.path / "result.json").write_text(json.dumps({"weights_sha256": EVIL, "outcome": EVIL}))
    page = reported(place, tmp_path / "2.html")
    assert page.attributes == harmless.attributes
    new = {"tr": 0, "td": 0, "p": 0, "li": 0, "h3": 0}
    assert {k: v for k, v in page.tags.items() if k not in new} == {
        k: v for k, v in harmless.tags.items() if k not in new
    }
    assert page.text.count("<img src=x onerror=alert(1)>") > 5
    assert not any("alert(1)" in script for script in page.scripts)


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    for place in (tmp_path, tmp_path / "absent"):
        assert main(["report", str(place), "--out", str(tmp_path / "x.html")]) == 2
        said = capsys.readouterr().err
        assert "is no run directory" in said
        assert said.count("\n") == 1
    assert not (tmp_path / "x.html").exists()


def test_a_report_replaces_a_report_and_nothing_else(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["report", str(run)]) == 0
    page = Path("report.html").read_text()
    assert "Fewer than two steps are committed" in page
    Path("report.html").write_text("mine")
    assert main(["report", str(run)]) == 2
    assert "report.html is there and is no report of ours" in capsys.readouterr().err
    assert Path("report.html").read_text() == "mine"
    assert main(["report", str(run), "--force"]) == 0
    assert Path("report.html").read_text() == page
    for place in (run, tmp_path / "absent" / "x.html"):
        assert main(["report", str(run), "--out", str(place)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_without_the_plotting_library_it_is_one_line_that_says_how_to_get_it(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "bokeh.plotting", None)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == f"elastic: {charts.MISSING}\n"


def test_what_is_damaged_is_left_out_and_noted(tmp_path):
    run = a_run(tmp_path)
    run.lines["metrics"] += ["{", '{"step": 18, "time": 1e999, "loss": "x", "user": [1]}', "[]"]
    run.lines["metrics"].append('{"step": 1e400, "time": 9, "loss": 1' + "0" * 400 + "}")
    run.lines["samples"][7] = '{"step": 8, "first": 1, "count": null}'
    run.lines["journal"].append('{"at": 1, "entry": {"type": "Entry"}}')
    place = run.write(workers="x", versions=3)
    (run.path / "result.json").write_text(
        '{"recoveries": [3, {"cause": 3}], "badput": {"idle": 1}}'
    )
    (run.path / "data.json").write_text("[")
    page = reported(place, tmp_path / "out.html")
    for told in (
        "metrics.jsonl: damaged lines are left out, 2 of 21",
        "journal.jsonl cannot be followed",
        "data.json",
        "2 of 19 steps have no finite loss",
        "2 steps did not begin where the one before ended: 8, 9",
    ):
        assert told in page.text, told


def test_a_run_in_a_bucket_is_read_segment_by_segment(tmp_path):
    """Any filesystem that is not the local one has segments."""
    run = a_run(tmp_path)
    here = read_record(open_folder(run.write()))
    path = run.path / "journal.jsonl"
    content = path.read_bytes()
    cut = content.index(b"\n", len(content) // 2) + 1
    path.write_bytes(content[:cut])
    (run.path / segment_name("journal.jsonl", cut)).write_bytes(content[cut:])
    away = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    there = read_record(Folder(away, "run"))
    assert there.timeline == here.timeline
    assert len(there.decisions) == len(here.decisions) > 5
    assert there.steps.count == here.steps.count == 17


def test_of_a_long_series_every_peak_is_kept():
    x = np.arange(100_000.0)
    y = np.sin(x / 50)
    y[[777, 55_555]] = 9.0, -9.0
    y[[5, 6]] = np.nan, np.inf
    shown = thinned(x, y, 300)
    assert len(shown) <= 600
    assert {777, 55_555} <= set(shown.tolist())
    assert not {5, 6} & set(shown.tolist())
    assert np.all(np.diff(shown) > 0)
    assert thinned(x[:9], y[:9], 300).tolist() == [0, 1, 2, 3, 4, 7, 8]
    assert len(thinned(np.zeros(5000), np.arange(5000.0), 300)) == 2


def test_seconds_are_shared_out_to_the_bins_that_they_are_in():
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    assert seconds_in([0.5, 1.75], [1.25, 9.0], edges).tolist() == [0.5, 0.5, 1.0]
    assert seconds_in([], [], edges).tolist() == [0.0, 0.0, 0.0]


def test_the_command_gives_all_settings_but_the_place():
    config = {"target": "a b.py:C", "parallel": "ddp", "activation_checkpointing": True}
    config |= {"faults": {"verify_every": 5, "max_nonfinite": None}, "address": "h:1", "name": "n"}
    assert command_of({**config, "detect_s": 3.0}) == (
        "elastic run 'a b.py:C' --parallel ddp --activation-checkpointing --detect-s 3.0 "
        "--faults verify_every=5"
    )
    assert command_of({"target": "__main__:C", "target_file": "/x/t.py"}) == "python /x/t.py"
    of_file = command_of({"target": "t:C", "target_file": "/x/t.py", "detect_s": 3.0})
    assert of_file == "elastic run /x/t.py:C --detect-s 3.0", "from whatever folder"
    of_package = command_of({"target": "p.t:C", "target_file": "/x/p/t.py", "detect_s": 3.0})
    assert of_package == "elastic run p.t:C --detect-s 3.0"
    script = command_of({"target": "script:train.py", "steps": 10**9})
    assert script == "# the command that has started train.py, with its arguments"


def test_what_a_script_commits_and_may_lose_are_reports():
    empty, status = Steps({"step": np.array([])}, {}), {"level": 0, "step": 3}
    record = RunRecord("r", {}, status, {}, {}, empty, empty, None, [], None, Samples())
    assert (how_far(record), lost(record, 1)) == ("3 reports with a checkpoint", "1 lost report")
    stepped = replace(record, steps=Steps({"step": np.array([7.0])}, {}))
    assert how_far(stepped) == "step 7"
    assert reports(record) == ""
    lines = [{"metrics": {"a": 1}}, {"metrics": {"b": "<b>"}, "time": 2.0, "checkpoint": "c_1"}]
    untimed = Steps({"step": np.array([]), "time": np.array([])}, {})
    listed = reports(replace(record, reports=lines, steps=untimed))
    assert "<tr><td>2.00</td><td>-</td><td>c_1</td><td>-</td><td>&lt;b&gt;</td></tr>" in listed


def test_steps_without_a_decision_are_followed_as_one_by_one(tmp_path):
    """A reason that the journal has recorded makes each step one that is decided anew."""
    run = a_run(tmp_path)
    for _ in range(5):
        run.train(7)
        run.grow()
        run.now += 1 / 3
        run.train(3)
        run.lose()
    lines = [json.loads(line)["entry"] for line in run.lines["journal"]]
    journal = [decode(line, JOURNAL_TYPES) for line in lines]
    one_by_one = [
        replace(entry, reason="x") if isinstance(entry, Entry) else entry for entry in journal
    ]
    assert follow([journal], 99.0) == follow([one_by_one], 99.0)


@pytest.mark.slow  # a browser starts, 5 s
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_draws_every_chart_without_an_error_and_runs_nothing_of_the_run(tmp_path):
    run = a_run(tmp_path, why=EVIL)
    place = run.write(name=EVIL, target=EVIL)
    page = reported(place, tmp_path / "out.html")
    assert EVIL[:20] in page.text
    quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    out = [f"--user-data-dir={tmp_path}/browser", "--enable-logging=stderr", "--dump-dom"]
    found = subprocess.run(
        [str(BROWSER), *quiet, *out, (tmp_path / "out.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = [line for line in found.stderr.splitlines() if ":CONSOLE" in line]
    assert [line for line in said if '"[bokeh ' not in line] == []
    assert any("document idle" in line for line in said)
    assert found.stdout.count('class="bk-Figure"') == 10


@pytest.mark.slow  # 100,000 decisions are made for it
def test_a_run_of_100_000_steps_and_500_recoveries_is_a_page_of_5_mb_in_20_s(tmp_path):
    run = Run(tmp_path)
    for _ in range(500):
        run.train(98, accuracy=0.5)
        run.grow()
        run.train(100, learning_rate=1e-3)
        run.lose()
    place = run.write()
    assert run.step == 100_000
    out = tmp_path / "out.html"
    began, wall_began = time.process_time(), time.perf_counter()
    assert main(["report", place, "--out", str(out)]) == 0
    took_s = time.process_time() - began  # one thread: where others compute, too, it waits longer
    wall_s = time.perf_counter() - wall_began
    size_bytes = out.stat().st_size
    print(f"{took_s:.1f} s of computing, {wall_s:.1f} s, {size_bytes / 1e6:.2f} MB")
    assert Tags(out.read_text()).text.count("0.550 s = detect") == 500
    assert took_s <= 20
    assert size_bytes <= 5_000_000
