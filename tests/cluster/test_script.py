"""`elastic run train.py` and `elastic torchrun train.py`: scripts as they are, on Ray, whose rank 0
is killed."""

import inspect
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from elastic.protocol.errors import WrongInput
from elastic.store.files import open_folder, place_of
from elastic.store.journal import read_lines
from tests.cluster.fork_server import Forked
from tests.cluster.live import begin, environment
from tests.object_store import uri
from tests.scripts import jobs, torchrun_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SCRIPT = """import os, sys, tempfile, time
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

EPOCHS = 8

{learn}
result = TorchTrainer(
    learn,
    train_loop_config={{"sleep_s": float(sys.argv[2])}},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="run", storage_path=sys.argv[1]),
).fit()
print("epoch", result.metrics["epoch"], "returned", result.return_value)
"""


def test_a_script_of_ray_train_survives_the_loss_of_rank_0_as_it_is(
    shared_head, ray_temp, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(learn=inspect.getsource(jobs.learn)))

    def run(place, sleep_s: float) -> Forked:
        env = environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}
        return begin(env, "-m", "elastic", "run", script, place, sleep_s)

    def reports(place) -> list[dict]:
        file = place / "run" / "reports.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def weights(place) -> torch.Tensor:
        name = reports(place)[-1]["checkpoint"]
        return torch.load(place / "run" / name / "state.pt")["weights"]

    calm, hit = tmp_path / "calm", tmp_path / "hit"
    out, err = (process := run(calm, 0.0)).communicate(timeout=120)
    assert (process.returncode, "epoch 7 returned learned" in out) == (0, True), (out, err)
    result = json.loads((calm / "run" / "result.json").read_text())
    said = "nothing is trained in DistributedDataParallel" in result["level_reason"]
    assert (result["level"], said) == (0, True)
    assert "learn runs at level 1, commit in place, on 2 workers (at least 1)" in err

    process = run(hit, 0.1)
    deadline = time.monotonic() + 120
    while not (done := [r for r in reports(hit) if r["checkpoint"]]):
        assert time.monotonic() < deadline, process.communicate(timeout=5)
        time.sleep(0.05)  # polling, bounded by the deadline
    os.kill(done[0]["metrics"]["pids"][0], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, "epoch 7 returned learned" in out) == (0, True), (out, err)
    assert torch.equal(weights(hit), weights(calm))
    epochs = [r["metrics"]["epoch"] for r in reports(hit) if r["checkpoint"]]
    assert epochs == list(range(jobs.EPOCHS)), "a report that has returned is not done again"
    survivor = done[0]["metrics"]["pids"][1]
    assert survivor in reports(hit)[-1]["metrics"]["pids"], "its process was kept"
    shared_head.assert_empty()


