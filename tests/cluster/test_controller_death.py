"""The controller dies: training goes on, its successor takes over, and no step is lost."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.live import assert_same_bits, leftovers
from tests.cluster.processes import sibling

pytestmark = pytest.mark.cluster
STEPS = 100
MICROBATCHES = 8
"""Of a step: 48 samples, 6 at a time (tests/cluster/live.py)."""


def kill_controller(run) -> tuple[float, int]:
    """The moment and the process."""
    pid = run.status()["controller"]["pid"]
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at, pid


def await_successor(run, pid: int) -> dict:
    return run.wait_for(lambda s: s["controller"]["pid"] != pid and s["phase"] == "running")


def assert_as_if_nothing_had_happened(run, end, reference, steps: int = STEPS) -> None:
    assert_same_bits(run, end, reference(steps=steps), steps)
    assert end["result"]["lost_steps"] == 0
    assert leftovers(run.seen_pids) == []


def test_training_goes_on_while_the_controller_is_away(start, reference, tmp_path):
    """For five steps at least: until then no successor can read the journal."""
    beats = tmp_path / "beats"
    options = {"workers": 3, "steps": STEPS, "checkpoint_every": 25}
    with start("Toy", **options, set=["sleep=0.05", f"beats={str(beats)!r}"]) as run:
        run.wait_for(lambda s: s["step"] > 20)
        workers = [w["pid"] for w in run.status()["workers"]]
        with without_journal(run):
            killed_at, pid = kill_controller(run)
            beaten = beats.stat().st_size
            run.wait_for(lambda _: beats.stat().st_size >= beaten + 6 * MICROBATCHES)
        status = await_successor(run, pid)
        assert [w["pid"] for w in status["workers"]] == workers
        assert status["generation"] == 1
        end = run.finish()
    assert_as_if_nothing_had_happened(run, end, reference)
    assert end["result"]["generations"] == 1
    times, adopted_at = [m["time"] for m in run.lines("metrics.jsonl")], adopted(run)
    made = [at for at in times if killed_at < at < adopted_at]
    assert len(made) >= 5, "training stood still"


@contextlib.contextmanager
def without_journal(run):
    """Nobody can take the run over meanwhile; who writes the journal goes on with it."""
    journal = run.directory / "journal.jsonl"
    kept = journal.rename(run.directory / "kept")
    journal.mkdir()
    try:
        yield
    finally:
        journal.rmdir()
        kept.rename(journal)


def adopted(run) -> float:
    """When the successor had taken over."""
    for line in run.lines("journal.jsonl"):
        if (line.get("entry", {}).get("event") or {}).get("type") == "Adopted":
            return line["at"]
    raise AssertionError("nobody took over")


def test_a_worker_that_dies_with_the_controller_is_missed_by_its_successor(start, reference):
    with start("Toy", workers="2..3", steps=STEPS, set=["sleep=0.08"]) as run:
        run.wait_for(lambda s: s["step"] > 20 and s["world_size"] == 3)
        run.kill(rank=0)
        _, pid = kill_controller(run)
        await_successor(run, pid)
        end = run.finish()
    assert_as_if_nothing_had_happened(run, end, reference)


@pytest.mark.slow
def test_a_successor_that_cannot_read_the_journal_is_followed_by_another(
    start, reference, ray_temp
):
    options = {"workers": 2, "steps": STEPS, "detect_s": 2.0, "address": "local"}
    with start("Toy", **options, set=["sleep=0.04"]) as run:
        run.wait_for(lambda s: s["step"] > 20)
        with without_journal(run):
            _, pid = kill_controller(run)
            run.wait_for(lambda s: "cannot be taken over now" in said_by_actors(ray_temp))
        await_successor(run, pid)
        end = run.finish()
    assert_as_if_nothing_had_happened(run, end, reference)


def said_by_actors(ray_temp: Path) -> str:
    return "".join(path.read_text() for path in ray_temp.rglob("worker-*.err"))


@pytest.mark.timeout(400)
def test_a_rendezvous_and_controllers_that_are_frozen_or_terminated_are_started_anew(
    start, reference
):
    """The rendezvous as a worker is lost: without it no generation forms."""
    options = {"workers": "2..3", "steps": STEPS, "detect_s": 2.0}  # a lease of 20 s
    with start("Toy", **options, set=["sleep=0.1"]) as run:
        status = run.wait_for(lambda s: s["step"] > 20 and s["world_size"] == 3)
        rendezvous = sibling(status["controller"]["pid"], b"ray::RendezvousActor")
        os.kill(rendezvous, signal.SIGSTOP)
        run.kill(rank=0)
        status = run.wait_for(lambda s: s["world_size"] == 3 and s["generation"] > 2)
        for number in (signal.SIGTERM, signal.SIGSTOP):
            pid = status["controller"]["pid"]
            os.kill(pid, number)
            status = await_successor(run, pid)
        end = run.finish()
    assert_as_if_nothing_had_happened(run, end, reference)
    assert leftovers([rendezvous]) == []


@pytest.mark.slow
def test_a_successor_obeys_ctrl_c_and_the_run_resumes(start, reference):
    options = {"steps": STEPS, "checkpoint_every": 50, "set": ["sleep=0.04"]}
    with start("Toy", workers=2, **options) as run:
        run.wait_for(lambda s: s["step"] > 20)
        _, pid = kill_controller(run)
        await_successor(run, pid)
        run.process.send_signal(signal.SIGINT)
        end = run.finish(asleep=True)
    assert end["result"]["outcome"] == "stopped"
    with start("Toy", workers=2, **options) as again:
        end = again.finish()
    assert_as_if_nothing_had_happened(again, end, reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_controllers_and_workers_die_at_random_moments(start, reference, seed):
    dice = random.Random(seed)
    steps = 2500
    options = {"workers": "2..4", "steps": steps, "max_failures": 99, "checkpoint_every": 20}
    with start("Toy", **options, set=["sleep=0.005"]) as run:
        run.wait_for(lambda s: s["step"] > 5)
        for _ in range(15):
            time.sleep(dice.uniform(0.2, 3))  # the moment is the fault
            status = run.status()
            victims = [w["pid"] for w in (*status["workers"], *status["standby"]) if w["pid"]]
            victims = [dice.choice(victims)] if victims and dice.random() < 0.5 else []
            if dice.random() < 0.7:
                victims.append(status["controller"]["pid"])
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        end = run.finish(patience_s=600)
    # steps whose holders were all killed were done again
    assert_same_bits(run, end, reference(steps=steps), steps)
