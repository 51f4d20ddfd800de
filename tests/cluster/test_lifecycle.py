"""How a run begins and ends: errors, signals, resume, leftovers."""

import json
import os
import signal
import time

import pytest

from tests.cluster.fork_client import Order
from tests.cluster.fork_server import Forked
from tests.cluster.live import JOBS, assert_complete, environment, leftovers
from tests.cluster.processes import about
from tests.cluster.resets import descendants

pytestmark = pytest.mark.cluster


def one_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and "raylet" not in line]
    assert len(lines) == 1, text
    return lines[0]


def is_in(session: int, pid: int) -> bool:
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:  # it has ended
        return False


@pytest.mark.parametrize(
    ("target", "said"),
    [("Unreduced", "scalar"), ("Empty", "0")],
    ids=["loss is not a scalar", "dataset of length 0"],
)
def test_a_workload_that_cannot_work_is_one_line_and_starts_nothing(start, target, said):
    with start(target, workers=2) as run:
        end = run.finish()
    assert end["status"] == 2
    assert said in one_line(end["err"])
    assert not run.directory.exists()


def test_an_unreachable_address_is_one_line(start):
    with start("Toy", address="127.0.0.1:1") as run:
        end = run.finish()
    assert end["status"] == 2
    assert "127.0.0.1:1" in one_line(end["err"])
    assert not run.directory.exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("RaisesItsOwn", "Mistake: nonsense in the labels"),
        pytest.param("Raises", "the user's own mistake", marks=pytest.mark.slow),
        pytest.param("RaisesInDataset", "sample 17 is unreadable", marks=pytest.mark.slow),
    ],
)
def test_a_users_exception_surfaces_with_traceback_positions_and_step(start, target, said):
    with start(target, workers=2, steps=60) as run:
        end = run.finish()
        pids = run.seen_pids
    assert end["status"] == 1
    assert said in end["err"]
    assert "toy.py" in end["err"]
    assert "stream positions" in end["err"] or "position" in end["err"]
    assert "step" in end["err"]
    assert end["result"]["outcome"] == "failed"
    assert json.loads(end["out"].splitlines()[-1]) == end["result"]
    assert leftovers(pids) == []


def test_the_first_interrupt_stops_at_a_step_and_the_run_resumes_there(start, reference):
    options = {"workers": 2, "steps": 40, "set": ["sleep=0.1"]}
    with start("Toy", **options) as run:
        run.wait_for(lambda s: s["step"] > 5)
        run.process.send_signal(signal.SIGINT)
        end = run.finish(asleep=True)
        pids = run.seen_pids
    assert end["status"] == 1
    assert end["result"]["outcome"] == "stopped"
    assert 5 < end["result"]["steps"] < 40
    assert_complete(run, end["result"]["steps"])
    assert leftovers(pids) == []
    with start("Toy", **options) as again:
        resumed = again.finish()
    assert resumed["status"] == 0, resumed["err"]
    assert resumed["result"]["weights_sha256"] == reference(steps=40)[0]
    assert_complete(again, 40)
    assert resumed["result"]["lost_steps"] == 0
    with start("Toy", **options) as finished:
        assert finished.finish()["status"] == 0
    with start("Toy", **{**options, "seed": 1}) as other:
        refused = other.finish()
    assert refused["status"] == 2
    assert "seed was 0 and now is 1" in one_line(refused["err"])


def test_a_second_interrupt_ends_the_run_at_once(start):
    with start("Toy", workers=2, steps=1000, set=["sleep=5.0"]) as run:  # a step takes 20 s
        status = run.wait_for(lambda s: s["phase"] == "running" and s["world_size"] == 2)
        run.process.send_signal(signal.SIGINT)
        run.wait_for(lambda s: "interrupt" in s["reason"].lower() or "SIGINT" in s["reason"])
        run.process.send_signal(signal.SIGINT)
        end = run.finish(asleep=True)
        pids = run.seen_pids | {status["controller"]["pid"]}
    assert end["status"] == 1
    assert end["result"]["outcome"] == "stopped"
    assert end["result"]["steps"] == status["step"], "the step was not waited for"
    assert leftovers(pids) == []


