# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The driver's side of Ray: find or start a cluster, submit the controller, ask it how it goes."""

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import ray
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError

from elastic.on_ray import actors, naming
from elastic.on_ray.driver.own_sessions import own_sessions
from elastic.on_ray.driver.package import package_of
from elastic.on_ray.driver.raylet_words import hush_deaths
from elastic.on_ray.driver.remnants import Remnants
from elastic.on_ray.placement.autoscaling import can_add_gpus, refuse_unfillable, report
from elastic.on_ray.placement.machines import (
    choose_device,
    gpus_here,
    machines,
    refuse_too_few,
    torch_here,
    torches_on,
)
from elastic.protocol.errors import ControllerLost, WrongInput, in_words
from elastic.protocol.placing import Need
from elastic.store.claim import this_machine

REACH_TIMEOUT_S = 10.0
ANSWER_S = 30.0
"""How long a head may be busy that takes connections."""
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A client's first words, and that it has no settings (RFC 9113, section 3.4)."""
HTTP2_FRAME_BYTES = 9
"""Of a frame's head; the fourth is its type."""
HTTP2_SETTINGS = b"\x04"
EMBEDDED_SPARE_CPUS = 2
RENEW_EVERY_S = 0.5
KEEP_ALIVE_S = 2.0
"""How long the driver waits for a word of a controller that may be busy."""
STARTED_S = 3.0
"""So long may Ray take to start the controller before the user is told."""
SILENT_S = 15.0
"""After so long without a word the user is told: Ray starts a dead controller again, but leaves a
frozen one alone."""


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """What a run wants of Ray."""

    address: str | None
    min_workers: int
    num_slots: int
    """Workers at most, standbys included."""
    need: Callable[[str], Need]
    """Of each worker, by the device: "cpu" or "cuda"."""
    device: str
    folder: Path | None
    """What every node needs on its path."""
    run_directory: str
    """A path or URI; it is not shipped with the folder."""
    detach: bool
    before_start: Callable[[], None]
    """Called before Ray is started on this machine; what it raises is the end."""
    slow_step: Callable[[str], AbstractContextManager[None]]
    """For a block, by what it does; tells that if it takes long."""


class Lease:
    """Says again and again that the driver lives, in a thread that waits for nothing else: neither
    storage nor a terminal may end a run."""

    def __init__(self, renew: Callable[[], None]) -> None:
        self._renew = renew
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._is_over.wait(RENEW_EVERY_S):
            self._renew()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(2 * KEEP_ALIVE_S)


