"""Process groups by name, as torch looks them up: its meshes and functional collectives know a name
only.

A name carries run and generation and is never given twice, so that who still has a dead
generation's name finds nothing instead of the wrong group.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from workers.torch_private.c10d import enter_group, remove_group

_given: Counter[str] = Counter()
_lock = threading.Lock()


def unused(name: str) -> str:
    """`name`, or with a number behind it where this process has given it before: ranks may be
    threads of one process."""
    with _lock:
        _given[name] += 1
        number = _given[name]
    return name if number == 1 else f"{name}#{number}"


def register(
    group: dist.ProcessGroup, backend_name: str, ranks: Sequence[int], store: Any = None
) -> None:
    """Torch finds `group` by its name from now on.

    ranks: of the group's members in the generation, in the order of the group's own ranks. store:
    torch wants one where it is to make groups of some of the ranks.
    """
    own = {rank: index for index, rank in enumerate(ranks)}
    enter_group(group, backend_name, own, store)


def unregister(group: dist.ProcessGroup) -> None:
    """Torch finds it no longer. Nothing happens to a group that is not registered."""
    remove_group(group)
