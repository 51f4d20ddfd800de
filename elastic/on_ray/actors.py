# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The Ray actors: thin shells around plain classes. Who decides and who trains is elsewhere.

All are detached and named after the run, so that none dies with another; the controller ends
them, and each ends itself when it is left alone (leases).
"""

import asyncio
import ctypes
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from threading import Lock, Thread, get_native_id
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from elastic.on_ray.detection.sentinel import Sentinel
from elastic.on_ray.naming import NAMESPACE, end, this_host
from elastic.protocol.errors import WorkerFailed, WrongInput, in_words
from elastic.protocol.placing import Need
from elastic.protocol.timeouts import timeouts_of
from elastic.protocol.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

ON_THE_HEAD = {"node:__internal_head__": 0.001}
"""Resources that only the head's node has: without it there is no Ray, so only on its side of a cut
can a run go on, and it is the last one to be a spot instance. (Ray ignores a soft affinity of an
actor without resources.)"""
FIRST_PING_S = 300.0
"""A controller that never says a word to its rendezvous died within so long."""
ALONE = 4
"""So many times a controller's patience is twice the workers' lease."""
LAST_WORDS_S = 5.0
"""How long a controller stays for its driver to fetch the result."""
FIND_S = 2.0
"""How long a worker waits for the answer of a controller that it looks for."""
DRIVER_LEASE_S = 5.0
"""Without a word from the driver for this long the run ends (unless it is detached)."""
DRIVER_WATCH_S = 0.5
SAVE_ALONE_S = 2.0
"""How long a run whose driver has died may take to save its last step: with the lease, and with
what its processes need to end, it is gone within 10 s."""
STOP_ALONE_S = timeouts_of(None).lease_s
"""How long a run that finds no hangs may take to stop once its driver is gone."""
EXIT_TO_START_ANEW = 1
"""Any status but 0, by which an actor ends for good."""
NICENESS = 10
"""(0 to 19) Of what nobody waits for."""

Supervise = Callable[["ControllerActor", dict[str, Any]], Awaitable[dict[str, Any]]]


class ControllerActor:
    """Hosts `supervise` (elastic/controller/supervisor.py) and passes the driver's wishes on to
    it."""

    def __init__(self, supervise: Supervise, order: dict[str, Any]) -> None:
        self._supervise, self._order = supervise, order
        self._wishes: dict[str, Callable[[Any], Any]] = {}
        self._early: list[tuple[str, Any]] = []
        """What was wished before anybody listened."""
        self._heard = time.monotonic()
        self._is_abandoned = self._is_stopping = False
        self.place = ""
        """The run directory as a person would name it, once it exists."""
        self.has_begun = False
        """A worker is sound; before that the run may come to nothing."""
        self.waits_for = ""
        """What the run lacks, in a line; empty if it lacks nothing."""
        self.starts = ""
        """How far its first workers are, in a line; empty once it has begun, or soon will have."""
        self.link_address: tuple[str, int] | None = None
        """Where workers reach this incarnation, once it listens."""
        self.has_predecessor = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        """Ray has started this actor again after its process died."""
        self._run: asyncio.Task[dict[str, Any]] | None = None
        die_of_sigterm()
        if self.has_predecessor:  # who called `run` may be gone: a detached run's driver is
            self._begin()

    def listen(self, **wishes: Callable[[Any], Any]) -> None:
        """Who obeys `stop`, `end_now` and `note`, the ones of before included, and `scale`."""
        self._wishes, early, self._early = wishes, self._early, []
        for name, said in early:
            self._wish(name, said)

    def _wish(self, name: str, said: Any) -> None:
        if name in self._wishes:
            self._wishes[name](said)
        else:
            self._early.append((name, said))

    async def run(self) -> dict[str, Any]:
        """The run's result, at its end."""
        return await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Task[dict[str, Any]]:
        if self._run is None:
            self._run = asyncio.get_running_loop().create_task(self._supervised())
        return self._run

    async def _supervised(self) -> dict[str, Any]:
        """From start to end."""
        watch = None if self._order["detach"] else asyncio.create_task(self._watch_driver())
        try:
            return await self._supervise(self, self._order)
        except Exception:
            log.exception("the run ends without a result")  # its driver, who may be gone, hears it
            raise
        finally:
            if watch is not None:
                watch.cancel()
            me = ray.get_runtime_context().current_actor
            stay_s = 0.0 if self._is_abandoned else LAST_WORDS_S
            asyncio.get_running_loop().call_later(stay_s, end, me)

    def start_anew(self) -> None:
        """End this process, so that Ray starts another one; not once all workers are gone, which
        leave when their lease is over."""
        if find_workers(self._order["run_id"]):
            os._exit(EXIT_TO_START_ANEW)

    async def keep_alive(self) -> tuple[str, bool, str, str]:
        """The driver lives. Returns the run directory's place, empty while there is none, whether
        the run has begun, what it waits for, and how far its first workers are."""
        self._heard = time.monotonic()
        return self.place, self.has_begun, self.waits_for, self.starts

    async def address(self) -> tuple[str, int] | None:
        """For workers that have lost their controller."""
        return self.link_address

    async def stop(self, reason: str) -> None:
        """Finish the step, then end the run as stopped; the driver need not live to see it."""
        self._is_stopping = True
        self._wish("stop", reason)

    async def end_now(self, reason: str) -> None:
        """End the run at once."""
        self._wish("end_now", reason)

    async def scale(self, workers: tuple[int, int]) -> str | tuple[int, int]:
        """Have so many workers, from min to max, from now on; the answer is what is in force then,
        or why not."""
        if (obey := self._wishes.get("scale")) is None:
            return "the run only begins; try again in a moment"
        return await obey(workers)

    async def note(self, fields: dict[str, Any]) -> None:
        """Something about the data that belongs into the journal."""
        self._wish("note", fields)

    async def _watch_driver(self) -> None:
        while (begun := time.monotonic()) - self._heard < DRIVER_LEASE_S:
            await asyncio.sleep(DRIVER_WATCH_S)
            now = time.monotonic()
            frozen_s = max(0.0, now - begun - 2 * DRIVER_WATCH_S)
            self._heard = min(now, self._heard + frozen_s)  # its words wait to be read
        self._is_abandoned = True
        why = "the driver is gone"
        if not self._is_stopping:
            self._wish("stop", why)
            await asyncio.sleep(SAVE_ALONE_S)
            why += f", and the run did not stop within {SAVE_ALONE_S:g} s"
        else:  # `ray job stop` kills it after 3 s, which no long step waits for
            if self._order["config"].detect_s is not None:  # what hangs is found
                return
            await asyncio.sleep(STOP_ALONE_S)
            why += f", and the run has not stopped for {STOP_ALONE_S:g} s; detect_s is None"
        await self.end_now(why)


