# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What the cluster's machines offer a run: their slots, and a torch that can use their GPUs.

Where a run goes from there is elastic/on_ray/driver/submission.py's, what waits is Ray's.
"""

import ctypes
import importlib.util
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayError

from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import counted
from elastic.protocol.placing import Machine

MAX_ASKED = 16
"""Machines whose torch is looked at."""
ANSWER_S = 20.0
"""How long they may take to say; a working_dir may have to reach them first."""


@dataclass(frozen=True)
class Torch:
    """The build that is installed on a machine."""

    version: str
    lack: str = ""
    """Why it can use no GPU of the machine, behind "torch 2.13"; empty if it can."""


def machines() -> list[Machine]:
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    return [
        Machine(n["NodeID"], n["NodeManagerAddress"], n["Resources"], n["Labels"])
        for n in nodes
        if n["Alive"]
    ]


def torch_here() -> Torch | None:
    """This machine's, from its version file: to import torch takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    values = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    cuda = values.get("cuda")
    if not (cuda or values.get("hip")):
        return Torch(values["__version__"], "is a build without CUDA")
    return Torch(values["__version__"], driver_lack(cuda, driver_version()) if cuda else "")


def driver_version() -> int | None:
    """Of CUDA, as 13000, that this machine's driver knows; None if there is no driver."""
    found = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return None
    return None if failed else found.value


def driver_lack(cuda: str, driver: int | None) -> str:
    """cuda: that torch was built with, as "13.0". Drivers know all minor versions of a major one,
    and all before."""
    if driver is None:
        return f"was built for CUDA {cuda}, and there is no driver"
    if driver // 1000 < int(cuda.partition(".")[0]):
        knows = f"{driver // 1000}.{driver % 1000 // 10}"
        return f"was built for CUDA {cuda}, and the driver knows {knows} only"
    return ""


def gpus_here() -> int:
    """As many as Ray will say that this machine has. Private API of Ray, this place only."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = cast(Any, get_accelerator_manager_for_resource("GPU"))
    num_gpus: int = manager.get_current_node_num_accelerators()
    visible: list[str] | None = manager.get_current_process_visible_accelerator_ids()
    return num_gpus if visible is None else min(num_gpus, len(visible))


def refuse_too_few(num_workers: int, num_gpus: int) -> None:
    """WrongInput if a Ray of this machine alone has not a GPU for each worker."""
    if num_gpus < num_workers:
        raise WrongInput(
            f"a GPU for each of {counted(num_workers, 'worker')} is needed, and this machine has "
            f"{num_gpus}; lower --workers, or use --device cpu"
        )


def torches_on(asked: Sequence[Machine]) -> dict[str, Torch]:
    """By the machine's address; who does not answer in time is left out."""
    ask = cast(Any, ray.remote(torch_here))
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
    answers = {
        ask.options(**options, label_selector={"ray.io/node-id": m.node_id}).remote(): m.ip
        for m in asked[:MAX_ASKED]
    }
    done, late = ray.wait(list(answers), num_returns=len(answers), timeout=ANSWER_S)
    for answer in late:
        ray.cancel(answer)
    found: dict[str, Torch] = {}
    for answer in done:
        try:
            torch = ray.get(answer)
        except RayError:  # workers on it will say why
            continue
        if torch is not None:
            found[answers[answer]] = torch
    return found


def choose_device(
    wish: str, num_gpus: int, torches: dict[str, Torch], can_add_gpus: bool | None = False
) -> tuple[str, str]:
    """-> "cpu" or "cuda", and a line for the user if that may surprise.

    wish: RunConfig.device. torches: of the machines with GPUs that have answered, by address.
    can_add_gpus: whether GPUs may still come where there are none; None if nobody knows.
    WrongInput if GPUs are asked for that no torch can use.
    """
    if wish == "auto" and not num_gpus and can_add_gpus:
        return "cuda", "no GPU is there yet, but the cluster can add some: the run waits for them"
    if wish == "auto" and not num_gpus and can_add_gpus is None:
        return "cpu", (
            "no GPU is there, and whether the cluster can add some is not known: the run trains "
            "on CPUs; --device cuda waits for GPUs"
        )
    if wish == "cpu" or (wish == "auto" and not num_gpus):
        return "cpu", ""
    if not torches or any(not torch.lack for torch in torches.values()):
        return "cuda", ""
    ip, torch = min(torches.items())
    fact = f"torch {torch.version} on {ip} {torch.lack}"
    if wish == "cuda":
        raise WrongInput(
            f"device='cuda', but {fact}; install one with CUDA that fits the driver where the "
            "workers run, or use --device cpu"
        )
    has = counted(num_gpus, "GPU")
    return "cpu", f"the cluster has {has}, but {fact}: the run trains on CPUs"
