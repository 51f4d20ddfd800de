"""`elastic checkpoint export`: each format, read by its own library alone."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from elastic.cli.app import main
from tests.workers.checkpoint_samples import Odd, build, damage, save
from workers.train_state.digest import weights_sha256
from workers.train_state.serialization import capture


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    save(tmp_path / "run", 10, build(1))
    save(tmp_path / "run", 20, build(2))
    return tmp_path / "run"


def assert_equal(found, expected):
    """Trees of values and tensors, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    else:
        assert found == expected


def test_dcp_alone_puts_it_into_a_model_and_an_optimizer(run_dir, tmp_path):
    assert main(["checkpoint", "export", str(run_dir), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    target, source = build(7), build(2)
    model_state, optimizer_state = get_state_dict(target.model, target.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_state_dict(
        target.model,
        target.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert state["step"] == 20
    assert weights_sha256(target.model) == weights_sha256(source.model)
    assert target.model.calls == source.model.calls
    assert_equal(target.optimizer.state_dict(), source.optimizer.state_dict())


def test_dcp_without_state_for_an_unused_parameter_says_how_to_load_it(tmp_path, capsys):
    source = build(2)
    del source.optimizer.state[source.model.scale]
    save(tmp_path / "run", 10, source)
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "dcp"), "--to", "dcp"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "1 parameters never had a gradient and have no optimizer state" in said
    assert "'scale'; load with DefaultLoadPlanner(allow_partial_load=True)" in said
    target = build(7)
    model_state, optimizer_state = get_state_dict(target.model, target.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path / "dcp", planner=planner)
    target.model.load_state_dict(state["model"])
    assert weights_sha256(target.model) == weights_sha256(source.model)


def test_torch_load_alone_reads_it_with_weights_only(run_dir, tmp_path, capsys):
    path = tmp_path / "all.pt"
    command = ["checkpoint", "export", str(run_dir), str(path), "--to", "torch", "--step", "10"]
    assert main(command) == 0
    found, source = torch.load(path, weights_only=True), build(1)
    assert_equal(found["model"], source.model.state_dict())
    assert_equal(found["optimizer"], source.optimizer.state_dict())
    assert_equal(found["scheduler"], source.scheduler.state_dict())
    assert (found["step"], set(found)) == (10, {"model", "optimizer", "scheduler", "step"})
    target = build(7)
    target.model.load_state_dict(found["model"])
    target.optimizer.load_state_dict(found["optimizer"])
    header, tensors = capture(target.model, target.optimizer, None)
    expected_header, expected = capture(source.model, source.optimizer, None)
    assert header == expected_header
    for name in ("model/scratch", "model/norm.num_batches_tracked"):
        tensors.pop(name), expected.pop(name)
    assert_equal(tensors, expected)
    assert "left out" not in capsys.readouterr().err


def test_safetensors_alone_reads_the_weights(run_dir, tmp_path, capsys):
    folder = tmp_path / "hf"
    assert main(["checkpoint", "export", str(run_dir), str(folder), "--to", "safetensors"]) == 0
    said = capsys.readouterr().err
    assert "'table.weight' is left out: it is tied to 'head.weight'" in said
    assert "extra state is left out" in said
    assert [p.name for p in folder.iterdir()] == ["model.safetensors"]
    state = build(2).model.state_dict()
    del state["table.weight"], state["_extra_state"]
    assert_equal(load_file(folder / "model.safetensors"), state)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "table.weight": "head.weight"}
    target = Odd()
    missing = target.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert missing == (["_extra_state", "table.weight"], [])
    assert weights_sha256(target) == weights_sha256(build(2).model)


def test_large_weights_are_sharded_with_an_index(run_dir, tmp_path):
    folder = tmp_path / "hf"
    command = ["checkpoint", "export", str(run_dir), str(folder), "--to", "safetensors"]
    assert main([*command, "--max-shard-size", "100"]) == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    state = build(2).model.state_dict()
    del state["table.weight"], state["_extra_state"]
    assert index["metadata"] == {
        "total_size": sum(t.nbytes for t in state.values()),
        "tied_weights": {"table.weight": "head.weight"},
    }
    files = sorted(set(index["weight_map"].values()))
    assert sorted(p.name for p in folder.iterdir()) == [*files, "model.safetensors.index.json"]
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(4)]
    loaded = {file: load_file(folder / file) for file in files}
    assert_equal({n: loaded[file][n] for n, file in index["weight_map"].items()}, state)
    assert sum(map(len, loaded.values())) == len(state)
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in loaded.values()]
    assert all(s <= 100 or len(loaded[f]) == 1 for s, f in zip(sizes, files, strict=True))


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
def test_damage_is_named_and_nothing_is_left(run_dir, tmp_path, capsys, form):
    path = damage(run_dir, 20)
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(run_dir), str(out), "--to", form]) == 1
    assert f"DAMAGED: {path}: bytes 0.." in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_what_is_there_is_replaced_only_if_it_is_an_export_and_asked_for(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["checkpoint", "export", str(run_dir), str(out), "--to"]
    out.mkdir()
    assert main([*command, "safetensors"]) == 0
    assert main([*command, "safetensors"]) == 2
    assert "is not empty; give another path, or --overwrite" in capsys.readouterr().err
    assert main([*command, "torch", "--overwrite"]) == 2
    assert main([*command, "safetensors", "--step", "10", "--overwrite"]) == 0
    assert torch.equal(
        load_file(out / "model.safetensors")["head.weight"], build(1).model.head.weight
    )
    (out / "model.safetensors").rename(out / "mine")
    assert main([*command, "dcp", "--overwrite"]) == 2
    assert [p.name for p in out.iterdir()] == ["mine"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]
    assert main([*command, "safetensors", "--max-shard-size", "much"]) == 2


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
def test_a_place_that_cannot_be_written_is_one_line(run_dir, tmp_path, capsys, form):
    (tmp_path / "file").write_text("mine")
    out = str(tmp_path / "file" / "out")
    assert main(["checkpoint", "export", str(run_dir), out, "--to", form]) == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith(f"elastic: {out} cannot be written: ")
    assert (tmp_path / "file").read_text() == "mine"
