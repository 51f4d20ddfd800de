"""How much memory a process holds, and how much more its node or container could give it.

Linux, standard library only: the pulse reads it, so that a loss for want of memory can be told.
"""

from contextlib import suppress
from pathlib import Path

PAGE_BYTES = 4096
CGROUPS = Path("/sys/fs/cgroup")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def memory_of(pid: int, cgroups: Path = CGROUPS) -> tuple[int, int]:
    """Resident bytes of a process; bytes that it can still get. OSError if it is gone."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    left = [_left_of_node(), *_left_of_containers(pid, cgroups)]
    return pages * PAGE_BYTES, min(left)


def _left_of_node() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * int(fields["MemAvailable"].split()[0])


def _left_of_containers(pid: int, cgroups: Path) -> list[int]:
    """Of each group around the process that has a limit."""
    found: list[int] = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        place = root / path.lstrip("/")
        for group in [place, *place.parents]:
            if not group.is_relative_to(root):
                break
            with suppress(OSError, ValueError, KeyError):  # no limit, or not shown in here
                found.append(_left_of(group, *(V1 if controllers else V2)))
    return found


def _left_of(group: Path, limit: str, usage: str, cache: str) -> int:
    """What is cached of files could be dropped."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / usage).read_text()) - int(stat[cache])
    return int((group / limit).read_text()) - used