class RayDriver:
    """This process's connection to Ray, for one run."""

    def __init__(self, request: ClusterRequest) -> None:
        self._request, folder = request, request.folder
        self.is_embedded = False
        self._was_connected = ray.is_initialized()
        self._shipped = False
        self._at_close = ExitStack()
        if not self._was_connected:
            self._connect()
        self._controller: Any = None
        self._run: Any = None
        self._run_id = ""
        self._lease: Lease | None = None
        try:
            self.device = self._choose_device()
        except BaseException:
            self.close()
            raise
        self.folder_on_nodes = None if self._shipped or folder is None else str(folder)
        self._heard_at, self._is_silent = math.inf, False  # it may wait for its start
        self.place, self.has_begun, self.waits_for, self._starts = "", False, "", ""
        """The run directory, once it exists; a run that has not begun may come to nothing. What it
        lacks, in a line; how far its first workers are."""

    def _connect(self) -> None:
        request = self._request
        quiet: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": "ERROR",
            "namespace": naming.NAMESPACE,
        }
        address = None if request.address == "local" else request.address or find_cluster()
        if address is not None and is_stale(address, request.address):
            print(
                f"the Ray cluster that was last started on this machine, {address}, does not "
                "answer any more: Ray starts embedded (--address local says so)",
                file=sys.stderr,
            )
            address = None
        if address is not None:
            with request.slow_step(f"looking for the Ray cluster at {address}"):
                refuse_unreachable(address)
            runtime_env = self._runtime_env(request.folder)
            ships = f" and sending it {request.folder}" if runtime_env else ""
            try:
                with request.slow_step(f"joining the Ray cluster at {address}{ships}"):
                    ray.init(address=address, runtime_env=runtime_env, **quiet)
                self._shipped = bool(runtime_env)
                return
            except RuntimeEnvSetupError as error:
                line = (error.error_message or type(error).__name__).splitlines()[0]
                raise WrongInput(f"the folder of TARGET cannot be shipped: {line}") from error
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                line = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise WrongInput(
                    f"Ray cannot be joined at address {address!r}: {line}; check it with "
                    "`ray status --address ...`, or use --address local"
                ) from error
        self._refuse_embedded()
        self.is_embedded = True
        try:
            with request.slow_step("starting Ray on this machine"), own_sessions():
                ray.init(
                    address="local",
                    num_cpus=request.num_slots * request.need("cpu").cpus + EMBEDDED_SPARE_CPUS,
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",  # nothing listens beyond this machine
                    **quiet,
                )
        except Exception as error:  # a bare one where a process of its own is not up in time
            raise OSError(
                f"Ray does not start on this machine: {in_words(error)}; is it short of memory or "
                "CPU time? Start the same run again"
            ) from error
        self._at_close.callback(Remnants().close)

    def _refuse_embedded(self) -> None:
        """WrongInput for whatever a Ray on this machine will lack: to start it takes seconds."""
        request = self._request
        if request.detach:
            raise WrongInput(
                "--detach needs a Ray cluster that outlives this process; give --address, or "
                "leave --detach out"
            )
        if (need := request.need("cpu")).is_special:
            raise WrongInput(
                f"a worker needs {need}, which a Ray that starts embedded does not have: give "
                "--address of a cluster"
            )
        if request.device == "cuda":
            num_gpus, torch = gpus_here(), torch_here()
            choose_device("cuda", num_gpus, {"127.0.0.1": torch} if num_gpus and torch else {})
            refuse_too_few(request.min_workers, num_gpus)
        request.before_start()

    def _runtime_env(self, folder: Path | None) -> dict[str, Any] | None:
        """Ray ships the folder, unless the job has chosen a working_dir already."""
        job = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
        if folder is None or "working_dir" in job:
            return None
        package = package_of(folder, self._request.run_directory)
        if package.is_too_large:
            print(
                f"{folder} is not shipped, every node must see it at that path: {package}. Name "
                "what no worker needs in a .rayignore there, or move the workload to a folder of "
                "its own",
                file=sys.stderr,
            )
            return None
        return {"working_dir": str(folder), "excludes": [*package.excludes]}

    def _choose_device(self) -> str:
        """WrongInput if a worker can never have what it needs."""
        request, there = self._request, machines()
        with_gpus = [] if request.device == "cpu" else [m for m in there if m.gpus]
        num_gpus = sum(m.gpus for m in with_gpus)
        may_grow = any(m.group for m in there)
        is_open = request.device == "auto" and not num_gpus and may_grow
        with request.slow_step("asking the cluster for its GPUs"):
            can_add = can_add_gpus() if is_open else False
            torches = torches_on(with_gpus) if with_gpus else {}
        device, note = choose_device(request.device, num_gpus, torches, can_add)
        if device == "cuda" and self.is_embedded:
            refuse_too_few(request.min_workers, num_gpus)
        if not self.is_embedded:
            need = request.need(device)
            refuse_unfillable(need, there, report())
        if note:
            print(note, file=sys.stderr)
        return device

    @property
    def whereabouts(self) -> dict[str, Any]:
        """For config.json: whoever wants to stop the run learns who can."""
        address: str = ray.get_runtime_context().gcs_address
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": this_machine(),
            "ray": "embedded" if self.is_embedded else address,
        }

    def submit(self, supervise: actors.Supervise, order: dict[str, Any]) -> None:
        """Start the controller. It reports through `poll`."""
        if not self._was_connected:  # else they may be deaths of the user's own workers
            self._at_close.callback(hush_deaths())
        self._run_id = order["run_id"]
        self._controller = actors.start_controller(self._run_id, supervise, order)
        self._run = self._controller.run.remote()
        self._submitted_at = time.monotonic()
        self._lease = Lease(self._keep_alive)

    @property
    def starts(self) -> str:
        """How far a run is that takes long to begin, in a line; else empty."""
        if self._heard_at < math.inf:
            return self._starts
        waited_s = time.monotonic() - self._submitted_at
        return "waiting for Ray to start the run's controller" if waited_s > STARTED_S else ""

    def poll(self, timeout_s: float) -> dict[str, Any] | None:
        """The controller's answer once the run has ended."""
        self._tell_silence()
        done, _ = ray.wait([self._run], timeout=timeout_s)
        if not done:
            return None
        try:
            return ray.get(self._run, timeout=10)
        except RayError as error:
            end_leftovers(self._run_id)
            lines = (str(error).strip() or type(error).__name__).splitlines()
            line = lines[-1] if isinstance(error, RayTaskError) else lines[0]
            raise ControllerLost(
                f"the run's controller is gone ({line}); its workers were ended, and the same "
                "command resumes the run"
            ) from error

    def _keep_alive(self) -> None:
        """In the lease's thread."""
        try:
            told = ray.get(self._controller.keep_alive.remote(), timeout=KEEP_ALIVE_S)
        except RayError:
            return  # it is busy, frozen or dead: the end of run() tells of that
        self.place, self.has_begun, self.waits_for, self._starts = told
        self._heard_at = time.monotonic()

    def _tell_silence(self) -> None:
        silent_s = time.monotonic() - self._heard_at
        if silent_s <= SILENT_S:
            self._is_silent = False
        elif not self._is_silent:
            self._is_silent = True
            print(
                f"the run's controller has been silent for {silent_s:.0f} s: perhaps its "
                "process is stopped, or its node is cut off; two interrupts end the run, and "
                "the same command resumes it",
                file=sys.stderr,
            )

    def stop(self, reason: str) -> None:
        self._controller.stop.remote(reason)

    def end_now(self, reason: str) -> None:
        self._controller.end_now.remote(reason)

    def abandon(self) -> NoReturn:
        """The controller does not answer: end the run without it."""
        ray.kill(self._controller, no_restart=True)
        end_leftovers(self._run_id)
        raise ControllerLost("the run's controller did not answer; all its processes were ended")

    def close(self) -> None:
        """Leave Ray. The controller of a detached run stays; it ends itself after the run."""
        if self._lease is not None:
            self._lease.end()
        if self._controller is not None and not self._request.detach:
            ray.kill(self._controller, no_restart=True)
        if not self._was_connected:
            ray.shutdown()
        self._at_close.close()