def import_patiently(*modules: str) -> None:
    """In a thread of its own, which gives up its priority: on Linux that is a thread's, and only
    the privileged get it back. torch takes seconds to import."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), NICENESS)
    for module in modules:
        with suppress(ImportError):  # who needs it will say so
            import_module(module)


def see_gpus(is_wanted: bool) -> None:
    """Before CUDA is there: this process sees the GPUs that Ray gave it, also where Ray leaves
    CUDA_VISIBLE_DEVICES alone (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES), or none at all."""
    given: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not is_wanted:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif given:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given)


class WorkerActor:
    """One slot: a CPU slot or a GPU."""

    def __init__(self, workload: bytes) -> None:
        self._workload = workload

    def run(self, spec: WorkerSpec) -> None:
        """Train until the controller ends this process; raises what the user's code raises."""
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: huge pages, before it loads
        see_gpus(spec.device == "cuda")
        if spec.is_standby:
            from workers.torch_private.compilation import DYNAMO  # loads no torch

            importing = Thread(target=import_patiently, args=(DYNAMO, "workers.worker"))
            importing.start()
            importing.join()
        from elastic.on_ray.feed.client import leave_ray, open_feed
        from workers.worker import Around, Worker

        node_id = ray.get_runtime_context().get_node_id()
        spec = replace(spec, host=this_host(), node=node_id)
        around = Around(
            node_id=node_id,
            find_controller=partial(find_controller, spec.run_id),
            open_feed=partial(open_feed, spec, self._workload),
            enter_child=leave_ray,
            drain_node=partial(keep_free, node_id),
        )
        worker = Worker(spec, self._workload, around)
        try:
            worker.run()
        except Exception as error:  # the controller lacks its class
            raise WorkerFailed(in_words(error), pickled(error), worker.rank) from None

    def is_free(self) -> bool:
        """Answers once it has a place, and after that once `run` has ended: how a controller that
        did not call it learns of that."""
        return True


