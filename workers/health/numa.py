"""Which CPUs a worker's process runs on: those of its GPU's NUMA node, where a machine has several.

Pinned memory is then of that node, too, since Linux takes it where the thread that asks runs. How
far a GPU's memory is from a CPU's is the machine's business.
"""

import logging
import os
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)
PCI = Path("/sys/bus/pci/devices")
SPARE = 2
"""CPUs that a worker needs beside those of its intra-op threads: for copies and connections."""


def run_near(address: str, least: int, devices: Path = PCI) -> None:
    """Before the GPU is used, and before this thread starts those that serve it: all of them run
    near it. Other threads of this process run where they did, and so do loaders forked before.

    address: of the GPU, on PCI. least: fewer CPUs are no gain. What this process was allowed is
    only ever cut down."""
    allowed = os.sched_getaffinity(0)
    chosen = choose(allowed, near(address, devices), least)
    if chosen is None:
        return
    try:
        os.sched_setaffinity(0, chosen)
    except OSError as error:  # a sandbox may refuse: then it runs where it did
        log.warning('numa="not bound" gpu=%s cpus=%s reason="%s"', address, listed(chosen), error)
        return
    log.info("numa=bound gpu=%s cpus=%s of=%s", address, listed(chosen), listed(allowed))


def near(address: str, devices: Path) -> set[int]:
    """The CPUs next to a PCI device, as Linux numbers them; empty if it does not say."""
    try:
        return parsed((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def choose(allowed: Collection[int], close: Collection[int], least: int) -> set[int] | None:
    """What is left of `allowed`; None where it is to stay as it is: the machine has one node,
    nobody knows the GPU's, or too few of its CPUs are allowed."""
    chosen = set(allowed) & set(close)
    return chosen if least <= len(chosen) < len(allowed) else None


def parsed(text: str) -> set[int]:
    """Of "0-3,8": Linux's list of CPUs. ValueError if it is none."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1)}


def listed(cpus: Collection[int]) -> str:
    """The inverse of `parsed`."""
    numbers, spans = sorted(cpus), list[tuple[int, int]]()
    for cpu in numbers:
        low = spans.pop()[0] if spans and spans[-1][1] == cpu - 1 else cpu
        spans.append((low, cpu))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
