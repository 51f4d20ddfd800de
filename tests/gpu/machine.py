"""What this machine is, in a line; and why nothing here can be tried on it.

No experiment is here, and nothing is measured.
"""

import importlib.util
import subprocess
from pathlib import Path

import torch
from torch.cuda import nccl

OLDEST = (2, 11)
NEEDED = ("numpy", "pyarrow", "safetensors", "cloudpickle", "isal", "pytest", "pytest_timeout")
"""Packages that the workers' half of the project, and its tests, import beside torch."""
NO_SMI = "no nvidia-smi"


def refusal(num_gpus: int = 1) -> str:
    """Why `num_gpus` GPUs cannot be used here, with what to do; empty if they can."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    unusable = ""
    if not missing and not torch.cuda.is_available():
        from workers.health.gpu import why_unusable  # it needs some of them

        unusable = why_unusable()
    num_there = torch.cuda.device_count()
    return why_not(torch.__version__, missing, unusable, num_there, num_gpus)


def why_not(
    version: str, missing: list[str], unusable: str, num_there: int, num_wanted: int
) -> str:
    """See `refusal`. unusable: torch's own words; empty if it can use a GPU."""
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if found < OLDEST:
        return f"torch {version} is installed, and at least {OLDEST[0]}.{OLDEST[1]} is needed"
    if missing:
        return f"python packages are missing: {', '.join(missing)}; pip install them"
    if unusable:
        return f"torch {version} can use no GPU here ({unusable})"
    if num_there < num_wanted:
        return f"{num_wanted} GPUs are needed, and torch sees {num_there}"
    return ""


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def smi(fields: str) -> list[str]:
    """Of each GPU, as nvidia-smi says it; [NO_SMI] where there is none."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return [NO_SMI]
    return done.stdout.strip().splitlines()


def line() -> str:
    """GPUs with their UUIDs, how they are connected, driver, libraries, NUMA nodes."""
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    numa = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    parts = [
        f"{count} x {' and '.join(names)}",
        ", ".join(smi("uuid")),
        f"driver {smi('driver_version')[0]}",
        f"CUDA {torch.version.cuda}",
        f"cuDNN {torch.backends.cudnn.version()}",
        f"NCCL {'.'.join(map(str, nccl.version()))}",
        f"torch {torch.__version__}",
        f"{count} GPUs by {links()}" if count > 1 else "one GPU",
        f"{numa} NUMA nodes",
        "Ray" if has_ray() else "no Ray",
    ]
    return "; ".join(parts)


def links() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return NO_SMI
    return "NVLink" if any(f"NV{n}" in done.stdout for n in range(1, 100)) else "PCIe"
