"""`PulseProcess`: this process's pulse, one at a time, started again when it dies."""

import subprocess
import threading
import time

from elastic.protocol.worker_spec import WorkerSpec
from workers.health import pulse
from workers.health.stacks import Armed

Address = tuple[str, int]


class PulseProcess:
    """Without a pulse this worker would be taken for dead."""

    def __init__(self, spec: WorkerSpec, vitals: int, armed: Armed) -> None:
        """vitals: their file."""
        self._spec, self._vitals, self._armed = spec, vitals, armed
        self._controller = spec.controller
        self._pulse: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()

    def follow(self, controller: Address) -> Address:
        """Have it dial there. Gives the address before."""
        with self._lock:
            if (before := self._controller) != controller:
                self.start(controller)
            return before

    def start(self, controller: Address) -> None:
        """Instead of any other, which dials the same address even if its controller has died: a
        process that is frozen cannot tell it of another."""
        spec = self._spec
        with self._lock:
            child = pulse.start(
                self._vitals,
                self._armed,
                spec.worker,
                controller,
                spec.token,
                interval_s=spec.timeouts.heartbeat_s,
                silence_s=spec.timeouts.silence_s,
                lease_s=spec.timeouts.lease_s,
            )
            former, self._pulse = self._pulse, child
            self._controller = controller
        if former is not None:
            former.kill()
        threading.Thread(target=self._keep, args=(child,), name="pulse", daemon=True).start()

    def _keep(self, child: "subprocess.Popen[bytes]") -> None:
        """It ends by itself, as 0, after the lease."""
        if child.wait() != 0:
            time.sleep(self._spec.timeouts.heartbeat_s)
            with self._lock:
                if child is self._pulse:
                    self.start(self._controller)
