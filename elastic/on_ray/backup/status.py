"""Whether a sharded run's newest steps are safe in peer memory, as its members say.

A member says so whenever no holder has its newest copy, and when one has it again. What replaces
holders is servers.py's.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from elastic.protocol.membership import worker_name
from elastic.protocol.messages.to_controller import Protected

log = logging.getLogger(__name__)


class Protection:
    """Told in the journal when it ends and when it is back, shown in the status meanwhile."""

    def __init__(self, note: Callable[[dict[str, Any]], None], now: Callable[[], float]) -> None:
        """note: puts something into the journal."""
        self._note, self._now = note, now
        self._bare: dict[int, str] = {}  # worker -> why no holder has its copy
        self._since: tuple[int, float] | None = None
        """Step and time, while there is one."""

    def hear(self, worker: int, said: Protected) -> None:
        step, why = said.step, said.why
        self._bare.pop(worker, None)
        if why:
            self._bare[worker] = why
        if why and self._since is None:
            self._since = (step, self._now())
            log.warning('step=%d worker=%s unprotected reason="%s"', step, worker_name(worker), why)
            self._note({"step": step, "worker": worker_name(worker), "reason": why})
        self._look(step)

    def hear_lost(self, node: str, why: str) -> None:
        """A holder is lost, with what it held; another one is started."""
        log.warning('holder on node=%s lost reason="%s"', node[:12], why)
        self._note({"lost_holder": node, "reason": why})

    def form(self, members: Iterable[int], step: int) -> None:
        """A generation begins: nobody else's copies matter."""
        self._bare = {w: self._bare[w] for w in members if w in self._bare}
        self._look(step)

    def _look(self, step: int) -> None:
        if self._since is None or self._bare:
            return
        since_step, at = self._since
        self._since, over_s = None, round(self._now() - at, 3)
        log.warning("step=%d protected again after unprotected_s=%.3f", step, over_s)
        self._note({"step": step, "since_step": since_step, "unprotected_s": over_s})

    @property
    def reason(self) -> str:
        """For status.json; empty if all is well."""
        if self._since is None:
            return ""
        why = next(iter(self._bare.values()))
        return (
            f"not protected by peer memory since step {self._since[0]}: no holder has the rows of "
            f"{', '.join(map(worker_name, sorted(self._bare)))} ({why}); a loss now would cost all "
            "steps since the newest checkpoint"
        )
