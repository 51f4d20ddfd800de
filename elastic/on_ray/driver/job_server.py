# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""`JobServer`: a cluster seen from outside, through the HTTP server of Ray's jobs on its head.

What is submitted, and what is said of it, is elastic/cli/submit.py's and elastic/cli/outside.py's.
"""

import asyncio
import http.client
import logging
import os
import re
import secrets
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from elastic.on_ray.driver.package import package_of
from elastic.protocol.errors import ControllerLost, WrongInput
from elastic.store.files import first_line

Tell = Callable[[str], object]
PORT = 8265
REACH_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0
"""Within so long the server answers, also to a folder that it is sent."""
QUIET_S = 30.0
"""A log that says nothing for so long is asked for anew: its connection may be dead."""
AWAY_S = 30.0
"""For so long may the server be away before who follows a job gives up."""
LOOK_EVERY_S = 0.2
STOP_S = 6.0
"""A job that is stopped is killed after 3 s."""
RUN_DIRECTORY = "elastic_run_directory"
"""A job's metadata has it under this name."""
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Ray's own, where it looks for a job server."""
ITS_LOGGERS = ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")
OF_RAY = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+INFO job_manager\.py:|Running entrypoint for job "
)
"""So begin lines in a job's log that the server has written."""
OF_INSTALLER = re.compile(r"(ERROR|error|fatal)\b.*:|[x\u00d7\u2570] ")
NO_ELASTIC = re.compile(r".*: No module named elastic$")
TO_REACH = (
    "check that its head runs with the dashboard, which the job server is part of (port 8265), and "
    "that the port is forwarded to this machine (`ray dashboard FILE`, "
    "`kubectl port-forward service/NAME-head-svc 8265`)"
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the server says of a job now."""

    id: str
    is_pending: bool
    is_over: bool
    was_stopped: bool
    exit_status: int | None
    """Of its command; None while that runs, and if it never did."""
    message: str
    is_unprepared: bool
    """Its runtime environment could not be made."""
    run_directory: str
    runtime_env: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Environment:
    """What a job brings along."""

    folder: Path | None
    run_directory: str
    """Is not shipped with the folder."""
    pip: str | None = None
    uv: str | None = None
    variables: dict[str, str] | None = None


class JobServer:
    """Use it from one thread."""

    def __init__(self, address: str | None, quiet_s: float = QUIET_S) -> None:
        """address: of HTTP; None: what Ray's environment variables say. WrongInput if there is
        none, or no job server answers there."""
        self.address = url_of(address or address_in_environment())
        self._quiet_s = quiet_s
        if find_spec("aiohttp") is None:
            raise WrongInput(
                "to reach a cluster from outside, ray[default] is needed: "
                "`pip install 'elastic-ray-trainer[submit]'`"
            )
        from ray.job_submission import JobSubmissionClient

        refuse_unreachable(self.address)
        for name in ITS_LOGGERS:  # they tell of each connection
            logging.getLogger(name).setLevel(logging.WARNING)
        with without_addresses(), self._asking():
            self._client = client = JobSubmissionClient(self.address)
        limits = (REACH_TIMEOUT_S, ANSWER_TIMEOUT_S)  # Ray's own requests have no deadline
        client._do_request = partial(client._do_request, timeout=limits)  # pyright: ignore

    # --- what jobs there are ------------------------------------------------------------
    def submit(
        self, words: list[str], runtime_env: dict[str, Any], *, name: str, run_directory: str
    ) -> str:
        """Have a command carried out on the head; the id of its job. WrongInput if the server
        refuses it."""
        job_id = f"{re.sub(r'[^a-zA-Z0-9_-]', '-', name)[:80]}-{secrets.token_hex(4)}"
        with self._asking():
            return self._client.submit_job(
                entrypoint=quoted(words),
                submission_id=job_id,
                runtime_env=runtime_env,
                metadata={RUN_DIRECTORY: run_directory},
            )

    def find(self, run: str) -> Job | None:
        """The job of this id, or the last one of this run directory; None if there is none."""
        with self._asking():
            found = [d for d in self._client.list_jobs() if d.submission_id]
        of_run = [d for d in found if (d.metadata or {}).get(RUN_DIRECTORY) == run.rstrip("/")]
        named = [d for d in found if d.submission_id == run]
        newest = max(named or of_run, key=lambda d: d.start_time or 0, default=None)
        return None if newest is None else job_of(newest)

    def look(self, job_id: str) -> Job:
        with self._asking():
            return job_of(self._client.get_job_info(job_id))

    def await_start(self, job_id: str, patience_s: float) -> Job:
        """What has become of it once its command runs, or after so long."""
        deadline = time.monotonic() + patience_s
        while (job := self.look(job_id)).is_pending and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        return job

    def stop(self, job_id: str) -> None:
        """As SIGTERM; what does not end within 3 s is killed."""
        with self._asking():
            self._client.stop_job(job_id)

    def discard(self, job_id: str) -> None:
        """End a job if it is not over, and take it off the server's list. What cannot be reached
        stays there: whoever calls has told what there was to tell."""
        with suppress(ControllerLost, WrongInput):
            if not self.look(job_id).is_over:
                self.stop(job_id)
                deadline = time.monotonic() + STOP_S
                while not self.look(job_id).is_over and time.monotonic() < deadline:
                    time.sleep(LOOK_EVERY_S)
            with self._asking():
                self._client.delete_job(job_id)

    def log(self, job_id: str) -> list[str]:
        """The lines that its command has printed."""
        return [line for line in self._text(job_id).splitlines() if not OF_RAY.match(line)]

    def _text(self, job_id: str) -> str:
        """Its whole log. WrongInput if there is none."""
        with self._asking():
            return self._client.get_job_logs(job_id)

    def follow(self, job_id: str, tell: Tell) -> Job:
        """Tell each line of its command until that has ended; what has become of the job. A server
        that is away for long is ControllerLost."""
        return asyncio.run(self._follow(job_id, tell))

    async def _follow(self, job_id: str, tell: Tell) -> Job:
        from aiohttp import ClientError

        lines, away_since = Lines(tell), None
        while True:
            lines.begin()
            try:
                pieces = self._client.tail_job_logs(job_id)
                while (piece := await self._next(pieces)) is not None:
                    away_since = None
                    lines.take(piece)
                job = await asyncio.to_thread(self.look, job_id)
                away_since = None
                if job.is_over:  # its last lines may have come after the tail was left
                    with suppress(WrongInput):
                        lines.take_whole(await asyncio.to_thread(self._text, job_id))
                    lines.end()
                    return job
            except (RuntimeError, OSError, ClientError, ControllerLost) as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > AWAY_S:
                    raise ControllerLost(
                        f"the job server at {self.address} has not answered for {AWAY_S:.0f} s "
                        f"({first_line(error)}); if the cluster is lost, the same submit to "
                        "another resumes the run"
                    ) from error
            await asyncio.sleep(1.0)

    async def _next(self, pieces: AsyncIterator[str]) -> str | None:
        """None at the log's end, or if it is quiet for long."""
        try:
            async with asyncio.timeout(self._quiet_s):
                return await anext(pieces, None)
        except TimeoutError:
            return None

    @contextmanager
    def _asking(self) -> Generator[None]:
        """What the server refuses is WrongInput; one that is gone is ControllerLost."""
        import requests

        try:
            yield
        except (requests.RequestException, ConnectionError) as error:
            raise ControllerLost(
                f"the job server at {self.address} does not answer: {first_line(error)}"
            ) from error
        except (RuntimeError, ValueError, OSError) as error:
            raise WrongInput(f"the job server at {self.address}: {first_line(error)}") from error


class Lines:
    """A log's new lines: each once, though whoever follows it again is given all of it."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._num_seen = self._num_told = 0
        self._rest = ""

    def begin(self) -> None:
        self._num_seen, self._rest = 0, ""

    def take(self, text: str) -> None:
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            self._see(line)

    def take_whole(self, text: str) -> None:
        self.begin()
        self.take(text)

    def end(self) -> None:
        if self._rest:
            self._see(self._rest)

    def _see(self, line: str) -> None:
        self._num_seen += 1
        if self._num_seen > self._num_told:
            self._num_told = self._num_seen
            if not OF_RAY.match(line):
                self._tell(line)


def job_of(details: Any) -> Job:
    status = str(getattr(details.status, "value", details.status))
    return Job(
        id=details.submission_id,
        is_pending=status == "PENDING",
        is_over=status in ("SUCCEEDED", "FAILED", "STOPPED"),
        was_stopped=status == "STOPPED",
        exit_status=details.driver_exit_code,
        message=details.message or "",
        is_unprepared=details.error_type == "RUNTIME_ENV_SETUP_FAILURE"
        or (details.message or "").startswith("runtime_env setup failed"),
        run_directory=(details.metadata or {}).get(RUN_DIRECTORY, ""),
        runtime_env=details.runtime_env or {},
    )


def runtime_env_of(environment: Environment) -> dict[str, Any]:
    """What Ray ships and installs. WrongInput for a folder that is too large, and for requirements
    that cannot be read."""
    found: dict[str, Any] = {}
    if (folder := environment.folder) is not None:
        package = package_of(folder, environment.run_directory)
        if package.is_too_large:
            raise WrongInput(
                f"{folder} cannot be shipped: {package}; name what no worker needs in a "
                ".rayignore there, or move the workload to a folder of its own"
            )
        found |= {"working_dir": str(folder), "excludes": [*package.excludes]}
    for installer, file in (("pip", environment.pip), ("uv", environment.uv)):
        if file is not None:
            found[installer] = requirements_in(file, installer)
    if environment.variables:
        found["env_vars"] = environment.variables
    return found


def requirements_in(file: str, installer: str) -> list[str]:
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"--{installer} {file} cannot be read: {first_line(error)}") from error
    bare = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    found = [line for line in bare if line]
    if not found:
        raise WrongInput(f"--{installer} {file} names no package: leave it out")
    return found


def why_unprepared(message: str) -> str:
    """What an installer has said last, out of all that Ray tells of it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = [line for line in lines if OF_INSTALLER.match(line)]
    return (said or lines or ["no reason was given"])[-1]


def quoted(words: list[str]) -> str:
    """For the shell that runs a job. Its Python is the one that `python` is there, also where
    requirements were installed into an environment of the job's own."""
    return shlex.join(["python", "-m", "elastic", *words])


# --- where the server is ---------------------------------------------------------------
def address_in_environment() -> str:
    for name in ADDRESS_VARIABLES:
        if (found := os.environ.get(name, "")).startswith("http"):
            return found
    raise WrongInput(
        "give the cluster: --cluster http://HOST:8265, its job server, or --cluster FILE, what "
        "`ray up` took"
    )


def url_of(address: str) -> str:
    """`host`, `host:port` or a URL. WrongInput for an address of another kind."""
    scheme, mark, rest = address.partition("://")
    if not mark:
        scheme, rest = "http", address
    if scheme not in ("http", "https"):
        raise WrongInput(
            f"--cluster {address!r}: the address of the cluster's job server is needed, "
            f"http://HOST:{PORT}; {scheme}:// is none"
        )
    host, slash, path = rest.rstrip("/").partition("/")
    has_port = re.search(r":\d+$", host) is not None
    if not has_port and scheme == "http":
        host = f"{host}:{PORT}"
    return f"{scheme}://{host}{slash}{path}"


def refuse_unreachable(address: str) -> None:
    """Ray would wait for minutes, or print a traceback."""
    request = urllib.request.Request(f"{address}/api/version")
    try:
        with urllib.request.urlopen(request, timeout=REACH_TIMEOUT_S) as answer:
            why = "" if b"ray_version" in answer.read(10_000) else "what listens there is no Ray"
    except urllib.error.HTTPError as error:
        is_guarded = error.code in (401, 403)  # Ray's client shows the token, if there is one
        why = "" if is_guarded else f"it answers with HTTP status {error.code}"
    except TimeoutError:
        why = "timed out"
    except http.client.HTTPException:
        why = "what listens there is no Ray job server"
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        why = "timed out" if isinstance(reason, TimeoutError) else str(reason)
    if why:
        raise WrongInput(f"no Ray job server answers at {address}: {why}; {TO_REACH}")


@contextmanager
def without_addresses() -> Generator[None]:
    """Ray lets its environment variables prevail over the address that it is given."""
    kept = {name: os.environ.pop(name) for name in ADDRESS_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
