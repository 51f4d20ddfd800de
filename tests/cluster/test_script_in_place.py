"""`elastic run train.py`: a script of Ray Train's as it is, on Ray, whose
rank 0 is killed in the middle, goes on in place."""

import inspect
import json
import os
import signal
import time

import pytest
import torch

from tests.cluster.live import begin, environment
from tests.scripts import counting

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
MAIN = """

import sys

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

result = TorchTrainer(
    count_uses,
    train_loop_config={"place": sys.argv[1], "sleep_s": 0.1},
    scaling_config=ScalingConfig(num_workers=3),
    run_config=RunConfig(name="run", storage_path=sys.argv[1]),
).fit()
print("epoch", result.metrics, "returned", result.return_value)
"""


def test_a_script_of_ray_train_goes_on_after_a_loss(shared_head, ray_temp, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(inspect.getsource(counting) + MAIN)
    env = environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}
    process = begin(env, "-m", "elastic", "run", script, tmp_path)
    deadline = time.monotonic() + 120
    while len(reports := read(tmp_path / "run" / "reports.jsonl")) < 1:
        assert time.monotonic() < deadline, process.communicate(timeout=5)
        time.sleep(0.05)  # polling, bounded by the deadline
    pids = {int(file.name.removeprefix("called-")) for file in tmp_path.glob("called-*")}
    assert reports[0]["metrics"]["pid"] in pids
    os.kill(reports[0]["metrics"]["pid"], signal.SIGKILL)  # rank 0's, who reports
    out, err = process.communicate(timeout=120)
    assert (process.returncode, "returned counted" in out) == (0, True), (out, err)
    assert "count_uses runs at level 1, commit in place, on 3 workers (at least 2)" in err
    assert [file.read_text() for file in tmp_path.glob("called-*")] == ["x"] * 3
    first, second = (torch.load(file) for file in sorted(tmp_path.glob("end-*.pt")))
    assert first["uses"].tolist() == [counting.EPOCHS] * counting.SAMPLES
    assert all(torch.equal(torch.as_tensor(first[k]), torch.as_tensor(second[k])) for k in first)
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (told["level"], told["level_reason"]) == (1, "")
    lines = read(tmp_path / "run" / "metrics.jsonl")
    num_steps = counting.SAMPLES // counting.BATCH // 3 * counting.EPOCHS
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    assert {line["world_size"] for line in lines} == {2, 3}
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    shared_head.assert_empty()


def read(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
