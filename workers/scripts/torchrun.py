"""A script that torchrun starts, as the function of a script run; its process group.

It is run as `python SCRIPT` would run it, in the worker's process, and again after a loss.
What the command line makes of torchrun's options is elastic/torchrun.py's.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic.protocol.errors import WrongInput
from workers.scripts.default_group import DefaultGroup
from workers.scripts.ranks import Place, environment_set


class ScriptCall(Protocol):
    """One call of the script: `workers.script_loop.Call`."""

    @property
    def group(self) -> DefaultGroup | None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def place(self) -> Place: ...


class ScriptExited(RuntimeError):
    """The script ended itself with a status that is not 0."""


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What is run in every worker."""

    script: str
    """A file, from the folder that every node has; or the name of a module."""
    arguments: tuple[str, ...]
    directory: str
    """Where the command was given: the script's own files are found from there."""
    is_module: bool = False

    def __call__(self) -> None:
        target = self.script if self.is_module else str(Path.cwd() / self.script)
        with self._started():
            try:
                if self.is_module:
                    runpy.run_module(target, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(target, run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise ScriptExited(f"the script called sys.exit({end.code!r})") from None

    @contextmanager
    def _started(self) -> Iterator[None]:
        """Within: the arguments and the working directory of the command."""
        arguments, sys.argv = sys.argv, [self.script, *self.arguments]
        try:
            with self._in_directory():
                yield
        finally:
            sys.argv = arguments

    def _in_directory(self) -> contextlib.AbstractContextManager[Any]:
        if os.path.isdir(self.directory):
            return contextlib.chdir(self.directory)
        print(f"elastic: {self.directory} is not on this node: the script runs in {Path.cwd()}")
        return contextlib.nullcontext()


class Initialisation:
    """Whether the script has a default group: none at first, ours once it asks for one."""

    def __init__(self, group: DefaultGroup) -> None:
        self._group = group
        self.has_been = False

    def begin(self, backend: Any, world_size: int, rank: int) -> None:
        """ValueError for what this run has not."""
        if dist.group.WORLD is not None:
            raise ValueError("trying to initialize the default process group twice!")
        group = self._group
        if world_size not in (-1, group.size()) or rank not in (-1, group.rank()):
            raise ValueError(
                f"init_process_group(rank={rank}, world_size={world_size}): this process is rank "
                f"{group.rank()} of {group.size()}, as RANK and WORLD_SIZE say"
            )
        if "nccl" in str(backend or "") and group.inner.backend_name != "nccl":
            raise ValueError(
                f"init_process_group({backend!r}): the workers of this run have CPUs only; use "
                "gloo, or machines with GPUs"
            )
        self.has_been = True
        dist.group.WORLD = group

    def end(self) -> None:
        dist.group.WORLD = None


_at_hand: list[Initialisation] = []
"""Of the script that is running now. A module that a script imports may keep the functions below:
they serve every call."""
_torchs_init, _torchs_destroy = dist.init_process_group, dist.destroy_process_group


def init_process_group(
    backend: Any = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *rest: Any,
    **named: Any,
) -> None:
    """torch's, answered by the group of the generation: there is nothing to meet at any more."""
    if not _at_hand:
        return _torchs_init(backend, init_method, timeout, world_size, rank, *rest, **named)
    return _at_hand[-1].begin(backend, world_size, rank)


def destroy_process_group(group: Any = None) -> None:
    if not _at_hand or (group is not None and group is not dist.group.WORLD):
        return _torchs_destroy(group)
    assert dist.group.WORLD is not None, "Process group cannot be None"
    return _at_hand[-1].end()


@contextmanager
def started_by_torchrun(call: ScriptCall) -> Generator[None]:
    """Within, the script finds what torchrun gives it. WrongInput at the end for a script of
    several workers that has never asked for a process group."""
    assert call.group is not None
    initialisation, before = Initialisation(call.group), dist.group.WORLD
    if call.group.course is not None:
        call.group.course.hear_rank_asked()  # RANK
    # a worker sees its own GPU only, as under torchrun --virtual-local-rank
    local = {"LOCAL_RANK": "0"} if call.device.type == "cuda" else dict[str, str]()
    with environment_set(local), _answered(initialisation):
        dist.group.WORLD = None
        try:
            yield
        finally:
            dist.group.WORLD = before
    size = call.place.world_size
    if size > 1 and not initialisation.has_been:
        raise WrongInput(
            f"the script ran {size} times without a process group: each worker trained alone, and "
            "nothing was shared; call torch.distributed.init_process_group(), or use one worker"
        )


@contextmanager
def _answered(initialisation: Initialisation) -> Iterator[None]:
    """Within, torch's two functions are ours."""
    rooms: tuple[Any, ...] = (dist, distributed_c10d)
    _at_hand.append(initialisation)
    for room in rooms:
        room.init_process_group, room.destroy_process_group = (
            init_process_group,
            destroy_process_group,
        )
    try:
        yield
    finally:
        _at_hand.pop()
        for room in rooms:
            room.init_process_group, room.destroy_process_group = _torchs_init, _torchs_destroy