def end_leftovers(run_id: str) -> None:
    """After the controller's death: end the run's other actors by their names."""
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    for entry in named:
        if entry["name"].startswith(f"{run_id}-"):
            with suppress(ValueError):  # it has just died
                actor = ray.get_actor(entry["name"], namespace=entry["namespace"])
                ray.kill(actor, no_restart=True)


def pickled(workload: Any, loop: Any) -> bytes:
    """By name where a module holds them, by value for `__main__` and notebooks."""
    try:
        return cloudpickle.dumps((workload, loop))
    except Exception as error:
        raise WrongInput(
            f"the workload cannot be sent to workers: {type(error).__name__}: {error}; keep "
            "open files, locks and generators out of its constructor"
        ) from error


def is_stale(address: str, asked_for: str | None) -> bool:
    """Nobody asked for this cluster: Ray remembers it, and it is gone."""
    if asked_for or os.environ.get("RAY_ADDRESS"):
        return False
    try:
        refuse_unreachable(address)
    except WrongInput:
        return True
    return False


def refuse_unreachable(address: str) -> None:
    """Ray tries an address for minutes; a connection that is refused, or on which nobody speaks as
    its head does, says the same soon."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S) as connection:
            has_tls = os.environ.get("RAY_USE_TLS", "0") != "0"
            why = "" if has_tls or speaks_http2(connection) else "what listens there is no Ray"
    except TimeoutError:
        why = "timed out"
    except OSError as error:
        why = str(error)
    if why:
        raise WrongInput(
            f"no Ray cluster answers at address {address!r}: {why}; check it with "
            "`ray status --address ...`, or leave --address out"
        )


def speaks_http2(connection: socket.socket) -> bool:
    """Whether the other side begins with its settings, as every server of gRPC does. TimeoutError
    if it says nothing."""
    connection.settimeout(ANSWER_S)
    connection.sendall(HTTP2_HELLO)
    head = b""
    while len(head) < HTTP2_FRAME_BYTES and (piece := connection.recv(HTTP2_FRAME_BYTES)):
        head += piece
    return head[3:4] == HTTP2_SETTINGS


def find_cluster() -> str | None:
    """The cluster that `ray.init()` without an address would join, None if it would start one.

    Private API of Ray, this place only; every run without an address goes through it.
    """
    from ray._private.services import get_ray_address_from_environment

    return get_ray_address_from_environment(cast(Any, None), None)
