# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What raylets tell every driver: the death of a worker is told by us, in one line with its cause.

Ray's paragraph about it says that it may have been out of memory, whatever it was. What else
raylets say, as that they end a process for want of memory, and what workers print, stays as it is.
"""

import re
from collections.abc import Callable
from typing import Any

DEATH = "A worker died or was killed while executing a task"
RETRY = re.compile(r"Task (Controller|Rendezvous|Worker)Actor\.\w+ failed\. There are ")
"""So begins what it says of a call to one of our actors that it will make again: we have ended the
actor, or tell of its death ourselves."""


def hush_deaths() -> Callable[[], None]:
    """From now on in this process; the answer undoes it.

    Private API of Ray, this place only: it has no setting for it, and does not print through
    logging. `log_to_driver=False` is about other lines.
    """
    from ray._private import worker

    say: Any = worker.print_to_stdstream

    def say_others(data: dict[str, Any], *arguments: Any, **named: Any) -> None:
        text = "".join(data["lines"])
        is_known = text.startswith(DEATH) or RETRY.match(text) is not None
        if data["pid"] != "raylet" or not is_known:
            say(data, *arguments, **named)

    def undo() -> None:
        worker.print_to_stdstream = say

    worker.print_to_stdstream = say_others
    return undo
