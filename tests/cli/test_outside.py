"""`--cluster`: a command's own job on the cluster is ended and forgotten, however it ends."""

import signal
import subprocess
import sys
import threading

import pytest

from elastic.cli import outside
from elastic.cli.app import main
from elastic.on_ray.driver.job_server import JobServer
from tests.cli.fake_jobs import FakeJobs

RUN = "/shared/runs/first"


@pytest.fixture
def jobs():
    with FakeJobs() as found:
        yield found


def test_a_command_that_cannot_be_carried_out_leaves_no_job(jobs, capsys):
    jobs.status, jobs.exit_status = "FAILED", 1
    jobs.message = "/usr/bin/python: No module named elastic"
    assert main(["status", RUN, "--cluster", jobs.address]) == 2
    assert "has no elastic" in capsys.readouterr().err
    assert jobs.names == []


@pytest.mark.parametrize("words", [("stop", RUN), ("stop", RUN, "--now")])
def test_a_job_on_the_cluster_is_given_all_the_words(jobs, words):
    jobs.status, jobs.exit_status = "SUCCEEDED", 0
    main([*words, "--cluster", jobs.address])
    assert [asked.split()[-len(words) :] for asked in jobs.entrypoints] == [list(words)]


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("status", "PENDING", "is being prepared, its run has not begun: pip installs"),
        ("stop", "STOPPED", "was still being prepared; it is ended"),
    ],
)
def test_of_a_run_whose_environment_is_still_made_no_job_asks(jobs, capsys, command, status, said):
    jobs.runs, jobs.status, jobs.message = ["elastic-first"], "PENDING", "pip  installs"
    assert main([command, "elastic-first", "--cluster", jobs.address]) == 0
    assert capsys.readouterr().out == f"job elastic-first {said}\n"
    assert (jobs.status, jobs.entrypoints) == (status, [])


NO_FOLDER = "elastic: /shared/runs/first is no run directory: there is no such folder; if it is\n"


@pytest.mark.parametrize(
    ("words", "exit_status", "said"),
    [
        (["status"], 0, "is being prepared, its run has not begun: its driver starts"),
        (["scale", "3"], 1, "is being prepared, its run has not begun: its driver starts"),
        (["stop"], 0, "was still being prepared; it is ended"),
    ],
)
def test_of_a_job_whose_run_has_not_begun_that_is_said(jobs, capsys, words, exit_status, said):
    command, *more = words
    jobs.runs, jobs.run_status = ["elastic-first"], [("RUNNING", None)]
    jobs.status, jobs.exit_status, jobs.log = "FAILED", 2, NO_FOLDER
    assert main([command, "elastic-first", *more, "--cluster", jobs.address]) == exit_status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"job elastic-first {said}\n", "")
    assert jobs.names == []


def test_of_a_job_that_ended_before_its_run_its_last_line_is_told(jobs, capsys):
    jobs.runs, jobs.run_status = ["elastic-first"], [("RUNNING", None), ("FAILED", 2)]
    jobs.status, jobs.exit_status, jobs.log = "FAILED", 2, NO_FOLDER
    assert main(["status", "elastic-first", "--cluster", jobs.address]) == 2
    said = f"job elastic-first ended before its run had begun: {NO_FOLDER}"
    assert capsys.readouterr().out == said, "the log of all jobs here"


def test_a_run_that_has_not_begun_is_watched_from_its_begin(jobs, capsys, monkeypatch):
    monkeypatch.setattr(outside, "LOOK_EVERY_S", 0.01)
    begins = [("PENDING", None)] * 3 + [("RUNNING", None)]
    jobs.runs, jobs.run_status, jobs.message = ["elastic-first"], begins, "pip installs"
    jobs.status, jobs.exit_status, jobs.log = "FAILED", 2, NO_FOLDER

    def begin() -> None:
        if jobs.num_tails == 2:
            jobs.status, jobs.exit_status, jobs.log = "SUCCEEDED", 0, "step=1\n"

    jobs.on_tail = begin
    assert main(["watch", "elastic-first", "--cluster", jobs.address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job elastic-first is being prepared, its run has not begun: pip installs",
        "job elastic-first is being prepared, its run has not begun: its driver starts",
        "step=1",
    ]


@pytest.mark.timeout(60)
def test_a_log_whose_connection_is_dead_is_asked_for_anew(jobs):
    jobs.log, jobs.is_mute = "one\ntwo\n", True

    def revive() -> None:
        if jobs.num_tails == 3:
            jobs.log, jobs.is_mute = "one\ntwo\nthree\n", False
            jobs.status, jobs.exit_status = "SUCCEEDED", 0

    jobs.on_tail = revive
    told: list[str] = []
    job = JobServer(jobs.address, quiet_s=0.3).follow("id", told.append)
    assert (job.exit_status, told, jobs.num_tails) == (0, ["one", "two", "three"], 3)


@pytest.mark.timeout(60)
def test_what_a_job_says_at_its_end_is_told_though_its_tail_was_left_before(jobs):
    jobs.log, jobs.is_mute = "one\ntwo\nthr", True

    def end(text: str) -> None:
        told.append(text)
        if text == "two":
            jobs.log, jobs.status, jobs.exit_status = "one\ntwo\nthree\nfour", "SUCCEEDED", 0

    told: list[str] = []
    job = JobServer(jobs.address, quiet_s=0.3).follow("id", end)
    assert (job.exit_status, told, jobs.num_tails) == (0, ["one", "two", "three", "four"], 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", RUN), "the run is left alone"),
        (("stop", RUN), "it may have been asked"),
        (("scale", RUN, "3"), "it may have been asked"),
    ],
)
def test_an_interrupt_leaves_no_job_and_says_what_may_have_been_asked(jobs, words, said):
    follows = threading.Event()
    jobs.on_tail, jobs.is_mute = follows.set, True
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic", *words, "--cluster", jobs.address],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
    )
    assert follows.wait(60), process.communicate(timeout=10)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    again = f"`elastic status {RUN} --cluster {jobs.address}`"
    assert (process.returncode, out, err) == (0, f"no longer asking; {said}: {again}\n", "")
    assert jobs.names == []
