"""RunConfig: what it derives, what it refuses, and what it says then."""

import json
import re
from dataclasses import fields
from typing import Any

import pytest

from elastic.config import Checkpointing, FaultPolicy, Resources, RunConfig
from elastic.controller.settings import limits_of
from elastic.protocol.mesh import Parallel

SIZES = {"steps": 10, "global_batch": 32, "micro_batch": 8}


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{**SIZES, **changes})


def test_a_fixed_number_of_workers_is_both_min_and_max():
    c = config(workers=2)
    assert (c.min_workers, c.max_workers, c.num_microbatches) == (2, 2, 4)


def test_max_above_v_is_capped_with_a_warning():
    with pytest.warns(UserWarning, match="max 9 is above V = global_batch / micro_batch = 4"):
        c = config(workers=(2, 9))
    assert (c.min_workers, c.max_workers) == (2, 4)


def test_json_gives_an_equal_config_again_without_a_second_warning(recwarn):
    c = config(workers=[1, 3], detect_s=None, faults=FaultPolicy(max_nonfinite=2), storage="/runs")
    stored = {**json.loads(json.dumps(c.to_json())), "target": "m:C", "versions": {}}
    assert RunConfig.from_json(stored) == c
    assert not recwarn.list


def test_a_run_with_checkpoints_saves_every_ten_minutes_at_least():
    kinds = ({"storage": "/runs"}, {"checkpoint_every": 5}, {})
    assert [limits_of(config(**kind)).save_every_s for kind in kinds] == [600.0, 600.0, None]


def test_relative_storage_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config(storage="runs").storage == str(tmp_path / "runs")
    assert config(storage="s3://bucket/runs").storage == "s3://bucket/runs"


def test_there_is_room_for_what_is_to_come():
    assert len(fields(RunConfig)) <= 22


def test_a_group_s_settings_are_given_one_by_one_or_as_the_group():
    one_by_one = config(checkpoint_every=5, keep=[1, 10], cpus_per_worker=2, parallel="hsdp:4")
    assert one_by_one == config(
        checkpointing=Checkpointing(checkpoint_every=5, keep=(1, 10)),
        resources=Resources(cpus_per_worker=2),
        parallel=Parallel("hsdp", dp_shard=4),
    )
    with pytest.raises(ValueError, match=r"^checkpointing and keep are both given: put them into"):
        config(checkpointing=Checkpointing(), keep=(1, None))


def test_a_setting_that_is_none_and_one_that_is_missing_are_told():
    with pytest.raises(TypeError, match=r"^RunConfig has no setting 'worker': choose from workers"):
        config(worker=2)
    with pytest.raises(TypeError, match=r"^RunConfig needs micro_batch=\.\.\."):
        RunConfig(steps=1, global_batch=1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"micro_batch": 5},
            "global_batch=32 is not a multiple of micro_batch=5: choose a micro_batch that divides "
            "it, such as 4",
        ),
        ({"workers": (3, 2)}, "workers=3..2: min 3 is above max 2"),
        ({"workers": 5}, "min 5 is above V = global_batch / micro_batch = 4"),
        ({"workers": (0, 2)}, "workers (min) must be a whole number of at least 1, got 0"),
        ({"workers": (1, 2, 3)}, "workers must be a number or (min, max), got (1, 2, 3)"),
        ({"workers": "2"}, "workers must be a whole number of at least 1, got '2'"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": True}, "steps must be a whole number of at least 1, got True"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"seed": 2**63}, "seed must be below 2**63"),
        ({"standby": -1}, "standby must be a whole number of at least 0, got -1"),
        ({"eval_every": 0}, "eval_every must be a whole number of at least 1, got 0"),
        ({"clip_norm": 0}, "clip_norm must be a number above 0, or None, got 0"),
        ({"detect_s": float("inf")}, "detect_s must be a number above 0, or None, got inf"),
        ({"name": "a/b"}, "name='a/b' is no folder name"),
        ({"name": ".."}, "name='..' is no folder name"),
        ({"storage": ""}, "storage is empty"),
        (
            {"parallel": "tensor"},
            "parallel='tensor' is unknown: choose one of ddp, fsdp, fsdp-grad-op, hsdp:S",
        ),
        ({"reduction": "exact"}, "reduction='exact' is unknown: choose one of fast, bitwise"),
        ({"precision": "fp8"}, "precision='fp8' is unknown: choose one of fp32, bf16, fp16"),
        ({"device": "tpu"}, "device='tpu' is unknown: choose one of auto, cpu, cuda"),
        (
            {"parallel": "pp:2,fsdp"},
            "parallel='fsdp,pp:2' is not available yet: pp:S goes alone or with fsdp-grad-op, such "
            "as pp:2,fsdp-grad-op",
        ),
        ({"parallel": "fsdp,tp:2"}, "parallel='fsdp,tp:2' is not available yet"),
        ({"parallel": 4}, "parallel must be words or a Parallel, got 4"),
        ({"parallel": "hsdp:0"}, "parallel='hsdp:0': give hsdp:S, where S is the number of ranks"),
        (
            {"offload": True},
            "offload=True moves shards to host memory, and parallel='ddp' has none",
        ),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number of at least 1"),
        ({"keep": (1,)}, "keep must be (the last so many, every so many steps)"),
        ({"keep": (1, 0)}, "keep (every) must be a whole number of at least 1"),
        (
            {"offload": True, "parallel": "fsdp-grad-op,pp:2"},
            "offload=True moves shards to host memory, and the stages of parallel=",
        ),
        ({"on_storage_error": "ignore"}, "on_storage_error='ignore' is unknown"),
    ],
)
def test_settings_that_cannot_work_are_one_line_that_names_them(changes, says):
    with pytest.raises(ValueError, match=r".") as caught:
        config(**changes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_strategy_that_is_none_is_offered_only_those_that_there_are():
    with pytest.raises(ValueError, match=r"unknown: choose one of (.*)") as caught:
        config(parallel="tensor")
    for word in str(caught.value).partition("one of ")[2].replace(":S", ":2").split(", "):
        config(parallel=word)


def test_fault_policies_are_checked():
    assert FaultPolicy.of({"verify_every": 10}) == FaultPolicy(verify_every=10)
    for values, said in (
        ({"verify_every": 0}, "faults.verify_every must be a whole number of at least 1, got 0"),
        ({"replace_stragglers": 1}, "faults.replace_stragglers must be a number above 1"),
        ({"replace_stragglers": True}, "faults.replace_stragglers must be a number above 1"),
        ({"validate": 0}, "faults.validate must be True or False, got 0"),
        ({"verify": 1}, "faults.verify is unknown: choose from max_nonfinite, verify_every, "),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            FaultPolicy.of(values)