class RendezvousActor:
    """Hosts one store per generation, apart from trainers and controller."""

    def __init__(self) -> None:
        from workers.distributed.rendezvous import Rendezvous

        self._rendezvous, self._lock = Rendezvous(this_host()), Lock()
        self._sentinel: Sentinel | None = None
        self._heard, self._alone_s = time.monotonic(), FIRST_PING_S
        Thread(target=self._mind_lease, name="lease", daemon=True).start()

    def open(self, generation: int) -> tuple[str, int, str]:
        with self._lock:
            return self._rendezvous.open(generation)

    def forget(self) -> None:
        with self._lock:
            self._rendezvous.forget()

    def ping(self, pid: int, patience_s: float) -> int:
        """From the controller, whose process is on this node; answers with this process's."""
        if self._sentinel is None or self._sentinel.pid != pid:
            self._sentinel = Sentinel(pid, patience_s)
        self._sentinel.hear()
        self._heard, self._alone_s = time.monotonic(), ALONE * patience_s
        return os.getpid()

    def _mind_lease(self) -> None:
        """No controller comes any more, and the workers have left: Ray keeps a detached actor."""
        while time.monotonic() - self._heard < self._alone_s:
            time.sleep(1.0)
        log.warning('rendezvous="no word from a controller for %g s, ends"', self._alone_s)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def die_of_sigterm() -> None:
    """As of SIGKILL: Ray starts the actor again. Ray's own handler would leave an asynchronous
    actor half alive, and Python sets handlers in the main thread only, where no method runs."""
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL


def spawn_worker(*, run_id: str, name: str, workload: Any, need: Need) -> ActorHandle[Any]:
    """A pending actor: it runs as soon as Ray has a slot for it, and is demand until then."""
    options: dict[str, Any] = {
        "name": f"{run_id}-{name}",
        "get_if_exists": True,  # it may be asked for again
        "namespace": NAMESPACE,
        "lifetime": "detached",
        **need.options,
        "max_restarts": 0,
        "max_concurrency": 1,
    }
    return cast(Any, ray.remote(WorkerActor).options(**options).remote(workload))


def start_rendezvous(run_id: str) -> ActorHandle[Any]:
    """On the node of its caller, the controller: no partition can come between the two.

    A controller that comes back on another node has one there: the old one's node may be gone.
    """
    here = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "label_selector": {"ray.io/node-id": here},
        "name": f"{run_id}-rendezvous-{here[:12]}",
        "get_if_exists": True,  # it outlives a controller
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 2,  # a ping does not wait for a store
    }
    return cast(Any, ray.remote(RendezvousActor).options(**options).remote())


def start_controller(run_id: str, supervise: Supervise, order: dict[str, Any]) -> ActorHandle[Any]:
    options: dict[str, Any] = {
        "name": f"{run_id}-controller",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "resources": ON_THE_HEAD,
        "scheduling_strategy": "DEFAULT",  # not in the placement group of its driver, a Tune trial
        "max_restarts": -1,  # its successor takes the run over
        "max_task_retries": -1,
        "max_concurrency": 16,
    }
    return cast(Any, ray.remote(ControllerActor).options(**options).remote(supervise, order))


def find_controller(run_id: str) -> tuple[str, int] | None:
    """Where workers reach the run's controller now; None while it is away."""
    try:
        controller = ray.get_actor(f"{run_id}-controller", namespace=NAMESPACE)
        return ray.get(cast(Any, controller).address.remote(), timeout=FIND_S)
    except (RayError, ValueError):  # there is none, or it is being started again
        return None


def find_workers(run_id: str) -> dict[int, ActorHandle[Any]]:
    """The run's live worker actors by number, pending ones included."""
    found: dict[int, ActorHandle[Any]] = {}
    for entry in cast("list[dict[str, str]]", ray.util.list_named_actors(all_namespaces=True)):
        number = entry["name"].removeprefix(f"{run_id}-w")
        if entry["namespace"] == NAMESPACE and number.isdigit():
            with suppress(ValueError):  # it has just died
                found[int(number)] = ray.get_actor(entry["name"], namespace=NAMESPACE)
    return found


def share(content: bytes) -> Any:
    """A reference to `content` that every actor may be given."""
    return ray.put(content)


def keep_free(node_id: str, left_s: float) -> None:
    """Nothing new is to come to this node. If Ray cannot be told, the run knows of it all the
    same."""
    from elastic.on_ray.placement.drain import drain_node

    try:
        drain_node(node_id, "a spot notice", left_s)
    except (RayError, WrongInput, RuntimeError) as error:
        log.warning('spot reason="Ray does not drain the node: %s"', in_words(error))


def pickled(error: BaseException) -> bytes:
    """Empty if it does not survive pickling."""
    try:
        content: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(content)
    except Exception:
        return b""
    return content
