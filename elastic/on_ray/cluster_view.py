"""`ClusterView`: what those who watch the workers see of the `RayCluster`."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from elastic.control import events as e
from elastic.control.detection.patience import Place
from elastic.on_ray.backup_servers import BackupServers
from elastic.on_ray.host import Host
from elastic.on_ray.links import LinkServer
from elastic.on_ray.slots import Slot


class ClusterView(Protocol):
    """See elastic/on_ray/cluster.py."""

    detect_s: float | None
    host: Host
    now: Callable[[], float]
    workers: dict[int, Slot]
    links: LinkServer
    holders: BackupServers
    in_background: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    recorded_step: int

    def say(self, event: e.Event) -> None: ...

    def lost(
        self,
        worker: int,
        cause: str,
        why: str = "",
        last_seen: float | None = None,
        slow_in: Place | None = None,
    ) -> None: ...

    def user_failed(self, worker: int, fallback: str) -> None: ...

    def is_here(self, record: Slot) -> bool: ...
