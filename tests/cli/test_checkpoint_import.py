"""`elastic checkpoint import`: a run to come begins with weights that others wrote."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from elastic.cli.app import main
from elastic.driver.target import load_target
from elastic.store.catalogue import PINNED, Catalogue
from elastic.store.files import open_folder
from tests.cli.test_checkpoint_export import assert_equal
from tests.workers.checkpoint_samples import build, save
from workers.checkpoint.importing import ImportSettings
from workers.checkpoint.load import checkpoint_sha256, read_tensors
from workers.parallel.ddp import build_replica
from workers.train_state.digest import weights_sha256
from workers.train_state.train_state import TrainState

JOB = "tests.workers.checkpoint_samples:Job"


def start(run_dir: Path, **arguments) -> TrainState:
    """What a run's first worker holds when it has loaded the checkpoint."""
    catalogue = Catalogue(open_folder(str(run_dir)).at("checkpoints"))
    workload = load_target(JOB, arguments).workload
    replica = build_replica(workload, ImportSettings(99), torch.device("cpu"))
    manifest = catalogue.manifest(0)
    replica.restore(manifest.state, read_tensors(catalogue, manifest))
    return replica


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
def test_what_was_exported_is_imported_to_the_same_bits(tmp_path, form, capsys):
    source = build(3)
    save(tmp_path / "old", 5, source)
    out, new = tmp_path / "out", tmp_path / "new"
    assert main(["checkpoint", "export", str(tmp_path / "old"), str(out), "--to", form]) == 0
    command = ["checkpoint", "import", str(out), str(new), JOB, "--from", form]
    assert main([*command, "--trust"]) == 0
    catalogue = Catalogue(open_folder(str(new)).at("checkpoints"))
    assert checkpoint_sha256(catalogue) == weights_sha256(source.model)
    assert catalogue.steps() == [0]
    assert catalogue.manifest(0).about == {
        "imported_from": str(out),
        "format": form,
        "seed": 0,
        PINNED: True,
    }
    assert sum(catalogue.verify(0)) == catalogue.manifest(0).size_bytes
    started = start(new)
    assert started.step == 0
    assert weights_sha256(started.model) == weights_sha256(source.model)
    state, expected = started.optimizer.state_dict(), source.optimizer.state_dict()
    assert_equal(state["state"], {} if form == "safetensors" else expected["state"])
    assert [(g["weight_decay"], g["lr"]) for g in state["param_groups"]] == [
        (0.5, 0.25),
        (1e-2, 3.5e-4),
    ]
    said = capsys.readouterr().err
    if form == "safetensors":
        assert "'_extra_state' is not in the source and keeps its initial value" in said
    else:
        assert f"optimizer state of {len(expected['state'])} parameters" in said
        assert started.model.calls == source.model.calls


def test_shards_with_an_index_are_read(tmp_path):
    save(tmp_path / "old", 5, build(3))
    out, new = tmp_path / "out", tmp_path / "new"
    command = ["checkpoint", "export", str(tmp_path / "old"), str(out), "--to", "safetensors"]
    assert main([*command, "--max-shard-size", "100"]) == 0
    assert main(["checkpoint", "import", str(out), str(new), JOB, "--from", "safetensors"]) == 0
    assert weights_sha256(start(new).model) == weights_sha256(build(3).model)
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["nothing"] = "model-00001-of-00004.safetensors"
    path.write_text(json.dumps(index))
    command = ["checkpoint", "import", str(out), str(tmp_path / "b"), JOB, "--from", "safetensors"]
    assert main(command) == 2


def test_foreign_files_in_usual_forms_are_read(tmp_path):
    linear = nn.Linear(3, 2)
    state = linear.state_dict()
    forms = {
        "plain": state,
        "lightning": {"state_dict": state, "epoch": 3},
        "ddp": {f"module.{n}": t for n, t in state.items()},
        "compiled": {"model_state_dict": {f"_orig_mod.{n}": t for n, t in state.items()}},
        "half": {n: t.bfloat16() for n, t in state.items()},
    }
    for name, content in forms.items():
        torch.save(content, tmp_path / f"{name}.pt")
        command = ["checkpoint", "import", str(tmp_path / f"{name}.pt"), str(tmp_path / name), JOB]
        assert main([*command, "--from", "torch", "--set", "width=3"]) == 0
        started = start(tmp_path / name, width=3)
        expected = linear.bfloat16().float() if name == "half" else linear
        assert weights_sha256(started.model) == weights_sha256(expected)
    torch.save(linear.double().state_dict(), tmp_path / "double.pt")
    dcp.save(nn.Linear(3, 2).state_dict(), checkpoint_id=tmp_path / "bare", no_dist=True)
    command = ["checkpoint", "import", str(tmp_path / "bare"), str(tmp_path / "c"), JOB]
    assert main([*command, "--from", "dcp", "--trust", "--set", "width=3"]) == 0


class Stranger:
    """Not what weights_only allows."""


