"""The command line: exit statuses, one line for wrong input, what the commands print."""

import json
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import elastic
from elastic.cli.app import main
from elastic.cli.outcome import print_failure, print_outcome
from elastic.cli.run import only_result_on_stdout, result_line
from elastic.config import RunConfig
from elastic.control.events import Tick
from elastic.control.replay import Entry, Started
from elastic.control.state import Limits
from elastic.control.transition import start, transition
from elastic.driver.launch import Result, RunFailed, conclude
from elastic.driver.resume import config_json
from elastic.protocol.encoding import encode
from elastic.protocol.errors import UserError, WrongInput
from elastic.store.files import open_folder, read_json, write_json
from elastic.store.run_directory import RunDirectory

SIZES = ["--steps", "10", "--global-batch", "32", "--micro-batch", "8"]
DIGITS = "workers.workloads.digits:Digits"
STATUS: dict[str, Any] = {
    "layout": "", "wanted": [1, 2],
    "phase": "running", "generation": 3, "world_size": 1, "step": 7, "steps": 10,
    "committed_checkpoint": None, "standby": [], "reason": "w1 lost, 1 of 2 left",
    "controller": {"pid": 1, "node_ip": "127.0.0.1"},
    "workers": [
        {"id": "w0", "rank": 0, "node_id": "n", "node_ip": "10.0.0.9", "pid": 4242,
         "device": "cpu", "state": "training", "step": 7}
    ],
}  # fmt: skip
RESULT: dict[str, Any] = {
    "outcome": "succeeded", "steps": 10, "loss": 0.5, "weights_sha256": "ab12", "generations": 3,
    "lost_steps": 0, "goodput": 0.975, "badput": {"recovery": 0.1},
    "recoveries": [
        {"cause": "process_died", "detect_s": 0.01, "fence_s": 0.02, "form_s": 0.03,
         "state_s": 0.0, "first_step_s": 0.1, "total_s": 0.16, "lost_steps": 0}
    ],
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = RunDirectory(str(tmp_path), "r")
    run.begin({"steps": 10})
    run.write_status(STATUS)
    return tmp_path / "r"


def test_it_has_one_name_however_it_is_started():
    words = [sys.executable, "-m", "elastic", "stop"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "elastic: Missing argument 'RUN_DIR'; see `elastic stop --help`\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", DIGITS], "Missing option '--steps'; see `elastic run --help`"),
        (["run", *SIZES], "Missing argument 'TARGET'"),
        (["run", DIGITS, *SIZES, "--steps", "many"], "Invalid value for '--steps'"),
        (["run", DIGITS, *SIZES, "--colour"], "No such option: --colour"),
        (["fly"], "No such command 'fly'"),
        (["run", DIGITS, *SIZES, "--workers", "two"], "--workers 'two': give a number or MIN..MAX"),
        (["run", DIGITS, *SIZES, "--workers", "3..2"], "min 3 is above max 2"),
        (["run", DIGITS, *SIZES, "--workers", "9"], "min 9 is above V"),
        (["run", DIGITS, *SIZES, "--micro-batch", "5"], "is not a multiple of micro_batch=5"),
        (["run", DIGITS, *SIZES, "--parallel", "pp:2,fsdp"], "is not available yet: pp:S goes"),
        (["run", DIGITS, *SIZES, "--parallel", "pp:0"], "parallel='pp:0': give pp:S or pp:S/Sch"),
        (["run", DIGITS, *SIZES, "--parallel", "pp:2/Zigzag"], "'Zigzag' is unknown: choose one"),
        (["run", DIGITS, *SIZES, "--detect-s", "soon"], "--detect-s 'soon': give seconds, or none"),
        (["run", DIGITS, *SIZES, "--set", "x"], "--set 'x' is no key=value"),
        (["run", DIGITS, *SIZES, "--set", "bogus=1"], "--set does not fit Digits"),
        (["run", "nowhere.py:Job", *SIZES], "there is no file"),
        (["run", "workers.workloads.digits:Nope", *SIZES], "has no class Nope; it has Digits"),
        (["run", DIGITS, *SIZES, "--storage", "nosuch://x"], "'nosuch://x' cannot be used"),
        (["run", DIGITS, *SIZES, "--storage", "s3//b/runs"], "no URI: write 's3://b/runs'"),
        (
            ["run", DIGITS, *SIZES, "--storage", "s3://"],
            "'s3://' cannot be used: it names no bucket",
        ),
        (["run", DIGITS, *SIZES, "--storage", "gs:/b"], "no URI: write 'gs://b'"),
        (["run", DIGITS, *SIZES, "--storage", f"{__file__}/runs"], "cannot be written: "),
        (["status", "nowhere"], "nowhere is no run directory: there is no such folder"),
        (["status", "."], ". is no run directory: it has no config.json"),
        (["chaos", "report", "nowhere"], "nowhere is no run directory: there is no such folder"),
        (["watch", "nowhere"], "nowhere is no run directory"),
        (["replay", "nowhere"], "nowhere is no run directory"),
    ],
)
def test_wrong_input_is_one_line_on_stderr_and_status_2(capsys, monkeypatch, arguments, says):
    monkeypatch.setattr(sys, "path", list(sys.path))
    status = main(arguments)
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert says in printed.err


