"""The injector on real processes and a run directory that the test writes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from math import inf
from pathlib import Path

import pytest
from ray.exceptions import RayActorError, RayTaskError

from elastic.chaos.clock import Clock
from elastic.chaos.inject import Injector, is_here
from elastic.chaos.plan import make_plan
from elastic.chaos.record import read_done
from elastic.chaos.scenario import parse_scenario
from elastic.cli.chaos import wait_for_run
from elastic.on_ray.driver.remote_faults import asking
from elastic.protocol.errors import WrongInput
from elastic.store.files import open_folder


class FakeRun:
    """A run directory; it ends when as many faults were told as it has been given."""

    def __init__(self, directory, workers, num_faults):
        self.directory = directory
        directory.mkdir()
        rows = [
            {"id": f"w{rank}", "rank": rank, "pid": one.pid, "node_id": "n", "node_ip": "127.0.0.1"}
            for rank, one in enumerate(workers)
        ]
        controller = {"pid": os.getpid(), "node_ip": "127.0.0.1"}
        status = {"phase": "running", "step": 7, "generation": 2, "workers": rows}
        self.write("status.json", {**status, "controller": controller})
        self.left, self.told, self.workers = num_faults, [], workers

    def write(self, name, value):
        (self.directory / name).write_text(json.dumps(value))

    def tell(self, line):
        self.told.append(line)
        with (self.directory / "journal.jsonl").open("a") as file:
            file.write(json.dumps({"at": 1.0, "phase": "forming"}) + "\n")
        self.left -= 1
        if self.left == 0:
            self.write("result.json", {})

    def suffer(self, *faults, **options):
        scenario = parse_scenario({"name": "s", "faults": list(faults)}, "s", self.directory)
        folder = open_folder(str(self.directory))
        plan = make_plan(scenario, 2)
        Injector(folder, scenario, plan, tell=self.tell, **options).run()
        return [(d.strike, d.what, d.worker, d.pid, d.note) for d in read_done(folder)]


def test_a_worker_is_killed_and_the_next_fault_waits_for_its_phase(process, tmp_path):
    workers = [process("ray::WorkerActor.run"), process("ray::WorkerActor.run")]
    run = FakeRun(tmp_path / "run", workers, num_faults=2)
    done = run.suffer(
        {"what": "kill", "whom": {"rank": 1}, "when": {"step": 7}},
        {"what": "term", "whom": {"rank": 0}, "when": {"after_fault": 1, "phase": "forming"}},
    )
    assert done == [
        ("1.1", "kill", "w1", workers[1].pid, ""),
        ("2.1", "term", "w0", workers[0].pid, ""),
    ]
    assert [worker.wait(60) for worker in workers] == [-signal.SIGTERM, -signal.SIGKILL]
    assert run.told == [
        f"step 7: kill pid {workers[1].pid} w1",
        f"step 7: term pid {workers[0].pid} w0",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_the_command_leaves_no_process_stopped(process, tmp_path, number):
    worker = process("ray::WorkerActor.run")
    run = FakeRun(tmp_path / "run", [worker], num_faults=99)
    run.write("config.json", {"workers": 1})
    scenario = tmp_path / "s.yaml"
    scenario.write_text("faults: [{what: stop, whom: {rank: 0}, for_s: 600, when: {step: 1}}]")
    command = [sys.executable, "-m", "elastic", "chaos", str(scenario), str(run.directory)]
    chaos = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while state_of(worker.pid) != "T":
        assert chaos.poll() is None
        os.utime(run.directory / "status.json")  # as of a run that is alive
        time.sleep(0.01)
    chaos.send_signal(number)
    chaos.wait(60)
    assert state_of(worker.pid) != "T"


def test_only_processes_of_ray_are_ever_signalled(process, tmp_path):
    stranger = process("editor")
    run = FakeRun(tmp_path / "run", [stranger], num_faults=1)
    done = run.suffer({"what": "kill", "whom": {"rank": 0}, "when": {"step": 1}})
    why = f"process {stranger.pid} is no worker of Ray (any more)"
    assert done == [("1.1", "kill", "w0", stranger.pid, why)]
    assert stranger.poll() is None


class DrainsNodes(Injector):
    """Has no Ray: keeps which nodes it would have drained."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.nodes = []

    def _hit(self, strike, row):
        self.nodes.append(row["node_id"])
        return 5.0


def test_a_node_is_drained_once_and_all_its_workers_are_on_record(process, tmp_path):
    workers = [process("ray::WorkerActor.run"), process("ray::WorkerActor.run")]
    run = FakeRun(tmp_path / "run", workers, num_faults=2)
    drain = {"what": "drain", "whom": {"node_of": 0}, "when": {"step": 1}}
    scenario = parse_scenario({"name": "s", "faults": [drain]}, "s", run.directory)
    folder = open_folder(str(run.directory))
    injector = DrainsNodes(folder, scenario, make_plan(scenario, 2), tell=run.tell)
    injector.run()
    assert injector.nodes == ["n"]
    assert [(d.strike, d.worker, d.at, d.note) for d in read_done(folder)] == [
        ("1.1", "w0", 5.0, ""), ("1.1", "w1", 5.0, ""),
    ]  # fmt: skip


def test_a_node_that_has_just_died_does_not_end_the_scenario():
    with pytest.raises(WrongInput, match="node n cannot be asked: The actor"), asking("n"):
        raise RayActorError
    gone = RayTaskError("send", "a traceback", ProcessLookupError("process 7 is gone"))
    with pytest.raises(ProcessLookupError, match="process 7 is gone"), asking("n"):
        raise gone


