"""A newcomer's connections to those members that have some of what it will have of a model in
stages: it follows all of them, step by step together, until a generation takes it in.

What it does with what comes is workers/parallel/ahead.py's.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from elastic.protocol.layout import BlockSets, Position
from elastic.protocol.messages import peer
from elastic.protocol.messages.to_worker import Sync
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.pieces import ROUND_OF_JOINING
from workers.health.vitals import Vitals
from workers.membership import events as e
from workers.membership.state_stream import Following, update_of
from workers.parallel.ahead import PartAhead, Sources, merged
from workers.train_state.out_of_memory import told_as_loss

Tensors = Mapping[str, Tensor]
ANY = -1
"""Step, or origin."""
MAX_WAITING_BYTES = 2**30
"""Of one source's updates that wait for another source's state."""
_POLL_S = 0.02


class _Source:
    """One of them: what has come over its connection and is not part of the state yet."""

    def __init__(self, following: Following, blocks: BlockSets) -> None:
        self.following, self.blocks = following, blocks
        self.has_begun = self.is_lagging = False
        self.is_level = False
        """It has sent all that it had, once."""
        self._come: deque[tuple[peer.ToFollower, dict[str, Tensor]]] = deque()

    def next_of(self, step: int, origin: int = ANY) -> peer.ToFollower | None:
        """What makes it stand at `step`: a state, of that origin, or the change from the one
        before."""
        while not self.following.received.empty():
            self._come.append(self.following.received.get())
            self.is_lagging |= isinstance(self._come[-1][0], peer.Lags)
        said = self._come[0][0] if self._come else None
        match said:
            case peer.State(state) if not self.has_begun and step in (ANY, state["step"]):
                return said if origin in (ANY, state["origin"]) else None
            case peer.Update() if self.has_begun and step == said.step:
                return said
            case _:
                return None

    @property
    def has_ended(self) -> bool:
        return self.is_lagging or bool(self.following.failure)

    def take(self) -> tuple[peer.ToFollower, dict[str, Tensor]]:
        said, tensors = self._come.popleft()
        self.following.use(said, tensors)
        self.has_begun = True
        self.is_level |= said.queued == 0 and (isinstance(said, peer.Update) or not self._come)
        return said, tensors


class CopyingAhead:
    """At most one part at a time."""

    def __init__(
        self,
        spec: WorkerSpec,
        part: PartAhead | None,
        vitals: Vitals,
        device: torch.device,
        tell: Callable[[e.Event], None],
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """part: None where newcomers copy nothing ahead. tell: the worker's machine.
        max_waiting_bytes: if several of a source are more, all is copied when a generation forms.
        """
        self._max_waiting_bytes = max_waiting_bytes
        self._spec, self._part, self._tell = spec, part, tell
        self._vitals, self._device = vitals, device
        self._from: Sources | None = None
        self._sources: list[_Source] = []
        self._step = ANY
        self._arrived = threading.Event()

    def start(self, sync: Sync, wake: Callable[[], None]) -> e.Event | None:
        """Follow those who have what this worker will have, if there is something to copy."""
        self._from = None if self._part is None else self._part.plan(sync)
        if self._from is None:
            return e.SourceLost("nothing of it is known before a generation forms")
        try:
            self._follow(self._from, sync, wake)
        except OSError as error:
            return e.SourceLost(f"cannot reach a source: {error}")
        return None

    def _follow(self, sources: Sources, sync: Sync, wake: Callable[[], None]) -> None:
        for rank, blocks in sources.blocks.items():
            address = sync.members[rank]
            if address is None:
                raise OSError(f"rank {rank} is gone")
            following = Following(
                address,
                token=self._spec.token,
                worker=self._spec.worker,
                timeout_s=self._spec.timeouts.join_s,
                detect_s=self._spec.detect_s,
                wake=lambda: (self._arrived.set(), wake()),
                blocks=blocks,
                max_unused_bytes=self._max_waiting_bytes,
            )
            self._sources.append(_Source(following, blocks))

    def stop(self) -> None:
        """What was received is nobody's, unless `finish` was called."""
        for source in self._sources:
            source.following.close()
        self._sources, self._from, self._step = [], None, ANY

    @property
    def _why_ended(self) -> str:
        """Why the sources will send no more; empty while they may."""
        if any(s.is_lagging for s in self._sources):
            return "its links carry less than the steps bring"
        if self._is_apart:
            return "its sources have not computed a step in the same generation"
        return next((s.following.failure for s in self._sources if s.following.failure), "")

    @property
    def _is_apart(self) -> bool:
        """Somebody's state is of a step that the others' have come to, and it is another one."""
        states = (s.next_of(ANY) for s in self._sources if self._step != ANY)
        return any(isinstance(s, peer.State) and s.state["step"] <= self._step for s in states)

    def look_around(self) -> None:
        """In the pool: catch up with what has arrived."""
        self._apply_received()
        if any(s.following.is_full for s in self._sources):
            self._tell(e.SourceLost(self._why_ended))
            self.stop()  # no way leads on from what it has, which is much
        elif self._sources and all(s.is_level for s in self._sources):
            self._tell(e.CopyLevel())
        elif self._why_ended:
            self._tell(e.SourceLost(self._why_ended))

    def _apply_received(self) -> bool:
        """Whether there was anything."""
        has_moved = False
        with told_as_loss("it copied its part of the state"):
            while self._advance():
                has_moved = True
            for source in self._sources:
                if source.following.shortage is not None:
                    raise source.following.shortage
        return has_moved

    def _advance(self) -> bool:
        """One step further, if all that it takes has come."""
        if not self._sources:
            return False
        if self._step == ANY:
            states = [said for s in self._sources if isinstance(said := s.next_of(ANY), peer.State)]
            if len(states) < len(self._sources):
                return False
            first = min(states, key=lambda said: said.state["step"]).state
            self._begin_those_of(first["step"], first["origin"])
            return True
        step = self._step + 1
        begun = [s for s in self._sources if s.has_begun]
        said = [u for s in begun if isinstance(u := s.next_of(step), peer.Update)]
        origins = {update.origin for update in said}
        if len(said) < len(begun) or len(origins) > 1:
            return False  # who is a generation further: there is no way from here to there
        assert self._part is not None
        taken = [s.take() for s in begun]
        updates = [update_of(u, t, self._device) for u, t in taken if isinstance(u, peer.Update)]
        self._part.train_state.apply(merged(updates))
        for source, (_, tensors) in zip(begun, taken, strict=True):
            source.following.memory.give(tensors)
        self._begin_those_of(step, origins.pop())
        return True

    def _begin_those_of(self, step: int, origin: int) -> None:
        """It stands there now. Members take a newcomer on one by one: some may have been a step
        further than others; those whose step another generation has computed have another one."""
        assert self._part is not None
        assert self._from is not None
        self._step = self._vitals.step = step
        starting = [s for s in self._sources if isinstance(s.next_of(step, origin), peer.State)]
        if not starting:
            return
        has_some = any(s.has_begun for s in self._sources)
        parts: list[Tensors] = [self._part.train_state.tensors()] if has_some else []
        said: peer.ToFollower | None = None
        for source in starting:
            said, tensors = source.take()
            parts.append(tensors)
        assert isinstance(said, peer.State)
        lacks = tuple(b for s in self._sources if not s.has_begun for b in s.blocks)
        at = Position(self._from.mesh, self._from.rank, lacks)
        self._part.install(said.state, parts, at)

    def _has_no_more(self, source: _Source) -> bool:
        """Of what the next step takes."""
        return source.next_of(self._step + 1 if source.has_begun else ANY) is None

    def finish(self, step: int, is_over: Callable[[], bool]) -> None:
        """A generation forms, whose state is that of `step`: catch up with it, or as far as the
        sources have got. They end what they send once they form it, too."""
        deadline = time.monotonic() + self._spec.timeouts.join_s * ROUND_OF_JOINING
        while self._step < step and not is_over() and time.monotonic() < deadline:
            self._arrived.clear()
            ended = [s for s in self._sources if s.has_ended]  # first: what it had is at hand
            if not self._apply_received():
                if self._is_apart or not self._sources or any(map(self._has_no_more, ended)):
                    break
                self._arrived.wait(_POLL_S)
        if self._from is not None and self._sources and all(s.has_begun for s in self._sources):
            assert self._part is not None
            self._part.finish(self._from)
        self.stop()
