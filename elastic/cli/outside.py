"""Looking at a run from a machine that sees neither its storage nor its cluster: `--cluster`.

The same command is carried out on the cluster's head, as a small job without a slot.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic.cli.absence import NOT_BEGUN
from elastic.cli.text import printable
from elastic.protocol.errors import WrongInput

if TYPE_CHECKING:
    from elastic.on_ray.driver.job_server import Job, JobServer

FAILED, WRONG_INPUT = 1, 2
OURS = "elastic: "
CHANGES_RUN = ("stop", "scale")
LOOK_EVERY_S = 2.0
"""At a run that is watched and has not begun."""
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="FILE|ADDRESS",
        help="From outside of this cluster, by its job server; RUN_DIR may be a job's id.",
    ),
]


def open_server(cluster: str | None) -> "JobServer":
    """FILE or ADDRESS, or what Ray's environment says. WrongInput if nobody answers there."""
    from elastic.on_ray.driver.cluster_file import address_in  # ray loads here
    from elastic.on_ray.driver.job_server import JobServer

    is_file = cluster is not None and "://" not in cluster and Path(cluster).exists()
    return JobServer(address_in(Path(str(cluster))) if is_file else cluster)


def on_cluster(cluster: str, command: str, run: str, *options: str) -> int:
    """`elastic COMMAND RUN OPTIONS` on the head; its exit status. Ctrl-C ends it, not the run."""
    server = open_server(cluster)
    job = server.find(run)
    if job is None and "/" not in run:
        raise WrongInput(f"there is no job {run!r} at {server.address}")
    where, told = f"{run} --cluster {cluster}", set[str]()
    try:
        while (status := asked(server, job, cluster, [command, run, *options], told)) is None:
            assert job is not None
            time.sleep(LOOK_EVERY_S)
            job = server.look(job.id)
    except KeyboardInterrupt:
        if command in CHANGES_RUN:
            print(f"no longer asking; it may have been asked: `elastic status {where}`")
        else:
            print(f"no longer asking; the run is left alone: `elastic {command} {where}`")
        return 0
    return status


def asked(
    server: "JobServer", job: "Job | None", cluster: str, words: list[str], told: set[str]
) -> int | None:
    """The exit status; None where a run is watched that has not begun. job: the run's, if its
    server knows it. told: what need not be told again."""
    command, run, *options = words
    if job is not None and (job.is_pending or job.is_unprepared):
        return of_unstarted(server, job, command, told)
    directory, runtime_env = (run, {}) if job is None else (job.run_directory, job.runtime_env)
    asking = server.submit(
        [command, directory, *options], runtime_env, name=f"elastic-{command}", run_directory=""
    )
    unbegun: list[str] = []

    def hear(line: str) -> None:
        is_unbegun = job is not None and any(words in line for words in NOT_BEGUN)
        (unbegun.append if is_unbegun else tell)(line)

    try:
        done = server.follow(asking, hear)
        if unbegun and job is not None:
            return of_unstarted(server, server.look(job.id), command, told)
        return conclude(done, where=f"--cluster {cluster}")
    finally:
        server.discard(asking)


def of_unstarted(server: "JobServer", job: "Job", command: str, told: set[str]) -> int | None:
    """A job whose run does not exist: its environment is still being made, or could not be, or its
    driver has only begun. None if that is to be waited for."""
    if job.is_unprepared:
        return conclude(job)
    if job.is_over:
        last = printable(next(iter(server.log(job.id)[-1:]), "it has printed nothing"))
        print(f"job {job.id} ended before its run had begun: {last}")
        return conclude(job)
    if command == "stop":
        server.stop(job.id)
        print(f"job {job.id} was still being prepared; it is ended")
        return 0
    said = printable(" ".join(job.message.split())) if job.is_pending else "its driver starts"
    line = f"job {job.id} is being prepared, its run has not begun: {said}"
    if line not in told:
        told.add(line)
        print(line, flush=True)
    if command == "watch":
        return None
    return FAILED if command in CHANGES_RUN else 0


def tell(line: str) -> None:
    """As the command's own terminal would."""
    is_error = line.startswith(OURS)
    print(printable(line), file=sys.stderr if is_error else sys.stdout, flush=True)


def conclude(job: "Job", where: str = "") -> int:
    """The exit status of its command. WrongInput if it could not be started as it is."""
    from elastic.on_ray.driver.job_server import NO_ELASTIC, why_unprepared

    if job.is_unprepared:
        said = printable(why_unprepared(job.message))
        raise WrongInput(f"the cluster cannot install what job {job.id} needs: {said}")
    if job.was_stopped:
        print(f"{OURS}job {job.id} was stopped", file=sys.stderr)
        return FAILED
    if any(NO_ELASTIC.match(line) for line in job.message.splitlines()):
        raise WrongInput(
            f"the Python of the cluster{f' ({where})' if where else ''} has no elastic: start it "
            "with an image that has, or name a wheel of it in --pip FILE"
        )
    if job.exit_status is None:
        said = printable(" ".join(job.message.split()))
        print(f"{OURS}job {job.id} ended without its command: {said}", file=sys.stderr)
        return FAILED
    return job.exit_status if 0 <= job.exit_status <= WRONG_INPUT else FAILED