def test_what_does_not_fit_is_one_line_and_writes_nothing(tmp_path, capsys):
    state = nn.Linear(3, 2).state_dict()
    adam = build(1)
    contents = {
        "lacks": {"weight": state["weight"]},
        "other": {**state, "x": torch.zeros(1), "y": torch.zeros(1)},
        "shape": {**state, "weight": torch.zeros(3, 2)},
        "double": {n: t.double() for n, t in state.items()},
        "stranger": {**state, "z": Stranger()},
        "list": [1],
        "odd": {"model": adam.model.state_dict(), "optimizer": adam.optimizer.state_dict()},
    }
    said = {
        "lacks": "it lacks 1: bias; --partial keeps initial values instead",
        "other": "the model lacks 2: x, y; --partial",
        "shape": "'weight' is [3, 2] in",
        "double": "'weight' is torch.float64 in",
        "stranger": "cannot be read with torch.load(weights_only=True)",
        "list": "holds a list, not a state dict",
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / name)
    command = ["checkpoint", "import"]
    for name, message in said.items():
        source = [str(tmp_path / name), str(tmp_path / "new"), JOB, "--from", "torch"]
        assert main([*command, *source, "--set", "width=3"]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.strip().splitlines()[-1].startswith("elastic: ")
    source = [str(tmp_path / "odd"), str(tmp_path / "new"), JOB, "--from", "torch"]
    assert main([*command, *source, "--set", "optimizer=RMSprop"]) == 2
    assert "RMSprop keeps square_avg, step; --weights-only" in capsys.readouterr().err
    source[-1] = "dcp"
    assert main([*command, *source]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    source[-1] = "torch"
    assert main([*command, *source, "--set", "optimizer=RMSprop", "--weights-only"]) == 0
    assert main([*command, *source]) == 2
    assert "holds a run or checkpoints already" in capsys.readouterr().err


def test_partial_keeps_initial_values_and_ignores_strangers(tmp_path, capsys):
    save_file({"weight": torch.ones(2, 3), "head": torch.ones(1)}, tmp_path / "w.safetensors")
    command = ["checkpoint", "import", str(tmp_path / "w.safetensors"), str(tmp_path / "new"), JOB]
    command += ["--from", "safetensors", "--set", "width=3", "--seed", "4"]
    assert main(command) == 2
    assert main([*command, "--partial"]) == 0
    assert "it lacks 1: bias" in capsys.readouterr().err
    started = start(tmp_path / "new", width=3)
    workload = load_target(JOB, {"width": 3}).workload
    initial = build_replica(workload, ImportSettings(4), torch.device("cpu")).model
    assert torch.equal(started.model.bias, initial.bias)
    assert torch.equal(started.model.weight, torch.ones(2, 3))


def test_tied_weights_that_differ_in_the_source_are_refused(tmp_path, capsys):
    state = build(1).model.state_dict()
    state["table.weight"] = state["table.weight"] + 1
    torch.save(state, tmp_path / "w.pt")
    command = ["checkpoint", "import", str(tmp_path / "w.pt"), str(tmp_path / "new"), JOB]
    assert main([*command, "--from", "torch"]) == 2
    assert "are tied here and differ in source" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["positions", "names"])
def test_what_torch_alone_wrote_as_dcp_is_read(tmp_path, form):
    source = build(3)
    source.model.empty.grad = None
    del source.optimizer.state[source.model.scale]  # a gap in the positions
    if form == "names":
        model, optimizer = get_state_dict(source.model, source.optimizer)
    else:
        model, optimizer = source.model.state_dict(), source.optimizer.state_dict()
    state = {"model": model, "optimizer": optimizer, "more": {"epoch": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    command = ["checkpoint", "import", str(tmp_path / "dcp"), str(tmp_path / "new"), JOB]
    assert main([*command, "--from", "dcp", "--trust"]) == 0
    started = start(tmp_path / "new")
    assert weights_sha256(started.model) == weights_sha256(source.model)
    assert_equal(started.optimizer.state_dict()["state"], source.optimizer.state_dict()["state"])


def test_weights_that_are_not_what_torch_wrote_are_refused(tmp_path, capsys):
    path = tmp_path / "weights.pt"
    linear = nn.Linear(3, 2)
    torch.save(linear.state_dict(), path)
    content = bytearray(path.read_bytes())
    content[content.index(linear.weight.detach().numpy().tobytes()) + 1] ^= 1
    path.write_bytes(content)
    command = ["checkpoint", "import", str(path), str(tmp_path / "new"), JOB, "--from", "torch"]
    assert main([*command, "--set", "width=3"]) == 2
    assert f"{path} is damaged: the checksum of 'weights/data/" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
def test_a_source_that_is_no_such_thing_is_one_line(tmp_path, form, capsys):
    (tmp_path / "garbage").write_bytes(b"\x00garbage" * 100)
    for source in ("garbage", "nothing"):
        command = ["checkpoint", "import", str(tmp_path / source), str(tmp_path / "new"), JOB]
        assert main([*command, "--from", form, "--trust"]) == 2
        err = capsys.readouterr().err.strip().splitlines()
        assert err[-1].startswith("elastic: ")
        assert str(tmp_path / source) in err[-1]
    assert not (tmp_path / "new").exists()
