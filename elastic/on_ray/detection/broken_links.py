"""A worker's connection has ended: whether its process has, too, or the connection only.

A firewall that forgets what it knew resets every connection at once, and nobody dies of it: the
worker comes back over another one (workers/membership/link.py), and nothing is lost. Who died is
told by Ray within milliseconds, and by its own kernel: that closes what the process had open,
which no firewall does, and then refuses a new connection, which a firewall may do as well.

A pulse that beats says that the process lives, though something in it may hold the GIL, so that
nobody dials. Whether it hangs is then elastic/control/detection/hang.py's question, within the
lease.
"""

import asyncio
import time

from elastic.on_ray.cluster_view import ClusterView
from elastic.on_ray.slots import Slot, is_running
from elastic.protocol.timeouts import timeouts_of

Address = tuple[str, int]
PATIENCE = 2
"""Times `Timeouts.silence_s` without a pulse: one until the worker notices an end of which nobody
told it, one in which it dials in vain."""


async def wait_for_return(
    cluster: ClusterView, worker: int, slot: Slot, *, was_reset: bool
) -> None:
    """Until the worker is back or lost."""
    timeouts = timeouts_of(cluster.detect_s)
    left_s = limit_s = PATIENCE * timeouts.silence_s
    lease_left_s = timeouts.lease_s
    while is_away(cluster, worker, slot):
        begun = time.monotonic()
        gone = await why_gone(cluster, slot, timeouts.diagnosis_s, was_reset=was_reset)
        if gone is not None or min(left_s, lease_left_s) <= 0:
            late_s = limit_s if left_s <= 0 else timeouts.lease_s
            late = "connection_lost", f"its connection ended, and it was not back in {late_s:g} s"
            if is_away(cluster, worker, slot):
                cluster.lost(worker, *(late if gone is None else ("process_died", gone)))
            return
        await asyncio.sleep(timeouts.tick_s)
        awake_s = (
            timeouts.diagnosis_s + timeouts.tick_s + timeouts.late_s
        )  # the rest of it we were frozen,
        passed_s = min(awake_s, time.monotonic() - begun)  # and who dials waits to be heard
        lease_left_s -= passed_s
        if not is_beating(cluster, slot, timeouts.silence_s):
            left_s -= passed_s


def is_away(cluster: ClusterView, worker: int, slot: Slot) -> bool:
    return cluster.workers.get(worker) is slot and not cluster.links.is_connected(worker)


def is_beating(cluster: ClusterView, slot: Slot, limit_s: float) -> bool:
    """Whether its pulse, a process of its own, was heard lately."""
    return slot.watch is not None and cluster.now() - slot.watch.heard_at < limit_s


async def why_gone(
    cluster: ClusterView, slot: Slot, limit_s: float, *, was_reset: bool
) -> str | None:
    """How its process is known to be gone; None while it is not."""
    if cluster.is_here(slot):
        return None if is_running(slot.pid) else ""
    if was_reset or slot.peer_address is None or not await is_refused(slot.peer_address, limit_s):
        return None
    return "its connection was closed, and nobody listens at its address"


async def is_refused(address: Address, limit_s: float) -> bool:
    """Whether nobody listens there: a process that lives does, whatever it does."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*address), limit_s)
        writer.close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # it cannot be reached
    return False
