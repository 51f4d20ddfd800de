"""`elastic checkpoint diff`, `best` and `elastic.checkpoint.best`."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elastic
from elastic.cli.app import main
from elastic.protocol.manifest import MANIFEST
from tests.workers.checkpoint_samples import build, damage, save
from workers.checkpoint.diff import Unequal, compare_tensors


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    save(tmp_path / "run", 10, build(1))
    save(tmp_path / "run", 20, build(1))
    return tmp_path / "run"


def difference(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_equal_checkpoints_have_no_difference(run_dir, capsys):
    assert main(["checkpoint", "diff", str(run_dir), str(run_dir), "--step", "10"]) == 0
    assert "0 tensors differ, 29 are equal bit for bit" in capsys.readouterr().out


def test_every_kind_of_difference_is_told(run_dir, tmp_path, capsys):
    changed = build(1)
    with torch.no_grad():
        changed.model.scale.add_(0.25)
        changed.model.head.weight[3, 2:4] -= 0.5
    changed.model.scratch = torch.zeros(4)
    changed.model.register_buffer("more", torch.zeros(1))
    del changed.model.flags
    changed.optimizer.param_groups[0]["lr"] = 7.0
    save(tmp_path / "other", 5, changed)
    command = ["checkpoint", "diff", str(run_dir), str(tmp_path / "other")]
    assert main([*command, "--json"]) == 1
    assert difference(capsys) == {
        "is_equal": False,
        "num_equal": 25,
        "only_here": ["model/flags"],
        "only_there": ["model/more"],
        "kinds": [{"name": "model/scratch", "here": "float32[3]", "there": "float32[4]"}],
        "unequal": [
            {"name": "model/scale", "num_different": 1, "num_elements": 1, "max_abs": 0.25},
            {
                "name": "model/head.weight",
                "num_different": 2,
                "num_elements": 66,
                "max_abs": pytest.approx(0.5),
            },
        ],
        "others": ["weights", "optimizer"],
    }
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "model/scratch: float32[3] here, float32[4] there" in out
    assert "2 tensors differ, 25 are equal bit for bit" in out
    assert main([*command, "--weights", "--json"]) == 1
    assert difference(capsys)["others"] == ["weights"]


def test_a_damaged_checkpoint_is_not_compared(run_dir, capsys):
    path = damage(run_dir, 20)
    assert main(["checkpoint", "diff", str(run_dir), str(run_dir), "--other-step", "10"]) == 1
    assert f"DAMAGED: {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), (1, 0.0)),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 3.0]), (1, 2.0)),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 3.0]), (1, 2.0)),
        (torch.tensor([True, False]), torch.tensor([False, False]), (1, 1.0)),
        (torch.tensor(3), torch.tensor(-4), (1, 7.0)),
        (torch.zeros(0, 3), torch.zeros(0, 3), (0, 0.0)),
        (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16(), (2, 1.0)),
        (torch.tensor([1j]), torch.tensor([1 + 1j]), (1, 1.0)),
    ],
)
def test_differences_are_of_bits_and_distances_of_numbers(one, two, expected):
    assert compare_tensors("t", one, two) == Unequal("t", expected[0], one.numel(), expected[1])


def test_what_is_no_number_in_one_of_two_has_no_distance():
    found = compare_tensors("t", torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 5.0]))
    assert found.num_different == 2
    assert math.isnan(found.max_abs)


# --- best ------------------------------------------------------------------------------------
@pytest.fixture
def measured(run_dir: Path) -> Path:
    """Checkpoints of steps 10, 20 and 30; the loss is best at 15, then at 20."""
    save(run_dir, 30, build(1))
    losses = {10: 3.0, 15: 0.5, 20: 1.0, 29: None, 30: 2.0}
    metrics = [{"step": s, "loss": v, "user": {"top": s / 10}} for s, v in losses.items()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    values = [(10, {"error": 0.5}), (30, {"error": 0.9}), (30, {"error": 0.1, "value": 3})]
    journal = [{"at": 1.0, "evaluation": {"step": s, "values": v}} for s, v in values]
    (run_dir / "journal.jsonl").write_text("".join(json.dumps(j) + "\n" for j in journal))
    return run_dir


@pytest.mark.parametrize(
    ("metric", "mode", "step", "value"),
    [
        ("loss", "min", 20, 1.0),
        ("loss", "max", 10, 3.0),
        ("top", "max", 30, 3.0),
        ("evaluation/error", "min", 30, 0.1),
        ("evaluation/error", "max", 10, 0.5),
        ("evaluation", "min", 30, 3.0),
    ],
)
def test_the_best_checkpoint_is_found_by_any_metric(measured, metric, mode, step, value):
    path = str(measured / "checkpoints" / f"step-{step:08d}")
    expected = elastic.checkpoint.BestCheckpoint(step, path, value)
    assert elastic.checkpoint.best(str(measured), metric, mode) == expected


def test_a_damaged_checkpoint_is_not_the_best(measured):
    damage(measured, 20)
    best = elastic.checkpoint.best
    assert best(str(measured)).step == 30
    assert best(str(measured), verify=False).step == 20
    (measured / "checkpoints" / "step-00000020" / MANIFEST).write_text("{")
    assert best(str(measured), verify=False).step == 30


def test_best_says_what_is_missing(measured, tmp_path):
    best = elastic.checkpoint.best
    with pytest.raises(ValueError, match="has no published checkpoint"):
        best(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"no metric 'acc'; it has loss, step, top, evaluation/er"):
        best(str(measured), "acc")
    with pytest.raises(ValueError, match="mode must be 'min' or 'max', got 'least'"):
        best(str(measured), mode="least")  # type: ignore[arg-type]
    for step in (10, 20, 30):
        damage(measured, step)
    with pytest.raises(ValueError, match="all checkpoints with 'loss' are damaged, the best: /"):
        best(str(measured))


def test_best_is_a_command_too(measured, capsys):
    path = measured / "checkpoints" / "step-00000020"
    assert main(["checkpoint", "best", str(measured)]) == 0
    assert capsys.readouterr().out == f"step 20, loss 1: {path}\n"
    assert main(["checkpoint", "best", str(measured), "--mode", "max", "--json"]) == 0
    assert difference(capsys)["step"] == 10
    assert main(["checkpoint", "best", str(measured), "--metric", "acc"]) == 2


def test_finding_the_best_loads_neither_ray_nor_torch():
    code = "import sys, elastic; elastic.checkpoint.best; print({'ray', 'torch'} & {*sys.modules})"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "set()", done.stderr
