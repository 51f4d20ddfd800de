"""What parts of this room see of others: `ClusterView` of the `RayCluster`, `Host` of the run.

The run is put together in elastic/controller/supervisor.py, which may import this room.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

from ray.actor import ActorHandle

from elastic.control import events as e
from elastic.control.commands import Discard, Publish
from elastic.control.detection.patience import Costly, PhaseOfStep
from elastic.on_ray.backup.servers import BackupServers
from elastic.on_ray.links import LinkServer
from elastic.on_ray.slots import Slot
from elastic.protocol.messages.to_controller import (
    Fingerprint,
    OfScript,
    PartSaved,
    Planned,
    Stage,
)
from elastic.protocol.step_record import AppliedRecord, StepRecord
from elastic.store.catalogue import Damage


class Record(Protocol):
    """See elastic/controller/recorder.py."""

    place: str

    async def settle(self) -> None: ...

    def roll_back(self, step: int) -> None: ...

    def record_step(self, step: StepRecord) -> None: ...

    def record_anatomy(self, worker: int, rows: tuple[dict[str, Any], ...]) -> None: ...

    @property
    def safe_step(self) -> int: ...

    @property
    def safe_applied(self) -> AppliedRecord: ...

    def note(self, kind: str, fields: dict[str, Any]) -> None: ...

    def keep_stacks(self, texts: dict[str, str]) -> "Future[Any] | None": ...


class Publisher(Protocol):
    """See elastic/controller/publisher.py."""

    def hear(self, report: PartSaved) -> None: ...

    def conclude(self, command: Publish | Discard) -> None: ...


class Host(Protocol):
    """See elastic/controller/supervisor.py."""

    @property
    def record(self) -> Record: ...

    @property
    def publisher(self) -> Publisher: ...

    def spawn(self, worker: int) -> ActorHandle[Any]: ...

    def begin_rendezvous(self) -> ActorHandle[Any]: ...

    def spec_of(self, worker: int) -> Any: ...

    async def open_at(self, step: int, damaged: list[Damage]) -> str: ...

    def on_unprotected(self, fields: dict[str, Any]) -> None: ...

    def on_planned(self, said: Planned | OfScript | Fingerprint) -> None: ...

    def costly(self) -> tuple[Costly, ...]: ...

    def stage_of(self, worker: int) -> str: ...

    def members_stages(self) -> tuple[Stage | None, ...]: ...


class ClusterView(Protocol):
    """See elastic/on_ray/cluster.py."""

    detect_s: float | None
    host: Host
    now: Callable[[], float]
    workers: dict[int, Slot]
    links: LinkServer
    holders: BackupServers
    in_background: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]

    @property
    def recorded_step(self) -> int: ...

    def say(self, event: e.Event) -> None: ...

    def send_word(self, worker: int) -> None: ...

    def lost(
        self,
        worker: int,
        cause: str,
        why: str = "",
        last_seen: float | None = None,
        slow_in: PhaseOfStep | None = None,
    ) -> None: ...

    def user_failed(self, worker: int, fallback: str) -> None: ...

    def is_here(self, record: Slot) -> bool: ...
