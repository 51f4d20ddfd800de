"""`elastic torchrun [torchrun's options] SCRIPT [arguments]`: the driver's side.

The options are read by torch's own parser. What runs in the workers is
workers/scripts/torchrun.py's.
"""

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NoReturn, cast

from elastic.driver.launch import Result
from elastic.driver.script_level import OPTION, may_go_on_in_place
from elastic.driver.scripts import ScriptRun, run_script
from elastic.driver.waiting import Progress
from elastic.protocol.errors import WrongInput
from elastic.store.files import place_of

NO_EFFECT = (
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_conf",
    "monitor_interval",
    "start_method",
    "event_log_handler",
    "role",
    "redirects",
    "tee",
    "local_ranks_filter",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "node_rank",
    "master_addr",
    "master_port",
    "local_addr",
    "logs_specs",
    "signals_to_handle",
    "shutdown_timeout",
)
"""Of torchrun's options: they are told where they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a command line asks for."""

    script: str
    """A file, or the name of a module."""
    arguments: tuple[str, ...]
    is_module: bool
    workers: tuple[int, int]
    """With how many at least it goes on, and how many are wanted."""
    is_range: bool
    """It begins with the least; else with all."""
    device: str
    max_restarts: int
    goes_in_place: bool
    """After a loss, where it can."""
    storage: str
    name: str
    notes: tuple[str, ...]
    """What has no effect, a line each."""

    @property
    def place(self) -> str:
        """The run directory."""
        return place_of(self.storage, self.name)


def request_of(words: Sequence[str]) -> Request:
    """WrongInput for what cannot be read or is not supported."""
    asked, defaults = parsed(words)
    if asked.no_python:
        raise WrongInput("--no-python: elastic runs Python scripts in its workers' processes")
    least, most, device = workers_of(asked)
    if asked.max_restarts < 0:
        raise WrongInput(f"--max-restarts must be at least 0, got {asked.max_restarts}")
    is_range, script = least != most, asked.training_script
    is_named = asked.log_dir and asked.rdzv_id != defaults.rdzv_id
    return Request(
        script=script,
        arguments=tuple(asked.training_script_args),
        is_module=asked.module,
        workers=(least if is_range else ceil(most / 2), most),
        is_range=is_range,
        device=device,
        max_restarts=asked.max_restarts,
        goes_in_place=may_go_on_in_place(asked.script_level),
        storage=str(Path(asked.log_dir or tempfile.mkdtemp(prefix="elastic-runs-")).resolve()),
        name=asked.rdzv_id if is_named else f"{Path(script).stem}-{os.getpid()}",
        notes=notes_of(asked, defaults),
    )


def notes_of(asked: Namespace, defaults: Namespace) -> tuple[str, ...]:
    """What has no effect, a line each."""
    notes = [
        f"--{option.replace('_', '-')} has no effect: the cluster is Ray's"
        for option in NO_EFFECT
        if getattr(asked, option, None) != getattr(defaults, option, None)
    ]
    if (binding := getattr(asked, "numa_binding", None)) not in (None, "node"):
        notes.append(f"--numa-binding {binding} has no effect: it is `node` on machines with GPUs")
    return tuple(notes)


def parsed(words: Sequence[str]) -> tuple[Namespace, Namespace]:
    """By torch's own parser and an option of ours; and what stands there if nothing is given."""
    from torch.distributed.run import get_args_parser

    parser: Any = get_args_parser()
    parser.prog = "elastic torchrun"
    parser.add_argument(OPTION, OPTION.replace("script-", "script_"))

    def refuse(message: str) -> NoReturn:
        raise WrongInput(f"elastic torchrun: {message}; see `elastic torchrun --help`")

    parser.error = refuse
    return parser.parse_args(list(words)), parser.parse_args(["script"])


def workers_of(asked: Namespace) -> tuple[int, int, str]:
    """The least, the most, and which device they need."""
    from torch.distributed import run as torchs

    try:
        least, most = torchs.parse_min_max_nnodes(asked.nnodes)
        each: int = cast(Any, torchs).determine_local_world_size(asked.nproc_per_node)
    except (RuntimeError, ValueError) as error:
        raise WrongInput(f"elastic torchrun: {error}") from error
    if not 0 < least <= most or each < 1:
        raise WrongInput(
            f"elastic torchrun: --nnodes {asked.nnodes} --nproc-per-node {asked.nproc_per_node} "
            "make no workers"
        )
    devices = {"gpu": "cuda", "cpu": "cpu"}
    return least * each, most * each, devices.get(asked.nproc_per_node, "auto")


def run(request: Request, on_progress: Progress) -> Result:
    """Raises what `run_config` raises; WrongInput for a script that is not there."""
    from workers.script_loop import NOT_HIGHER, ScriptLoop
    from workers.scripts.torchrun import Torchrun, started_by_torchrun

    folder, script = place_of_script(request)
    least, most = request.workers
    asked = ScriptRun(
        script=script,
        folder=folder,
        storage=request.storage,
        name=request.name,
        workers=request.workers,
        is_range=request.is_range,
        device=request.device,
        max_failures=request.max_restarts,
    )
    loop = ScriptLoop(
        function=Torchrun(script, request.arguments, os.getcwd(), request.is_module),
        place=request.place,
        name=request.name,
        max_failures=request.max_restarts,
        installed=started_by_torchrun,
        goes_in_place=request.goes_in_place,
    )
    check_settings(asked)
    for note in request.notes:
        print(f"elastic: {note}", file=sys.stderr)
    level, why = ("0, restart in place,", f"; {NOT_HIGHER}")
    if loop.goes_in_place:
        level, why = "1, commit in place,", "; where its model is in DDP it goes on instead"
    print(
        f"elastic: {script} runs at level {level} on {most} workers (at least {least}): after a "
        "loss it is run again in the same processes, on those that are left; as it reports no "
        f"checkpoint, it does not grow again{why}",
        file=sys.stderr,
    )
    print(f"elastic: run directory {request.place}", file=sys.stderr)
    return run_script(asked, loop, on_progress)


def check_settings(asked: ScriptRun) -> None:
    """WrongInput for a name that no run may have and the like."""
    try:
        _ = asked.config
    except ValueError as error:
        raise WrongInput(f"elastic torchrun: {error}") from error


def place_of_script(request: Request) -> tuple[Path, str]:
    """The folder that every node needs, and the script from there, or its module."""
    if request.is_module:
        return Path.cwd(), request.script
    file = Path(request.script).expanduser().resolve()
    if not file.is_file():
        raise WrongInput(f"there is no script {file}")
    return file.parent, file.name
