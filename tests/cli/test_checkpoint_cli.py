"""`elastic checkpoint ...` on a checkpoint made in this process."""

import shutil

import pytest
import torch
from torch import nn

from elastic.cli.app import main
from elastic.cli.checkpoint import COLUMNS
from elastic.protocol.manifest import MANIFEST
from elastic.store.catalogue import file_name
from tests.workers.checkpoint_samples import save
from workers.train_state.digest import weights_sha256
from workers.train_state.train_state import TrainState

WORLD_SIZE = 3


def replica(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    named = dict(model.named_parameters())
    return TrainState(model, named, optimizer, None, clip_norm=None, max_nonfinite=1)


@pytest.fixture
def run_dir(tmp_path):
    save(tmp_path, 10, replica(0))
    save(tmp_path, 20, replica(1))
    return tmp_path


def test_ls_show_and_verify_tell_what_is_there(run_dir, capsys):
    assert main(["checkpoint", "ls", str(run_dir)]) == 0
    assert "good" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(run_dir), "--step", "10"]) == 0
    shown = capsys.readouterr().out
    assert "model/0.weight" in shown
    assert "5x7" in shown
    assert main(["checkpoint", "verify", str(run_dir)]) == 0
    assert capsys.readouterr().out == "step 10: good\nstep 20: good\n"


def test_ls_cuts_nothing_off_in_a_narrow_terminal(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["checkpoint", "ls", str(run_dir)]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split() == list(COLUMNS)
    assert [row.split()[0] for row in rows] == ["10", "20"]


def test_hash_is_that_of_the_model(run_dir, capsys):
    assert main(["checkpoint", "hash", str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == weights_sha256(replica(1).model)


def folder_of(run_dir, step):
    return f"{run_dir}/checkpoints/step-{step:08d}"


def test_a_checkpoints_own_folder_means_that_checkpoint(run_dir, capsys):
    own = folder_of(run_dir, 10)
    assert main(["checkpoint", "hash", own + "/"]) == 0
    assert capsys.readouterr().out.strip() == weights_sha256(replica(0).model)
    assert main(["checkpoint", "verify", own]) == 0
    assert capsys.readouterr().out == "step 10: good\n"
    assert main(["checkpoint", "show", own]) == 0
    assert "step 10, " in capsys.readouterr().out
    assert main(["checkpoint", "ls", own]) == 0
    assert capsys.readouterr().out.count("good") == 1
    assert main(["checkpoint", "diff", own, str(run_dir), "--other-step", "10"]) == 0


def test_a_checkpoint_that_was_moved_out_of_its_run_is_one_still(run_dir, tmp_path, capsys):
    shutil.copytree(folder_of(run_dir, 10), tmp_path / "elsewhere" / "step-00000010")
    assert main(["checkpoint", "verify", str(tmp_path / "elsewhere" / "step-00000010")]) == 0
    assert capsys.readouterr().out == "step 10: good\n"


def test_a_run_may_be_named_like_a_checkpoint(tmp_path, capsys):
    save(tmp_path / "step-00000010", 20, replica(0))
    assert main(["checkpoint", "verify", str(tmp_path / "step-00000010")]) == 0
    assert capsys.readouterr().out == "step 20: good\n"


@pytest.mark.parametrize(
    ("step", "options", "says"),
    [
        (10, ["--step", "20"], "is the checkpoint of step 10; leave out --step 20"),
        (30, [], "there is no checkpoint of step 30; there are [10, 20]"),
    ],
)
def test_what_a_checkpoints_own_folder_cannot_mean_is_one_line(
    run_dir, capsys, step, options, says
):
    assert main(["checkpoint", "show", folder_of(run_dir, step), *options]) == 2
    assert says in capsys.readouterr().err


def test_verify_names_the_damage_and_exits_with_1(run_dir, capsys):
    folder = run_dir / "checkpoints" / "step-00000020"
    path = folder / file_name(1, 1, WORLD_SIZE)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["checkpoint", "verify", str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert "step 10: good" in out
    assert f"step 20: DAMAGED: {path}" in out
    assert main(["checkpoint", "hash", str(run_dir), "--step", "20"]) == 1
    (folder / MANIFEST).write_text("{")
    assert main(["checkpoint", "ls", str(run_dir)]) == 0
    assert "DAMAGED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls"], "nothing does not exist"),
        (["verify"], "nothing does not exist"),
        (["show", "--step", "3"], "there is no checkpoint of step 3"),
    ],
)
def test_wrong_input_is_one_line(run_dir, tmp_path, capsys, arguments, said):
    place = str(run_dir) if "--step" in arguments else str(tmp_path / "nothing")
    command = ["checkpoint", arguments[0], place, *arguments[1:]]
    assert main(command) == 2
    assert said in capsys.readouterr().err