class EndsWhenStopped(FakeRun):
    """The worker has stopped by then: before, a SIGCONT would only take the SIGSTOP back."""

    def tell(self, line):
        os.waitid(os.P_PID, self.workers[0].pid, os.WSTOPPED)
        super().tell(line)


def test_a_stopped_process_is_woken_when_the_run_ends_before(process, tmp_path):
    worker = process("ray::WorkerActor.run")
    run = EndsWhenStopped(tmp_path / "run", [worker], num_faults=1)
    run.suffer({"what": "stop", "for_s": 600, "when": {"step": 1}})
    os.waitid(os.P_PID, worker.pid, os.WCONTINUED)  # would wait for ever
    assert worker.poll() is None


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class EndsWhenSlowed(FakeRun):
    """The run ends when its worker has been stopped and woken three times."""

    def tell(self, line):
        threading.Thread(target=self._end, args=(line,), daemon=True).start()

    def _end(self, line):
        for _ in range(3):
            for flag in (os.WSTOPPED, os.WCONTINUED):
                os.waitid(os.P_PID, self.workers[0].pid, flag)
        super().tell(line)


def test_a_slow_process_is_stopped_and_woken_until_the_run_ends(process, tmp_path):
    worker = process("ray::WorkerActor.run")
    run = EndsWhenSlowed(tmp_path / "run", [worker], num_faults=1)
    done = run.suffer({"what": "slow", "slower": 4, "when": {"step": 1}})
    assert done == [("1.1", "slow", "w0", worker.pid, "")]
    assert state_of(worker.pid) != "T"


class AsksSlowNodes(Injector):
    """What is asked of a node takes until the first worker has been woken."""

    def _hit(self, strike, row):
        if strike.spec.what == "drain":
            os.waitid(os.P_PID, self._status["workers"][0]["pid"], os.WCONTINUED)
            return 5.0
        return super()._hit(strike, row)

    def _signal(self, row, number):
        at = super()._signal(row, number)
        if number == signal.SIGSTOP:  # before that a SIGCONT would only take it back
            os.waitid(os.P_PID, row["pid"], os.WSTOPPED)
        return at


def test_a_process_is_woken_in_time_while_a_node_does_not_answer(process, tmp_path):
    worker = process("ray::WorkerActor.run")
    run = FakeRun(tmp_path / "run", [worker], num_faults=2)
    stop = {"what": "stop", "for_s": 0.2, "whom": {"rank": 0}, "when": {"step": 1}}
    drain = {"what": "drain", "whom": {"node_of": 0}, "when": {"after_fault": 1, "after_s": 0}}
    scenario = parse_scenario({"name": "s", "faults": [stop, drain]}, "s", run.directory)
    folder = open_folder(str(run.directory))
    AsksSlowNodes(folder, scenario, make_plan(scenario, 1), tell=run.tell).run()
    assert [d.what for d in read_done(folder)] == ["stop", "drain"]


def test_what_cannot_be_undone_in_its_time_ends_the_scenario():
    is_looked_at = threading.Event()

    def look(now):
        is_looked_at.set()
        raise OSError("the folder is gone")

    clock = Clock(look)
    clock.check()
    clock.begin()
    assert is_looked_at.wait(60)
    clock.end()
    with pytest.raises(OSError, match="the folder is gone"):
        clock.check()


def test_the_driver_is_hit_by_the_pid_it_is_given(process, tmp_path):
    driver = process("python -m elastic run")
    run = FakeRun(tmp_path / "run", [], num_faults=1)
    done = run.suffer(
        {"what": "kill", "whom": "driver", "when": {"after_s": 0}}, driver_pid=driver.pid
    )
    assert done == [("1.1", "kill", None, driver.pid, "")]
    assert driver.wait(60) == -signal.SIGKILL


def test_a_fault_without_a_victim_is_on_record(tmp_path):
    run = FakeRun(tmp_path / "run", [], num_faults=1)
    done = run.suffer({"what": "kill", "whom": {"rank": 3}, "when": {"step": 1}})
    assert done == [("1.1", "kill", None, None, "nobody to hit: there is no rank 3 now")]


def test_what_never_came_is_told(process, tmp_path):
    worker = process("ray::WorkerActor.run")
    run = FakeRun(tmp_path / "run", [worker], num_faults=1)
    run.suffer(
        {"what": "kill", "whom": {"rank": 0}, "when": {"step": 1}},
        {"what": "kill", "when": {"step": 99}},
    )
    assert run.told[1] == "not reached before the run ended: 2.1 kill a random rank, at step 99"


def test_this_machine_knows_its_addresses():
    assert [is_here(ip) for ip in ("127.0.0.1", "::1", "203.0.113.7", "", None)] == [
        True,
        True,
        False,
        False,
        False,
    ]


class BeginsLater:
    """The folder of a run that has a directory when it was looked for three times."""

    def __init__(self):
        self.looks = 0

    def exists(self, name):
        assert name == "config.json"
        self.looks += 1
        return self.looks > 3


def test_faults_wait_for_their_run_to_begin():
    folder = BeginsLater()
    wait_for_run(folder, "runs/x", 60)
    assert folder.looks == 4
    with pytest.raises(WrongInput, match="runs/x: no run began within 0 s"):
        wait_for_run(BeginsLater(), "runs/x", 0)


def test_faults_do_not_wait_when_the_driver_of_their_run_has_ended(tmp_path, monkeypatch):
    driver = subprocess.Popen(["true"])
    driver.wait(60)
    monkeypatch.setattr("elastic.cli.chaos.DRIVER_GONE_S", 0.1)
    with pytest.raises(WrongInput, match="runs/x: no run began, and its driver has ended"):
        wait_for_run(open_folder(str(tmp_path)), "runs/x", inf, driver.pid)
