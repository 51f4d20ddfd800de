"""What lasts of the faults of one scenario, and is undone when its time has come, or at the end.

Who is hit, and when, is inject.py's.
"""

import time
from collections.abc import Callable
from math import inf
from typing import Any

from elastic.chaos.capacity import Capacity, need_of
from elastic.chaos.clock import Clock
from elastic.chaos.freezer import Freezer, Row
from elastic.chaos.plan import Strike
from elastic.chaos.scenario import Fault
from elastic.chaos.storage_faults import Ballast
from elastic.store.files import Folder, read_json

MENDED_S = 1.0
"""How much later than its time a link is whole again at the latest."""


class Lasting:
    """Stopped and slow processes, a full disk, lost links, slots that others hold. `end` once."""

    def __init__(
        self,
        run: Folder,
        send: Callable[[Row, Any], object],
        address: str | None,
        tell: Callable[[str], None],
    ) -> None:
        """send: a signal to the process of a row of status.json. address: the run's cluster."""
        self._run, self._address, self._tell = run, address, tell
        self._freezer, self.ballast = Freezer(send, tell), Ballast(tell)
        self._clocks = Clock(self._freezer.look), Clock(self.ballast.look)
        self.capacity = Capacity(self._holders)
        self.room_strike: Strike | None = None
        """The last one on the capacity."""
        self._rows: list[Row] = []
        self._mended_at = 0.0

    def check(self) -> None:
        """Raises what kept something from being undone in its time."""
        for clock in self._clocks:
            clock.check()

    def leave(self, row: Row) -> None:
        """Whatever was done to this process lasts no longer, but for a stop."""
        self._freezer.leave(row)

    def hold(self, row: Row, until: float) -> None:
        """A process that has been stopped is woken then (monotonic seconds)."""
        self._freezer.hold(row, until)
        self._clocks[0].begin()

    def slow(self, row: Row, slower: float, until: float) -> None:
        """All that it does takes so many times as long."""
        self._freezer.slow(row, slower, until)
        self._clocks[0].begin()

    def fill(self, at_most_gb: float, now: float, until: float) -> None:
        """The run's disk. WrongInput if it is none to be filled."""
        self.ballast.fill(self._run, at_most_gb, now, until)
        self._clocks[1].begin()

    def end(self) -> None:
        """Everything is undone; what nodes undo by themselves is waited for."""
        for clock in self._clocks:
            clock.end()
        self._freezer.look(inf)
        self.ballast.look(inf)
        self.capacity.end()
        left_s = self._mended_at - time.monotonic()
        if left_s > 0:
            self._tell(f"waiting {left_s:.0f} s until all links are whole again")
            time.sleep(left_s)

    def drain(self, node_id: str, deadline_s: float) -> None:
        from elastic.on_ray.driver import remote_faults

        remote_faults.join(self._address)
        remote_faults.drain(node_id, deadline_s)

    def lose_packets(self, node_id: str, spec: Fault) -> float:
        """Of a node's links; the Unix time there when it begins. OSError, WrongInput if it cannot
        be done."""
        from elastic.on_ray.driver import packet_loss, remote_faults

        remote_faults.join(self._address)
        assert spec.for_s is not None
        loss = packet_loss.ALL if spec.what == "cut" else spec.loss
        try:
            return packet_loss.lose_packets(node_id, loss, spec.for_s)
        finally:  # also if the answer is late
            mended_at = time.monotonic() + packet_loss.DELAY_S + spec.for_s + MENDED_S
            self._mended_at = max(self._mended_at, mended_at)

    def make_room(self, strike: Strike, status: dict[str, Any], now: float) -> None:
        """As a strike on the capacity says. WrongInput if the run is on another cluster."""
        self._rows = status.get("workers", [])
        self.capacity.make_room(strike.room, now)
        self.room_strike = strike

    def _holders(self) -> Any:
        from elastic.on_ray.driver import placeholders, remote_faults

        remote_faults.join(self._address)
        placeholders.refuse_other_cluster({row["node_id"] for row in self._rows})
        config = read_json(self._run, "config.json") or {}
        device = next((str(row["device"]) for row in self._rows if row.get("device")), "cpu")
        return placeholders.Placeholders(need_of(config, device))
