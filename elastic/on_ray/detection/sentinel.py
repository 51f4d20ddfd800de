"""`Sentinel`: kills another process of this node that is silent for too long."""

import threading
import time

from elastic.on_ray.slots import end_process, started_at

LOOK_S = 0.5


class Sentinel:
    """Its own thread, until the process is gone. A process that got the same number later is
    spared."""

    def __init__(self, pid: int, patience_s: float) -> None:
        self.pid, self._patience_s = pid, patience_s
        self._started_at = started_at(pid)
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, name="sentinel", daemon=True).start()

    def hear(self) -> None:
        """The process has said something."""
        self._heard = time.monotonic()

    def _watch(self) -> None:
        while self._started_at is not None and started_at(self.pid) == self._started_at:
            if time.monotonic() - self._heard > self._patience_s:
                end_process(self.pid)
                return
            begun = time.monotonic()
            time.sleep(LOOK_S)
            now = time.monotonic()
            frozen_s = max(0.0, now - begun - 2 * LOOK_S)
            self._heard = min(now, self._heard + frozen_s)  # its words wait to be read
