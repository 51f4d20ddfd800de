"""`run()`: from a workload and a RunConfig to a result. The driver's side of a run.

What happens in the controller's process is elastic/controller/supervisor.py's; this module submits
it. Until it ends, waiting.py waits and passes Ctrl-C on.
"""

import importlib.metadata
import pickle
import secrets
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elastic.config import RunConfig
from elastic.driver import resume
from elastic.driver.display import progress_shown
from elastic.driver.idle_ranks import idle_note
from elastic.driver.starting import be_silent, slow_step, tell
from elastic.driver.target import target_of
from elastic.driver.waiting import Onlooker, Progress, wait
from elastic.protocol import nccl_settings
from elastic.protocol.errors import WrongInput
from elastic.protocol.named import function_named
from elastic.store.files import (
    first_line,
    leave_probe,
    missing_folders,
    open_folder,
    place_of,
    reach_folder,
    refuse_unwritable,
    remove_empty,
    remove_probe,
)
from elastic.store.remote import AWAY_PAUSES_S, patiently, shown_uri, unknown_host
from elastic.workload import Workload

T = TypeVar("T")
REPORTED = {
    "elastic": "elastic-ray-trainer",
    **{n: n for n in ("torch", "ray", "pyarrow", "numpy")},
}
"""By the name in config.json, the package whose version it has."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The content of result.json, and where the run directory is."""

    outcome: str
    """succeeded, failed, stopped; or detached, while it goes on."""
    steps: int = 0
    """Committed steps."""
    loss: float | None = None
    """Of the last committed step; None if it was not finite or there was no step."""
    weights_sha256: str = ""
    """Of the final weights, in hexadecimal; empty if the run did not get that far."""
    generations: int = 0
    """Memberships that were formed since the run was last started, a count."""
    lost_steps: int = 0
    """Committed steps that had to be done again."""
    goodput: float = 0.0
    """The part of the wall time spent on steps that stayed committed, 0 to 1."""
    badput: dict[str, float]
    """Seconds of the other time, by what it went to."""
    recoveries: list[dict[str, Any]]
    """One per loss: its cause, the seconds of each phase and in total, lost_steps."""
    run_directory: str = ""
    """A path or URI; empty if the run ended before it was opened."""
    level: int | None = None
    """Of a script's run: 0 restart in place, 1 commit in place; None for a Workload's."""
    level_reason: str = ""
    """Why it is no higher one."""


class RunFailed(RuntimeError):
    """The run failed. `.result` says how far it came; `__cause__` is the user's exception, and
    `.rank` that of the worker which raised it (None before its first generation)."""

    def __init__(self, message: str, result: Result, rank: int | None = None) -> None:
        super().__init__(message)
        self.result, self.rank = result, rank

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFailed, (self.args[0], self.result, self.rank)


