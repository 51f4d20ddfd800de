"""Faults of a GPU's process, each in one of its own: whose does the project take them for, and is
the memory free soon afterwards?"""

import argparse
import os
import signal
import subprocess
import sys
import time

import torch

from tests.gpu.experiment import Table, main
from workers.health import gpu
from workers.train_state.out_of_memory import says_no_memory

HELD = 60
"""Gigabytes, or nine tenths of what is free."""
GONE_S, FREE_S = 5.0, 2.0
DEVICE = torch.device("cuda", 0)


def asserts() -> None:
    torch.arange(4, device=DEVICE)[torch.tensor([9], device=DEVICE)].tolist()


def reaches_beyond() -> None:
    """A kernel of Triton's writes where no memory is."""
    import triton
    from triton import language as tl

    @triton.jit
    def beyond(pointer, distance, block: tl.constexpr):
        at = tl.arange(0, block) + distance
        tl.store(pointer + at, at.to(tl.float32))

    beyond[(1,)](torch.empty(16, device=DEVICE), 1 << 40, block=16)
    torch.cuda.synchronize()


def takes_too_much() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)


FAULTS = {
    "assert": (asserts, "user"),
    "access beyond memory": (reaches_beyond, "device"),
    "out of memory": (takes_too_much, "memory"),
}


def kind_of(error: Exception) -> str:
    if says_no_memory(error):
        return "memory"
    return "device" if gpu.fault_of(error, DEVICE) else "user"


def cause(name: str) -> None:
    """In a process of its own: prints whose it is."""
    try:
        FAULTS[name][0]()
    except Exception as error:
        print("kind:", kind_of(error), flush=True)
        os._exit(0)
    print("kind: none", flush=True)


def hold(spins: bool) -> None:
    """In a process of its own, until it is killed."""
    free = torch.cuda.mem_get_info(DEVICE)[0]
    kept = torch.empty(min(HELD * 10**9, free * 9 // 10), dtype=torch.uint8, device=DEVICE)
    kept.fill_(1)
    torch.cuda.synchronize()
    if spins:
        torch.cuda._sleep(1 << 42)
    print("holds", flush=True)
    time.sleep(600)


def python(call: str) -> list[str]:
    return [sys.executable, "-c", f"from tests.gpu.one import a9_faults as a; a.{call}"]


def killed(spins: bool) -> tuple[float, float]:
    """Seconds from SIGKILL until the process is gone, and from there until its memory is free."""
    before = torch.cuda.mem_get_info(DEVICE)[0]
    process = subprocess.Popen(python(f"hold({spins})"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "holds"
    began = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    gone = time.monotonic()
    while torch.cuda.mem_get_info(DEVICE)[0] < before - (1 << 28):
        assert time.monotonic() - gone < 60, "the memory does not come back"
        time.sleep(0.01)
    return gone - began, time.monotonic() - gone


def body(table: Table, arguments: argparse.Namespace) -> None:
    for name, (_, wanted) in FAULTS.items():
        call = python(f"cause({name!r})")
        done = subprocess.run(call, capture_output=True, text=True, timeout=120)
        lines = [line for line in done.stdout.splitlines() if line.startswith("kind: ")]
        found = lines[-1].removeprefix("kind: ") if lines else f"status {done.returncode}"
        table.holds(f"{name} is taken for one of the {wanted}", found == wanted, found)
    for spins in (False, True):
        gone_s, free_s = killed(spins)
        name = "SIGKILL in a kernel" if spins else "SIGKILL with memory held"
        table.at_most(f"{name}: process gone", gone_s, GONE_S, "s")
        table.at_most(f"{name}: memory free", free_s, FREE_S, "s")


if __name__ == "__main__":
    sys.exit(main(body))
