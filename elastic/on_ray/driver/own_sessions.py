# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Sessions of their own for the processes of a Ray that starts embedded.

What a terminal, `timeout` or a shell's `kill %1` sends to the driver's process group is for the
driver to answer: it ends its Ray itself, once the run has saved its last step.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def own_sessions() -> Generator[None]:
    """Within, each of Ray's processes that this one starts leads a session. The kernel ends it with
    this process all the same, as Ray asks for.

    Private API of Ray, this place only: it has no setting for it.
    """
    from ray._private import services

    theirs: Any = services
    popen = theirs.ConsolePopen
    theirs.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        theirs.ConsolePopen = popen