def test_a_spent_failure_budget_ends_the_run_with_the_reason(start):
    options = {"workers": "1..3", "steps": 1000, "max_failures": 1, "set": ["sleep=0.3"]}
    with start("Toy", **options) as run:
        status = run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 3)
        for rank in (0, 2):
            os.kill(status["workers"][rank]["pid"], signal.SIGKILL)
        end = run.finish(asleep=True)
        pids = run.seen_pids
    assert end["status"] == 1
    assert end["result"]["outcome"] == "failed"
    assert "2 failures since step" in end["err"]
    assert "max_failures is 1" in end["err"]
    assert leftovers(pids) == []


def test_more_workers_than_micro_batches_are_capped_with_a_warning(start):
    with start("Toy", workers="1..3", steps=5, global_batch=12, micro_batch=6) as run:
        end = run.finish()
    assert end["status"] == 0
    assert "capped" in end["err"]
    assert max(m["world_size"] for m in run.lines("metrics.jsonl")) <= 2


def test_the_drivers_death_ends_every_process_within_ten_seconds(start):
    options = {"workers": 2, "steps": 10_000, "set": ["sleep=0.01"]}
    with start("Toy", address="local", **options) as run:
        status = run.wait_for(lambda s: s["step"] > 5)
        pids = descendants(run.process.pid)
        assert {*run.seen_pids, status["controller"]["pid"]} < {*pids}
        assert sum(b"agent" in about(pid, "cmdline") for pid in pids) >= 2, "Ray's own, too"
        ours = os.getsid(run.process.pid)
        assert not [pid for pid in pids if is_in(ours, pid)], (
            "what a terminal sends is the driver's"
        )
        run.process.kill()
        deadline = time.monotonic() + 10
        while leftovers(pids) and time.monotonic() < deadline:
            time.sleep(0.05)  # polling, bounded by the deadline
        assert leftovers(pids) == []


def test_a_users_own_loop_logs_and_evaluates_through_a_loss(
    tmp_path, ray_temp, shared_head, fork_server
):
    """From a script: the class and the loop of `__main__` go by value."""
    script, until = tmp_path / "train.py", tmp_path / "until"
    source = (JOBS / "toy.py").read_text()
    script.write_text(
        source
        + f"""
if __name__ == "__main__":
    import sys
    result = elastic.run(
        Logging(sleep=0.05, until={str(until)!r}), loop=logging_loop, workers=(1, 2), steps=60,
        global_batch=48, micro_batch=6, reduction="bitwise", storage={str(tmp_path / "runs")!r},
        name=sys.argv[1], address={shared_head.address!r}, progress=True,
    )
    print(result.weights_sha256)
"""
    )

    def evaluations(name):
        lines = (tmp_path / "runs" / name / "journal.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [f["evaluation"] for f in found if "evaluation" in f]

    hashes, users, evaluated = [], [], []
    until.touch()
    for name, kills in (("quiet", False), ("killed", True)):
        if kills:
            until.unlink()
        order = Order([str(script), name], environment(ray_temp), str(tmp_path))
        process = Forked(fork_server.address, order, with_ray=True)
        deadline = time.monotonic() + 120
        while kills:
            assert process.poll() is None, "nobody was killed"
            assert time.monotonic() < deadline, "nobody was killed"
            status = read(tmp_path / "runs" / name / "status.json")
            if status["world_size"] == 2 and status["step"] > 10:
                os.kill(status["workers"][0]["pid"], signal.SIGKILL)
                until.touch()
                break
            time.sleep(0.01)  # polling, bounded by the deadline
        process.wait(timeout=120)
        out, err = process.communicate()
        assert process.returncode == 0, err
        hashes.append(out.splitlines()[-1])
        assert "step=60/60 loss=" in err
        metrics = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        users.append([json.loads(line)["user"] for line in metrics])
        evaluated.append([(e["step"], e["values"]) for e in evaluations(name)])
    assert hashes[0] == hashes[1]
    assert users[0] == users[1]
    assert all(set(user) == {"twice"} for user in users[0])
    assert [step for step, _ in evaluated[0]] == list(range(4, 61, 4))
    assert dict(evaluated[0]) == dict(evaluated[1])


def read(path):
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {"world_size": 0, "step": 0, "workers": []}
