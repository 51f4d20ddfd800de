"""The processes of this machine, as /proc shows them."""

import contextlib
from pathlib import Path


def sibling(pid: int, title: bytes) -> int:
    """The process beside it that is called `title`: of its Ray node, or of its fork server."""
    found = [p for p in running() if parent(p) == parent(pid) and title in about(p, "cmdline")]
    assert len(found) == 1, found
    return found[0]


def running() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def parent(pid: int) -> int:
    """0 if it has ended."""
    return int((about(pid, "stat").rpartition(b")")[2].split()[1:2] or [0])[0])


def about(pid: int, what: str) -> bytes:
    """Empty if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/{what}").read_bytes()
    return b""
