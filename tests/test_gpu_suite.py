"""`make test-gpu` and its experiments, as far as a machine without a GPU can tell."""

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import experiment, machine
from tests.gpu.__main__ import experiments, main
from tests.gpu.experiment import Table
from tests.gpu.hosts.c3_interface import interfaces
from tests.gpu.one.a4_throughput import idle_part
from tests.gpu.one.a5_bits import counts
from tests.gpu.one.a8_sanitizers import errors_in

FOLDER = Path(experiment.__file__).parent
NAMES = [*(f"a{n}" for n in range(1, 13)), *(f"b{n}" for n in range(1, 10)),
         *(f"c{n}" for n in range(1, 7))]  # fmt: skip
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@no_gpu
def test_where_there_is_no_gpu_the_reason_is_one_line_and_the_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tests.gpu"])
    assert main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"test-gpu: torch \S+ can use no GPU here \(.+\)\n", err)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (("2.13.0+cu130", [], "", 1, 1), ""),
        (("2.11.0", [], "", 8, 8), ""),
        (("2.9.1", [], "", 1, 1), "torch 2.9.1 is installed, and at least 2.11 is needed"),
        (("2.13.0", ["isal"], "", 1, 1), "python packages are missing: isal; pip install them"),
        (
            ("2.13.0", [], "The NVIDIA driver on your system is too old", 0, 1),
            "torch 2.13.0 can use no GPU here (The NVIDIA driver on your system is too old)",
        ),
        (("2.13.0", [], "", 1, 8), "8 GPUs are needed, and torch sees 1"),
    ],
)
def test_why_a_machine_is_not_enough(facts, why):
    assert machine.why_not(*facts) == why


def test_every_experiment_is_a_script_that_the_readme_names():
    found = experiments()
    assert list(found) == NAMES
    text = (FOLDER / "README.md").read_text()
    for module in found.values():
        script = importlib.import_module(module)
        assert script.__doc__
        assert callable(script.body)
        assert f"`{'/'.join(module.split('.')[2:])}.py`" in text, module


def test_rows_have_verdicts_and_are_recorded_below_their_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiment, "RESULTS", tmp_path / "RESULTS.md")
    (tmp_path / "RESULTS.md").write_text("# Results\n")
    table = Table()
    table.at_most("time", 0.25, 1.0, "s")
    table.at_least("rate", 0.5, 0.8)
    table.holds("bits are equal", True)
    table.tell("driver", "580")
    assert capsys.readouterr().out.splitlines() == [
        "PASS time 0.25 s (at most 1 s)",
        "FAIL rate 0.5 (at least 0.8)",
        "PASS bits are equal yes (must hold)",
        "TELL driver 580",
    ]
    assert not table.is_good
    for name in ("a1", "a2"):
        experiment.record(name, table, about="1 x H100")
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.count("1 x H100") == 1
    assert text.count("| FAIL |") == 2
    assert not Table().is_good, "nothing was tried"


def test_a_script_that_breaks_has_failed(monkeypatch, capsys):
    def body(table: Table, arguments: argparse.Namespace) -> None:
        raise RuntimeError("the kernel is gone")

    monkeypatch.setattr(sys, "argv", ["x", "--anywhere"])
    assert experiment.main(body) == 1
    assert "FAIL ran to its end RuntimeError: the kernel is gone" in capsys.readouterr().out


@no_gpu
def test_a_script_refuses_a_machine_without_its_gpus(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x"])
    assert experiment.main(lambda table, arguments: None, num_gpus=8) == 2
    assert "can use no GPU here" in capsys.readouterr().err


def test_what_scripts_read_of_others():
    assert idle_part([(0, 4), (2, 5), (8, 10)]) == pytest.approx(0.3)
    found = counts("2 failed, 30 passed, 1 error in 9.12s")
    assert found == {"failed": 2, "passed": 30, "error": 1}
    assert errors_in("========= ERROR SUMMARY: 0 errors") == 0
    assert errors_in("nothing") == -1
    log = "h:1:1 [0] NCCL INFO NET/Socket : Using [0]eth1:10.0.0.1<0>"
    assert interfaces(log) == {"eth1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("one.a1_forming", ["--rounds", "12"]),
        ("one.a2_absent_peer", ["--rounds", "2"]),
        ("one.a3_abort", ["--settle", "1"]),
        ("one.a4_throughput", ["--pairs", "1", "--steps", "2", "--only", "CharLM"]),
        ("one.a5_bits", ["--place", "cpu", "-k", "test_last_backward"]),
        ("one.a6_operations", ["--every", "100", "--processes", "2"]),
        ("one.a10_compiled", ["--modes", "default", "--processes", "2"]),
        ("one.a11_attribution", []),
        ("eight.b2_aborts", ["--workers", "2"]),
        ("eight.b3_forming", ["--workers", "2"]),
        ("eight.b4_bandwidth", ["--workers", "2", "--largest", str(1 << 20), "--width", "64"]),
        ("eight.b1_kills", ["--device", "cpu", "--workers", "2", "--kills", "1", "--steps", "60"]),
        ("eight.b5_instants", ["--device", "cpu", "--workers", "3", "--only", "between"]),
        ("eight.b9_which_gpu", ["--device", "cpu", "--workers", "2"]),
    ],
)
def test_a_script_comes_to_its_end_on_a_cpu(module, options):
    """What it measures there says nothing; that it passes is not asked."""
    command = [sys.executable, "-m", f"tests.gpu.{module}", "--anywhere", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert "TELL seconds" in done.stdout, done.stderr
    assert "ran to its end" not in done.stdout, done.stdout + done.stderr
