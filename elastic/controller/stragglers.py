"""Stragglers of a live run: told in the journal, shown in the status, replaced if so wished.

Who is one, is elastic/control/detection/straggler.py's rule.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from elastic.control.detection.straggler import Pace, Since, Slowness, paces, stragglers
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
        journal. replace: lets a worker go as soon as another one holds the state; why. Who waits
        for its data is told and stays: its successor would wait for the same data."""
        self._factor, self._note = factor or TOLD_FROM, note
        self._replace = replace if factor is not None else None
        self._since: Since = {}
        self._told: set[tuple[int, Slowness]] = set()
        self.own_s: dict[str, float] = {}
        """By worker: its seconds per micro-batch when it was last heard, members only."""
        self.reason = ""
        """Who is one now, in words."""

    def look(self, beats: Iterable[Heartbeat], step: int) -> None:
        """At the newest heartbeats; step: committed so far."""
        beats = tuple(beats)
        self.own_s |= {worker_name(p.worker): p.own.mine_s for p in paces(beats)}
        self._since, found = stragglers(self._since, beats, self._factor)
        said = [words_of(pace, why) for pace, why in found]
        self.reason = "; ".join(said)
        for (pace, why), words in zip(found, said, strict=True):
            if (pace.worker, why) not in self._told:
                log.warning('step=%d straggler slow="%s" reason="%s"', step, why.value, words)
                worker = worker_name(pace.worker)
                self._note({"step": step, "worker": worker, "slow": why.value, "reason": words})
                if self._replace is not None and why is Slowness.MACHINE:
                    self._replace(pace.worker, words)
        self._told = {(pace.worker, why) for pace, why in found}


def words_of(pace: Pace, why: Slowness) -> str:
    own, computing = pace.own, pace.computing
    if why is Slowness.MACHINE:
        return (
            f"{worker_name(pace.worker)} takes {own.factor:.1f} times as long as its peers for its "
            f"own part of a step ({own.mine_s:.3f} s against {own.others_s:.3f} s per micro-batch)"
        )
    return (
        f"{worker_name(pace.worker)} waits for its data: {own.mine_s - computing.mine_s:.3f} s of "
        f"its {own.mine_s:.3f} s per micro-batch, where its peers take {own.others_s:.3f} s; it "
        f"computes for {computing.mine_s:.3f} s, they for {computing.others_s:.3f} s"
    )
