"""Stragglers of a live run: told in the journal, shown in the status, replaced if so wished.

Who is one, is elastic/control/detection/straggler.py's rule.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from elastic.control.detection.straggler import paces, stragglers
from elastic.protocol.membership import worker_name
from elastic.protocol.messages.pulse import Heartbeat

log = logging.getLogger(__name__)
TOLD_FROM = 2.0
"""Whoever is so many times slower than the median of the others for long is told of."""


class Stragglers:
    """What the heartbeats of a run have said about its members' own part of the steps."""

    def __init__(
        self,
        factor: float | None,
        note: Callable[[dict[str, Any]], None],
        replace: Callable[[int, str], None],
    ) -> None:
        """factor: from which on a rank is replaced; None: never. note: puts something into the
        journal. replace: lets a worker go as soon as another one holds the state; why."""
        self._factor, self._note = factor or TOLD_FROM, note
        self._replace = replace if factor is not None else None
        self._since: dict[int, int] = {}
        self._told: set[int] = set()
        self.own_s: dict[str, float] = {}
        """By worker: its seconds per micro-batch when it was last heard, members only."""
        self.reason = ""
        """Who is one now, in words."""

    def look(self, beats: Iterable[Heartbeat], step: int) -> None:
        """At the newest heartbeats; step: committed so far."""
        beats = tuple(beats)
        self.own_s |= {worker_name(p.worker): p.own_s for p in paces(beats)}
        self._since, found = stragglers(self._since, beats, self._factor)
        said = [
            f"{worker_name(p.worker)} takes {p.factor:.1f} times as long as its peers for its own "
            f"part of a step ({p.own_s:.3f} s against {p.others_s:.3f} s per micro-batch)"
            for p in found
        ]
        self.reason = "; ".join(said)
        for pace, why in zip(found, said, strict=True):
            if pace.worker not in self._told:
                log.warning('step=%d straggler reason="%s"', step, why)
                self._note({"step": step, "worker": worker_name(pace.worker), "reason": why})
                if self._replace is not None:
                    self._replace(pace.worker, why)
        self._told = {p.worker for p in found}