def run(
    workload: Workload,
    *,
    loop: Callable[[Any], None] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train `workload`; `settings` are RunConfig's fields. Blocks until the run ends.

    loop: your own training loop `loop(session)`; default: workers.loop.fit.
    progress: whether stderr shows how the run goes, as `elastic run` does; default: in a terminal
    and in a notebook.
    A run directory that holds a finished run of the same settings gives its result at once.
    Raises ValueError for wrong settings or a workload that cannot work, found before it trains.
    Raises RunFailed for failure, also if storage stays away before it begins; ControllerLost, a
    RuntimeError, if the run's controller died.
    """
    config = RunConfig(**settings)
    target = target_of(workload)
    arguments = {k: v for k, v in vars(workload).items() if not k.startswith("_")}
    try:
        with progress_shown(progress) as on_progress:
            return run_config(
                workload,
                config,
                target=target.spelled,
                arguments=arguments,
                folder=target.folder,
                module=target.module,
                source=target.source,
                loop=loop,
                on_progress=on_progress,
            )
    except WrongInput as error:
        raise ValueError(str(error)) from error


def run_config(
    workload: Workload,
    config: RunConfig,
    *,
    target: str,
    arguments: dict[str, Any],
    folder: Path | None,
    module: str | None = None,
    source: Path | None = None,
    loop: Callable[[Any], None] | None = None,
    on_progress: Progress | None = None,
    detach: bool = False,
    is_silent: bool = False,
    then_workers: tuple[int, int] | None = None,
) -> Result:
    """As `run`, for settings that are already checked; raises WrongInput for wrong input.

    target, arguments: how the workload was named and constructed, for config.json.
    folder: what every node needs on its path to import the workload by name.
    source: the file of its class; that it has changed since the last start is told.
    on_progress: called often with the run directory while the run goes on, in another thread.
    detach: return as soon as the run has started; it goes on without this process.
    is_silent: what takes long until the run has begun is not told.
    then_workers: from how many workers to how many, once the run has begun with those of config.
    """
    step = partial(slow_step, tell=be_silent if is_silent else tell)
    if sys.platform != "linux":
        raise WrongInput(f"elastic runs on Linux only, this is {sys.platform}")
    storage = config.storage or tempfile.mkdtemp(prefix="elastic-runs-")
    name = config.name or f"{type(workload).__name__.lower()}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    named = {**config.to_json(), "storage": storage, "name": name}
    place = place_of(storage, name)
    missing = [Path(storage)] if config.storage is None else missing_folders(storage)
    with step(f"looking at storage {shown_uri(storage)}"):
        folder_of_run = asked(storage, partial(reach_folder, storage)).at(name)
        read = partial(resume.read_past_run, folder_of_run)
        past = asked(storage, partial(resume.await_silence, read, be_silent if is_silent else tell))
    content = resume.config_json(named, target, arguments, versions(), source, past=past)
    if (result := finished_before(place, past, content)) is not None:
        return result
    check_workload(workload, config, loop)
    try:
        check_writable(storage)
        if not is_silent and (note := idle_note(config)):
            print(f"elastic: {note}", file=sys.stderr)
        newest = asked(storage, partial(resume.newest_generation, folder_of_run, past))
        record: dict[str, Any] = {
            "storage": storage,
            "name": name,
            "content": content,
            "earlier_generations": newest,
            "then_workers": then_workers,
        }
        answer = run_on_ray(
            workload,
            config,
            record,
            folder=folder,
            loop=loop,
            onlooker=Onlooker(
                on_progress,
                place=place,
                tell_place=config.storage is None,
                is_silent=is_silent,
                is_script=target.startswith(resume.SCRIPT),
            ),
            detach=detach,
            slow_step=step,
        )
    finally:
        remove_empty(missing)
    if answer is None:
        return Result(outcome="detached", badput={}, recoveries=[], run_directory=place)
    if answer["storage_warning"]:
        print(f"elastic: warning: {answer['storage_warning']}", file=sys.stderr)
    return conclude(answer, place)


def finished_before(
    place: str, past: resume.PastRun | None, content: dict[str, Any]
) -> Result | None:
    """What a run that is over came to, None for one that goes on; whichever it is, is told.

    content: config.json as it would be written now.
    """
    match resume.compare(place, past, content):
        case resume.AlreadyFinished() as finished:
            print(finished, file=sys.stderr)
            return Result(**finished.result, run_directory=place)
        case resume.Resumed() if past is not None:
            for changed in (resume.changed_code, resume.changed_parallel):
                if note := changed(past.config, content):
                    print(note, file=sys.stderr)
        case _:
            pass
    return None


def check_workload(
    workload: Workload, config: RunConfig, loop: Callable[[Any], None] | None
) -> None:
    """WrongInput for what the settings ask of it in vain."""
    if config.eval_every is not None and loop is None and not hasattr(workload, "evaluate"):
        raise WrongInput(
            f"eval_every={config.eval_every}, but {type(workload).__name__} has no "
            "evaluate(self, session); define it, or leave eval_every out"
        )
    if workload.loader_processes < 1:
        raise WrongInput(f"loader_processes must be at least 1, got {workload.loader_processes}")
    if strategy := config.parallel.strategy:
        function_named(strategy, f"parallel='{config.parallel}' names no strategy")


def asked(storage: str, read: Callable[[], T]) -> T:
    """What storage says before the run begins; RunFailed if it is away for as long as workers wait
    for it, too. WrongInput at once if its host has no address."""
    shown, told = shown_uri(storage), list[str]()

    def tell_first(error: OSError, _: float) -> None:
        if host := unknown_host(error):
            raise WrongInput(
                f"storage {shown!r} cannot be used: there is no host {host!r}; mend its name, "
                "or the name service of this machine"
            ) from None
        told.append(first_line(error).replace(storage, shown))
        if len(told) == 1:
            wait_s = sum(AWAY_PAUSES_S)
            tell(f"storage {shown!r} does not answer: {told[0]}; asked again for {wait_s:.0f} s")

    try:
        return patiently(read, pauses_s=AWAY_PAUSES_S, tell=tell_first)
    except OSError as error:
        why = first_line(error).replace(storage, shown)
        raise RunFailed(
            f"storage {shown!r} does not answer: {why}; start the same run again when it does",
            Result(outcome="failed", badput={}, recoveries=[]),
        ) from None


def run_on_ray(
    workload: Workload,
    config: RunConfig,
    record: dict[str, Any],
    *,
    folder: Path | None,
    loop: Callable[[Any], None] | None,
    onlooker: Onlooker,
    detach: bool,
    slow_step: Callable[[str], AbstractContextManager[None]],
) -> dict[str, Any] | None:
    """Find or start a cluster, submit the run and wait; the controller's answer as `wait` gives it.

    record: the order's part for the run directory: storage, name, content (its config.json),
    and the newest generation of its earlier launches.
    """
    from elastic.on_ray.driver.submission import (  # ray loads here
        ClusterRequest,
        RayDriver,
        pickled,
    )

    content = pickled(workload, loop)  # what cannot be sent is refused before anything starts
    driver = RayDriver(
        ClusterRequest(
            address=config.resources.address,
            min_workers=config.min_workers,
            num_slots=config.max_workers + config.standby,
            need=config.resources.need,
            device=config.resources.device,
            folder=folder,
            run_directory=place_of(record["storage"], record["name"]),
            detach=detach,
            before_start=partial(check_bucket, record["storage"]),
            slow_step=slow_step,
        )
    )
    try:
        order: dict[str, Any] = {
            "run_id": f"elastic-{secrets.token_hex(4)}",
            "token": secrets.token_hex(16),
            "config": config,
            **record,
            "content": {
                **record["content"],
                **nccl_settings.recorded(driver.device),
                "driver": driver.whereabouts,
            },
            "device": driver.device,
            "folder": driver.folder_on_nodes,
            "detach": detach,
            "workload": content,
            "probe": leave_local_probe(record["storage"], driver),
        }
        driver.submit(supervise, order)
        answer = wait(driver, onlooker, detach)
        if order["probe"] is not None:
            remove_probe(order["probe"])
    finally:
        driver.close()
    return answer


async def supervise(actor: Any, order: dict[str, Any]) -> dict[str, Any]:
    """In the controller's process, which alone loads what a run is led with."""
    from elastic.controller import supervisor

    return await supervisor.supervise(actor, order)


def leave_local_probe(storage: str, driver: Any) -> Any:
    """A file that every node must see, where storage is a local path and there are other nodes."""
    if open_folder(storage).local is None or driver.is_embedded:
        return None
    return leave_probe(storage)


def check_writable(storage: str) -> None:
    """WrongInput if nothing can be written there; object stores say so when the run begins."""
    if open_folder(storage).local is not None:
        remove_probe(leave_probe(storage))


def check_bucket(storage: str) -> None:
    """WrongInput if this machine, whose own workers will write there, may not. A store that is away
    is waited for by the run."""
    if open_folder(storage).local is None:
        with suppress(OSError):
            refuse_unwritable(storage)


def conclude(answer: dict[str, Any], place: str) -> Result:
    """The controller's answer as a result. Raises RunFailed from the user's error; WrongInput as
    long as no generation had formed: "nothing started" is not said of a run that has trained."""
    if answer["wrong_input"] is not None and not answer["result"]["generations"]:
        raise WrongInput(answer["wrong_input"])
    result = Result(**answer["result"], run_directory=place if answer["is_open"] else "")
    if result.outcome == "failed":
        failed = RunFailed(answer["reason"], result, answer["failed_rank"])
        raise failed from unpickled(answer["user_error"])
    return result


def versions() -> dict[str, str]:
    """Installed versions by package, for config.json; "unknown" of what runs from its sources."""
    found = dict[str, str]()
    for name, package in REPORTED.items():
        found[name] = "unknown"
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(package)
    return found


def unpickled(content: bytes) -> BaseException | None:
    """The user's exception, from our own worker through Ray; None if there is none, or if its
    class cannot be had here (the reason tells it)."""
    if not content:
        return None
    try:
        return pickle.loads(content)
    except Exception:
        return None