def test_an_interrupt_while_the_target_is_imported_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "interrupted_of_test.py").write_text("raise KeyboardInterrupt")
    assert main(["run", f"{tmp_path}/interrupted_of_test.py:Job", *SIZES]) == 1
    assert capsys.readouterr().err == "elastic: interrupted\n"


def finish(storage: Path) -> list[str]:
    """The arguments of a run that finished in `storage`, without training it."""
    arguments = ["run", DIGITS, *SIZES, "--storage", str(storage), "--name", "r"]
    config = RunConfig(steps=10, global_batch=32, micro_batch=8, storage=str(storage), name="r")
    run = RunDirectory(str(storage), "r")
    run.begin(config_json(config.to_json(), DIGITS, {}, {}))
    run.write_result(RESULT)
    return arguments


def test_a_finished_run_says_so_and_exits_with_0(tmp_path, capsys):
    assert main(finish(tmp_path)) == 0
    printed = capsys.readouterr()
    assert "finished all 10 steps before" in printed.err
    assert printed.out.splitlines()[0] == "succeeded: 10 of 10 steps, loss 0.5000"


def test_with_json_stdout_is_result_json_alone(tmp_path, capsys):
    assert main([*finish(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == RESULT


def test_a_run_of_that_name_with_other_settings_is_refused_and_left_alone(tmp_path, capsys):
    assert main([*finish(tmp_path), "--seed", "7"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "seed was 0 and now is 7" in printed.err
    assert read_json(open_folder(str(tmp_path / "r")), "result.json") == RESULT


def test_a_max_above_v_is_a_warning(tmp_path, capsys):
    assert main([*finish(tmp_path), "--workers", "1..9"]) == 0
    assert "elastic: warning: workers: max 9 is above V" in capsys.readouterr().err


def test_a_look_at_a_run_loads_nothing_heavy(run_dir):
    """numpy and pyarrow take longer than the rest of such a command."""
    heavy = {"numpy", "pyarrow", "ray", "torch", "tensorboardX", "bokeh", "plotly", "yaml"}
    program = (
        "import sys, elastic.cli.app as c\n"
        "codes = [c.main(a) for a in "
        f"(['--version'], ['run', '--help'], ['status', {str(run_dir)!r}],"
        f" ['replay', {str(run_dir)!r}])]\n"
        "assert codes == [0, 0, 0, 2], codes\n"
        f"found = {heavy} & set(sys.modules)\n"
        "assert not found, found\n"
        "assert 'elastic.chaos.scenario' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_version_is_that_of_the_installed_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"elastic {version('elastic-ray-trainer')}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--version" in shown
    assert "Train PyTorch on a Ray cluster whose machines come and go." in shown


@pytest.mark.parametrize("name", elastic.__all__)
def test_no_module_hides_a_public_name_once_it_is_imported(name):
    """Importing elastic.run would bind it over the function `elastic.run`."""
    is_module = name in {module.name for module in pkgutil.iter_modules(elastic.__path__)}
    assert isinstance(getattr(elastic, name), ModuleType) == is_module


def test_help_names_every_option_of_the_contract(capsys):
    assert main(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in (
        "workers", "steps", "global-batch", "micro-batch", "parallel", "reduction", "storage",
        "name", "seed", "checkpoint-every", "standby", "address", "set", "detach", "json",
    ):  # fmt: skip
        assert f"--{option}" in shown


def test_only_the_result_reaches_stdout_whatever_else_prints():
    program = (
        "import os, elastic.cli.run as c\n"
        "with c.only_result_on_stdout():\n"
        "    print('python')\n"
        "    os.system('echo child')\n"
        "print('result')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, sorted(done.stderr.split())) == ("result\n", ["child", "python"])


def test_the_result_line_holds_the_fields_of_result_json_only():
    result = Result(**RESULT, run_directory="/s/r")
    assert json.loads(result_line(result)) == RESULT
    detached = Result(outcome="detached", badput={}, recoveries=[], run_directory="/s/r")
    assert json.loads(result_line(detached)) == {"outcome": "detached", "run_directory": "/s/r"}


def test_the_outcome_is_a_few_lines_for_a_person(capsys):
    print_outcome(RESULT, "/s/r", 10)
    assert capsys.readouterr().out.splitlines() == [
        "succeeded: 10 of 10 steps, loss 0.5000",
        "  weights_sha256  ab12",
        "  since its last start: 3 generations, 1 recovery, 0 lost steps, goodput 97.5 %",
        "  recovery from process_died: 0.160 s = detect 0.010 s + fence 0.020 s + form 0.030 s + "
        "state 0.000 s + first step 0.100 s",
        "  run directory   /s/r",
    ]


def test_a_small_loss_is_not_shown_as_zero(capsys):
    print_outcome({**RESULT, "loss": 4.4231e-06}, "/s/r", 10)
    assert capsys.readouterr().out.startswith("succeeded: 10 of 10 steps, loss 4.423e-06\n")


def test_a_script_commits_reports_and_nobody_knows_its_loss(capsys):
    of_script = {**RESULT, "loss": None, "level": 1, "level_reason": ""}
    print_outcome(of_script, "/s/r", 10**9)
    out = capsys.readouterr().out
    assert out.startswith("succeeded: 9 reports with a checkpoint\n"), "its end is committed, too"
    assert "0 lost reports" in out


def test_a_failure_shows_the_users_own_traceback_then_the_reason(capsys):
    failure = RunFailed("step 3: loss raised", Result(outcome="failed", badput={}, recoveries=[]))
    failure.__cause__ = UserError("KeyError: 'x'", "Traceback ...\nKeyError: 'x'\n")
    print_failure(failure)
    failure.__cause__ = KeyError("y")
    print_failure(failure)
    assert capsys.readouterr().err.splitlines() == [
        "Traceback ...",
        "KeyError: 'x'",
        "elastic: the run failed: step 3: loss raised",
        "KeyError: 'y'",
        "elastic: the run failed: step 3: loss raised",
    ]


def test_a_failure_shows_no_frame_of_ours_and_says_the_exception_once(capsys):
    """As a worker on another node tells it, where Ray has unpacked the folder of TARGET."""
    ours = Path(elastic.cli.outcome.__file__).parents[2] / "workers/worker.py"
    there = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0a1b/job.py"
    text = (
        "w0: before its first step: RuntimeError: no such layer\n"
        "Traceback (most recent call last):\n"
        f'  File "{ours}", line 112, in _tell_of_errors\n    train()\n'
        '  File "/x/site-packages/workers/train_state/build.py", line 142, in build_model\n'
        "    model = workload.build_model()\n            ^^^^^^\n"
        f'  File "{there}", line 6, in build_model\n    raise RuntimeError("no such layer")\n'
        "RuntimeError: no such layer\n"
    )
    failure = RunFailed(text, Result(outcome="failed", badput={}, recoveries=[]))
    failure.__cause__ = RuntimeError("no such layer")
    print_failure(failure, Path("/home/me/job"))
    assert capsys.readouterr().err.splitlines() == [
        "Traceback (most recent call last):",
        '  File "/home/me/job/job.py", line 6, in build_model',
        '    raise RuntimeError("no such layer")',
        "elastic: the run failed: w0: before its first step: RuntimeError: no such layer",
    ]


def test_a_failure_that_we_have_found_is_one_line(capsys):
    ours = Path(elastic.cli.outcome.__file__).parents[2] / "workers/step/vote.py"
    text = (
        "w0: rank 0 in step 9: FloatingPointError: not finite\n"
        "Traceback (most recent call last):\n"
        f'  File "{ours}", line 112, in vote\n    raise FloatingPointError(\n'
        "FloatingPointError: not finite\n"
    )
    print_failure(RunFailed(text, Result(outcome="failed", badput={}, recoveries=[])))
    assert capsys.readouterr().err == (
        "elastic: the run failed: w0: rank 0 in step 9: FloatingPointError: not finite\n"
    )


def test_wrong_input_leaves_no_folder_behind(tmp_path, capsys):
    """Ray is asked for after the storage has been tried."""
    storage = tmp_path / "new" / "runs"
    arguments = ["--storage", str(storage), "--address", "127.0.0.1:1"]
    assert main(["run", DIGITS, *SIZES, *arguments]) == 2
    assert "no Ray cluster answers" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_of_a_run_that_has_trained_is_a_failure_with_its_result(capsys):
    said = {"wrong_input": "the loss is a float", "user_error": b"", "failed_rank": 1}
    early = {**said, "is_open": True, "reason": "w0: the loss is a float", "result": result_at(0)}
    with pytest.raises(WrongInput, match=r"^the loss is a float$"):
        conclude(early, "/s/r")
    error = pickle.dumps(WrongInput("the loss is a float"))
    with pytest.raises(RunFailed, match=r"^w0: the loss is a float$") as caught:
        conclude({**early, "user_error": error, "result": result_at(1)}, "/s/r")
    assert (caught.value.result.steps, caught.value.result.run_directory) == (9, "/s/r")
    assert (caught.value.rank, pickle.loads(pickle.dumps(caught.value)).rank) == (1, 1)
    print_failure(caught.value)
    assert capsys.readouterr().err == "elastic: the run failed: w0: the loss is a float\n"


def result_at(generations: int) -> dict[str, Any]:
    return {**RESULT, "outcome": "failed", "generations": generations, "steps": 9 * generations}


def test_status_says_phase_workers_reason_and_age(run_dir, capsys):
    assert main(["status", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "running, generation 3, 1 worker",
        "step 7 of 10",
        "reason: w1 lost, 1 of 2 left",
    ]
    assert re.match(r"status is \d+ s old", lines[3])
    assert lines[5].split() == ["w0", "0", "training", "7", "4242", "10.0.0.9", "cpu"]


def test_status_says_how_long_stages_wait_as_planned_and_as_measured(run_dir, capsys):
    layout = "1 pipeline of 2 stages, 4 micro-batches; 0.20 idle"
    (run_dir / "status.json").write_text(json.dumps({**STATUS, "layout": layout}))
    lines = [{"step": 1, "generation": 2, "bubble": 0.9}, {"step": 2, "generation": 3}]
    lines += [{"step": 3 + i, "generation": 3, "bubble": 0.2 + i / 50} for i in range(3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)
    assert main(["status", str(run_dir)]) == 0
    assert f"{layout}; 0.22 idle as measured\n" in capsys.readouterr().out


def test_status_says_the_level_of_a_script_and_why_it_is_no_higher(run_dir, capsys):
    of_script = {**STATUS, "level": 0, "level_reason": "own process groups"}
    (run_dir / "status.json").write_text(json.dumps(of_script))
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "\n7 reports with a checkpoint\nlevel 0, restart in place; own process groups\n" in out
    (run_dir / "metrics.jsonl").write_text('{"step":29}\n{"step":30}\n')
    reports = '{"metrics":{"epoch":2}}\n{"metrics":{"loss":0.5,"epoch":3}}\n'
    (run_dir / "reports.jsonl").write_text(reports)
    assert main(["status", str(run_dir)]) == 0
    assert "\nstep 30\nnewest report: loss 0.5000, epoch 3\nlevel 0" in capsys.readouterr().out
    (run_dir / "status.json").write_text(json.dumps({**of_script, "level_reason": 3}))
    assert main(["status", str(run_dir)]) == 2


def test_status_as_json_is_the_content_of_the_file(run_dir, capsys):
    assert main(["status", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_that_is_old_while_the_run_goes_on_is_called_so(run_dir, capsys):
    for name in ("config.json", "status.json"):
        os.utime(run_dir / name, (1.0, 1.0))
    assert main(["status", str(run_dir)]) == 0
    assert "no word of the run's controller (pid 1) for" in capsys.readouterr().out


def test_watching_a_finished_run_ends_with_its_outcome(run_dir, capsys):
    write_json(open_folder(str(run_dir)), "result.json", {**RESULT, "outcome": "stopped"})
    assert main(["watch", str(run_dir)]) == 1
    assert "stopped: 10 of 10 steps, loss 0.5000" in capsys.readouterr().out


def journal(run_dir: Path, *, reason: str | None = None) -> None:
    """Two starts of a run; `reason` puts a false one on record."""
    limits = Limits(
        min_workers=1, max_workers=2, standby=0, steps=3, max_failures=1, join_timeout_s=5.0,
        end_timeout_s=5.0, confirm_timeout_s=1.0,
    )  # fmt: skip
    lines: list[dict[str, Any]] = []
    for at in (10.0, 20.0):
        begun = start(limits, at)
        after = transition(begun.ledger, begun.phase, Tick(at + 1), limits)
        head = Started(limits, at, begun.commands, begun.reason)
        entry = Entry(Tick(at + 1), after.commands, reason or after.reason)
        lines += [
            {"at": v.at if v is head else at + 1, "phase": "waiting", "generation": 0, "step": 0,
             "entry": encode(v)}
            for v in (head, entry)
        ]  # fmt: skip
    lines.insert(1, {"at": 10.5, "evaluation": {"accuracy": 0.5}})
    (run_dir / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_replay_tells_the_decisions_and_finds_them_the_same(run_dir, capsys):
    journal(run_dir)
    assert main(["replay", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=2)[:2] == ["0.000", "s"]
    assert 'phase=waiting reason="the run starts: 1 to 2 workers' in lines[0]
    assert lines[-1] == "4 journal entries replayed: every decision is the same again"


def test_replay_of_a_decision_that_differs_is_status_1(run_dir, capsys):
    journal(run_dir, reason="the moon was full")
    assert main(["replay", str(run_dir)]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "4 journal entries replayed: 2 differ"
    assert "the moon was full" in printed.err


def test_a_journal_of_another_version_is_one_line(run_dir, capsys):
    (run_dir / "journal.jsonl").write_text('{"at":1.0,"entry":{"type":"Begun"}}\n')
    assert main(["replay", str(run_dir)]) == 2
    assert "the journal cannot be replayed: type 'Begun'" in capsys.readouterr().err


def test_stdout_comes_back_after_an_error(capsys):
    with pytest.raises(KeyError), only_result_on_stdout():
        raise KeyError
    print("here")
    assert capsys.readouterr().out == "here\n"
