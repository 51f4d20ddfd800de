"""`elastic run train.py`: a script of Ray Train's as it is, on Ray, whose
rank 0 is killed in the middle, goes on in place; also if the controller is killed with it."""

import inspect
import json
import os
import random
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
    train_loop_config={"place": sys.argv[1], "sleep_s": 0.1, **json.loads(sys.argv[2])},
    scaling_config=ScalingConfig(num_workers=3),
    run_config=RunConfig(name="run", storage_path=sys.argv[1]),
).fit()
print("epoch", result.metrics, "returned", result.return_value)
"""
STRIKES, EPOCHS = 3, 40
NUM_STEPS = counting.SAMPLES // counting.BATCH // 3
"""Of an epoch."""


@pytest.fixture
def run(shared_head, ray_temp, tmp_path):
    """The script, under way."""
    script = tmp_path / "train.py"
    script.write_text(inspect.getsource(counting) + MAIN)
    env = environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}

    def begun(**settings):
        words = ("-m", "elastic", "run", script, tmp_path, json.dumps(settings))
        return begin(env, *words)

    return begun


def test_a_script_of_ray_train_goes_on_after_a_loss(shared_head, run, tmp_path):
    process = run()
    reports = wait_for(process, lambda: read(tmp_path / "run" / "reports.jsonl"))
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
    num_steps = NUM_STEPS * counting.EPOCHS
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    assert {line["world_size"] for line in lines} == {2, 3}
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    shared_head.assert_empty()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reports_and_steps_have_no_gap_though_controller_and_rank_0_are_killed_together(
    shared_head, run, tmp_path
):
    """Again and again, once all three ranks are there; each time a new one enters at a report."""
    process, directory, draw = run(saves=True, epochs=EPOCHS), tmp_path / "run", random.Random(4)
    struck: set[int] = set()

    def whole() -> dict | None:
        found = status(directory)
        pids = {worker["pid"] for worker in found.get("workers", [])} if found else set()
        is_whole = len(pids) == 3 and not struck & {*pids, found["controller"]["pid"]}
        return found if is_whole and found["phase"] == "running" else None

    for _ in range(STRIKES):
        num = len(read(directory / "reports.jsonl"))
        wait_for(process, lambda n=num: len(read(directory / "reports.jsonl")) > n and whole())
        time.sleep(draw.uniform(0.0, 1.0))  # the instant is what is tried
        found = wait_for(process, whole)
        pids = [found["controller"]["pid"], found["workers"][0]["pid"]]
        draw.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        struck |= set(pids)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, "returned counted" in out) == (0, True), (out, err)
    ends = [torch.load(file) for file in sorted(tmp_path.glob("end-*.pt"))]
    for end in ends:
        assert end["uses"].tolist() == [EPOCHS] * counting.SAMPLES
        assert end["steps"] == end["of_optimizer"]
        assert all(torch.equal(torch.as_tensor(end[k]), torch.as_tensor(ends[0][k])) for k in end)
    steps = [line["step"] for line in read(directory / "metrics.jsonl")]
    assert steps == list(range(1, ends[0]["steps"] + 1))
    assert len(steps) >= NUM_STEPS * EPOCHS, (
        "more where it was called again on two: as rank 0 saved"
    )
    assert [line["metrics"]["epoch"] for line in read(directory / "reports.jsonl")] == [
        *range(EPOCHS)
    ]
    told = json.loads((directory / "result.json").read_text())
    assert (told["level"], told["lost_steps"]) == (1, 0)
    assert len(told["recoveries"]) >= STRIKES
    shared_head.assert_empty()


def wait_for(process, condition):
    """What it gives, once it is true."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, process.communicate(timeout=5)
        time.sleep(0.05)  # polling, bounded by the deadline
    return found


def status(directory) -> dict | None:
    file = directory / "status.json"
    return json.loads(file.read_text()) if file.exists() else None


def read(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
