"""Torch 2.11 and 2.12 in tests on a GPU: a function that had another name until 2.13.

A machine with a GPU may have an older torch and no way to another. Runs refuse it for whatever
needs private parts (workers/torch_private/version.py); tests try it, and say which torch it was.
FSDP2's Python must be that of 2.13 (README.md).
"""

from typing import Any

import torch
from torch.distributed import distributed_c10d

from workers.torch_private import version


def allow() -> None:
    """In this process. Nothing happens with a torch that is tested."""
    if not version.untested():
        return
    version.TESTED = ".".join(torch.__version__.split(".")[:2])
    groups: Any = distributed_c10d
    if not hasattr(groups, "_register_pg_in_world"):
        groups._register_pg_in_world = groups._update_process_group_global_state
