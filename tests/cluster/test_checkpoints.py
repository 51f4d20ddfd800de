"""Checkpoints of real runs: resumed by the same command, whatever was killed or damaged."""

import contextlib
import os
import signal
import time

import pytest

from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.cluster.live import JOBS, assert_complete, environment, leftovers, python
from workers.checkpoint.load import checkpoint_sha256

pytestmark = pytest.mark.cluster

STEPS, EVERY = 60, 10
OPTIONS = {"steps": STEPS, "checkpoint_every": EVERY, "set": ["sleep=0.08"]}


def catalogue(run) -> Catalogue:
    return Catalogue(open_folder(str(run.directory)).at("checkpoints"))


def kill_everything(run, machine) -> int:
    """SIGKILL of every process of a run and of its Ray; the step it stood at."""
    status = run.status()
    machine.crash()
    pids = [w["pid"] for w in (*status["workers"], *status["standby"]) if w["pid"]]
    for pid in (status["controller"]["pid"], *pids):
        with contextlib.suppress(ProcessLookupError):  # workers end without their controller
            os.kill(pid, signal.SIGKILL)
    run.process.kill()
    run.process.wait(30)
    deadline = time.monotonic() + 20
    while leftovers(pids) and time.monotonic() < deadline:
        time.sleep(0.05)  # polling, bounded by the deadline
    assert leftovers(pids) == []
    return status["step"]


def is_between_saves(status) -> bool:
    return 2 < status["step"] % EVERY < 7 and (status.get("committed_checkpoint") or 0) >= 2 * EVERY


def assert_equals(run, end, expected) -> None:
    sha256, samples = expected
    assert end["status"] == 0, end["err"]
    assert end["result"]["weights_sha256"] == sha256
    assert [s["sha256"] for s in run.lines("samples.jsonl")] == samples
    assert_complete(run, len(samples))
    assert checkpoint_sha256(catalogue(run)) == sha256
    assert run.status()["committed_checkpoint"] == len(samples)


def test_a_run_that_was_killed_whole_resumes_at_its_checkpoint(start, reference, machine):
    with start("Toy", workers=3, address=machine.address, **OPTIONS) as run:
        run.wait_for(is_between_saves)
        stood_at = kill_everything(run, machine)
    saved = catalogue(run).steps()[-1]
    with start("Toy", workers=2, **OPTIONS) as again:
        end = again.finish()
    assert_equals(again, end, reference(steps=STEPS))
    rolled_back = [m["step"] for m in again.lines("metrics.rolledback.jsonl")]
    assert rolled_back == list(range(saved + 1, saved + len(rolled_back) + 1))
    assert stood_at <= rolled_back[-1]
    assert end["result"]["lost_steps"] == len(rolled_back)


@pytest.mark.slow
def test_a_stopped_run_loses_nothing_and_a_finished_one_can_be_extended(start, reference):
    with start("Toy", workers=2, **OPTIONS) as run:
        run.wait_for(lambda s: s["step"] > EVERY)
        run.process.send_signal(signal.SIGINT)
        stopped = run.finish(asleep=True)
    assert stopped["result"]["outcome"] == "stopped"
    assert catalogue(run).steps()[-1] == stopped["result"]["steps"]
    assert checkpoint_sha256(catalogue(run)) == stopped["result"]["weights_sha256"]
    with start("Toy", workers="1..3", **OPTIONS) as again:
        end = again.finish()
    assert_equals(again, end, reference(steps=STEPS))
    assert end["result"]["lost_steps"] == 0
    assert not (again.directory / "metrics.rolledback.jsonl").exists()
    with start("Toy", workers=1, **{**OPTIONS, "steps": STEPS + 10}) as longer:
        end = longer.finish()
    assert_equals(longer, end, reference(steps=STEPS + 10))


def test_a_loop_saves_when_it_likes_and_its_pin_is_never_retired(tmp_path, ray_temp, shared_head):
    script = tmp_path / "train.py"
    options = "workers=2, steps=30, global_batch=48, micro_batch=6, checkpoint_every=5"
    script.write_text(
        (JOBS / "toy.py").read_text()
        + f"""
if __name__ == "__main__":
    result = elastic.run(Toy(), loop=saving_loop, {options}, storage={str(tmp_path)!r}, name="run")
    print(result.weights_sha256)
"""
    )
    done = python(environment(ray_temp) | {"RAY_ADDRESS": shared_head.address}, script)
    assert done.returncode == 0, done.stderr
    found = Catalogue(open_folder(str(tmp_path / "run")).at("checkpoints"))
    first, *between, last = found.steps()
    assert (first, last) == (7, 30)
    assert len(between) <= 1, "two are kept; which, the disk decides: one save at a time"
    assert found.manifest(7).about["is_pinned"]
    assert checkpoint_sha256(found) == done.stdout.split()[-1]


def test_when_every_worker_is_lost_the_run_goes_back_to_its_checkpoint(start, reference):
    with start("Toy", workers=1, **OPTIONS) as run:
        run.wait_for(is_between_saves)
        run.kill(rank=0)
        end = run.finish()
    assert_equals(run, end, reference(steps=STEPS))
    assert 0 < end["result"]["lost_steps"] < EVERY
    assert end["result"]["recoveries"][0]["lost_steps"] == end["result"]["lost_steps"]


def test_a_damaged_checkpoint_is_named_kept_aside_and_the_one_before_it_used(
    start, reference, machine
):
    with start("Toy", workers=2, address=machine.address, **OPTIONS) as run:
        run.wait_for(lambda s: (s.get("committed_checkpoint") or 0) >= 3 * EVERY)
        kill_everything(run, machine)
    newest = catalogue(run).steps()[-1]
    folder = catalogue(run).of_step(newest).local
    assert folder is not None
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with start("Toy", workers=2, **OPTIONS) as again:
        end = again.finish()
    assert_equals(again, end, reference(steps=STEPS))
    lines = [line["checkpoint"] for line in again.lines("journal.jsonl") if "checkpoint" in line]
    damaged = next(line for line in lines if "damaged" in line)
    assert damaged["damaged"] == newest
    assert path.name in damaged["reason"]
    assert (again.directory / "checkpoints" / damaged["kept"] / path.name).exists()


@pytest.mark.slow
def test_with_every_checkpoint_damaged_nothing_is_started_over_silently(start):
    with start("Toy", workers=1, steps=10, checkpoint_every=5) as run:
        assert run.finish()["status"] == 0
    for step in catalogue(run).steps():
        (run.directory / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{")
    with start("Toy", workers=1, steps=20, checkpoint_every=5) as again:
        end = again.finish()
    assert end["status"] == 2
    assert "all 2 checkpoints" in end["err"]


def test_a_checkpoint_that_cannot_be_written_does_not_stop_training(start, reference):
    with start("Toy", workers=2, **OPTIONS) as run:
        run.wait_for(lambda s: s["step"] > 5)
        (run.directory / "checkpoints").mkdir(exist_ok=True)
        (run.directory / "checkpoints" / f"step-{STEPS - 2 * EVERY:08}").write_text("in the way")
        end = run.finish(asleep=True)
    sha256, _ = reference(steps=STEPS)
    assert end["result"]["weights_sha256"] == sha256
    assert catalogue(run).steps() == [STEPS - EVERY, STEPS]
    reasons = [line["entry"]["reason"] for line in run.lines("journal.jsonl") if "entry" in line]
    assert any(f"checkpoint of step {STEPS - 2 * EVERY} failed" in reason for reason in reasons)