def test_a_script_that_torchrun_starts_survives_the_loss_of_rank_0_as_it_is(
    shared_head, ray_temp, tmp_path
):
    folder = tmp_path / "code"
    folder.mkdir()
    shutil.copy(torchrun_job.__file__, folder / "train.py")

    def run(name: str, *arguments: str) -> tuple[Path, Forked]:
        place = tmp_path / name
        place.mkdir()
        words = ["torchrun", "--nproc-per-node", 2, "--log-dir", "logs", "--rdzv-id", "run"]
        words += [folder / "train.py", *arguments]
        env = environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}
        return place, begin(env, "-m", "elastic", *words, folder=place)

    def epochs(place: Path) -> list[dict]:
        file = place / "epochs.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    calm, process = run("calm")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    assert sorted(out.splitlines()) == [f"rank {rank} of 2 has finished" for rank in (0, 1)]
    assert "train.py runs at level 1, commit in place, on 2 workers (at least 1)" in err

    hit, process = run("hit", "--sleep-s", "0.1")
    deadline = time.monotonic() + 120
    while not (done := epochs(hit)):
        assert time.monotonic() < deadline, process.communicate(timeout=5)
        time.sleep(0.05)  # polling, bounded by the deadline
    os.kill(done[0]["pids"][0], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    states = [torch.load(place / "state.pt")["model"]["weight"] for place in (hit, calm)]
    assert torch.equal(*states)
    found = epochs(hit)
    assert [line["epoch"] for line in found] == list(range(6)), "its own file was gone on from"
    assert done[0]["pids"][1] in found[-1]["pids"], "its process was kept"
    result = json.loads((hit / "logs" / "run" / "result.json").read_text())
    assert (result["level"], len(result["recoveries"])) == (0, 1)
    assert "no DataLoader" in result["level_reason"]
    shared_head.assert_empty()


@pytest.mark.slow
def test_a_script_that_is_interrupted_ends_with_its_next_report_and_goes_on_if_started_again(
    shared_head, ray_temp, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(learn=inspect.getsource(jobs.learn)))

    def run(name: str, sleep_s: float) -> Forked:
        words = ["-m", "elastic", "run", script, tmp_path / name, sleep_s]
        return begin(environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}, *words)

    def checkpoints(name: str) -> list[dict]:
        file = tmp_path / name / "run" / "reports.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if line["checkpoint"]]

    def weights(name: str) -> torch.Tensor:
        newest = checkpoints(name)[-1]["checkpoint"]
        return torch.load(tmp_path / name / "run" / newest / "state.pt")["weights"]

    process = run("hit", 0.1)
    deadline = time.monotonic() + 120
    while not checkpoints("hit"):
        assert time.monotonic() < deadline, process.communicate(timeout=5)
        time.sleep(0.05)  # polling, bounded by the deadline
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, (out, err)
    assert "Traceback" not in err
    result = json.loads((tmp_path / "hit" / "run" / "result.json").read_text())
    done = len(checkpoints("hit"))
    assert (result["outcome"], result["steps"]) == ("stopped", done)
    assert done < jobs.EPOCHS
    for name in ("hit", "calm"):
        out, err = (process := run(name, 0.0)).communicate(timeout=120)
        assert (process.returncode, "epoch 7 returned learned" in out) == (0, True), (out, err)
    assert [line["metrics"]["epoch"] for line in checkpoints("hit")] == [*range(jobs.EPOCHS)]
    assert torch.equal(weights("hit"), weights("calm"))


@pytest.mark.slow
def test_a_script_whose_run_directory_is_in_a_bucket_survives_the_loss_of_rank_0(
    s3, s3_server, ray_temp, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(learn=inspect.getsource(jobs.learn)))
    found: list[list[int]] = []
    last: list[dict] = []
    for is_hit in (False, True):
        storage = uri(s3_server.new_bucket(), "runs", s3.port)
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic", "run", script, storage, "0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(ray_temp),
        )
        deadline = time.monotonic() + 120
        while is_hit and not (done := bucket_reports(storage)):
            assert time.monotonic() < deadline, process.communicate(timeout=5)
            time.sleep(0.1)  # polling, bounded by the deadline
        if is_hit:
            os.kill(done[0]["metrics"]["pids"][0], signal.SIGKILL)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, "epoch 7 returned learned" in out) == (0, True), (out, err)
        folder = open_folder(place_of(storage, "run"))
        lines = [line for line in read_lines(folder, "reports.jsonl") if line["checkpoint"]]
        found.append([line["metrics"]["epoch"] for line in lines])
        with folder.filesystem.open_input_file(
            f"{folder.path}/{lines[-1]['checkpoint']}/state.pt"
        ) as file:
            last.append(torch.load(io.BytesIO(file.read())))
    assert found == [[*range(jobs.EPOCHS)]] * 2
    assert torch.equal(last[0]["weights"], last[1]["weights"])


def bucket_reports(storage: str) -> list[dict]:
    try:
        folder = open_folder(place_of(storage, "run"))
        return [line for line in read_lines(folder, "reports.jsonl") if line["checkpoint"]]
    except (OSError, WrongInput):
        return []  # it has not begun
