"""A newcomer's copy of its source's state: followed until a generation takes it in.

What arrives comes through workers/membership/state_stream.py; who forms what is
workers/membership/member.py's.
"""

import time
from collections.abc import Callable

import torch

from elastic.protocol.errors import PeerLost
from elastic.protocol.membership import worker_name
from elastic.protocol.messages import peer
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.pieces import Pieces
from workers.health.vitals import Vitals
from workers.membership import actions as a
from workers.membership import events as e
from workers.membership.ahead import CopyingAhead
from workers.membership.state_stream import Following, update_of
from workers.membership.step_log import Records
from workers.train_state.out_of_memory import told_as_loss
from workers.train_state.train_state import TrainState


class Copying:
    """At most one source at a time."""

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        vitals: Vitals,
        device: torch.device,
        records: Records,
        tell: Callable[[e.Event], None],
        *,
        ahead: CopyingAhead,
    ) -> None:
        """records: takes what the source knows of steps that are not on record. tell: the worker's
        machine, of what has become of the state. ahead: of a part, where members hold parts."""
        self.ahead = ahead
        self._spec, self._train_state = spec, train_state
        self._vitals, self._device = vitals, device
        self._records, self._tell = records, tell
        self._following: Following | None = None
        self._is_lagging = False
        """The state is an old one; the source sends its own anew once a generation forms."""

    def start(self, action: a.Follow | a.CopyAhead, wake: Callable[[], None]) -> e.Event | None:
        """Follow one worker, or several for a part of each."""
        if isinstance(action, a.CopyAhead):
            return self.ahead.start(action.sync, wake)
        if (address := action.address) is None:
            return e.SourceLost("cannot reach the source: it is gone")
        try:
            self._following = Following(
                address,
                token=self._spec.token,
                worker=self._spec.worker,
                timeout_s=self._spec.timeouts.join_s,
                detect_s=self._spec.detect_s,
                wake=wake,
            )
        except OSError as error:
            return e.SourceLost(f"cannot reach the source: {error}")
        return None

    def stop(self) -> None:
        """What was received stays."""
        self.ahead.stop()
        if self._following is not None:
            self._following.close()
        self._following = None
        self._is_lagging = False

    @property
    def failure(self) -> str:
        """Why nothing more will come; empty while it may."""
        return "" if self._following is None else self._following.failure

    def apply_received(self) -> None:
        """Catch up with what has arrived."""
        following = self._following
        if following is None:
            return
        with told_as_loss("it copied the state"):
            self._apply(following)
            if following.shortage is not None:
                raise following.shortage

    def _apply(self, following: Following) -> None:
        train_state = self._train_state
        while not following.received.empty():
            said, tensors = following.received.get()
            match said:
                case peer.State():
                    train_state.restore(said.state, tensors)
                    self._is_lagging = False
                    self._records.forget()
                    self._records.take(said.records)
                    self._tell(e.StateReplaced(train_state.step, train_state.origin))
                case peer.Lags():
                    self._is_lagging = True
                case peer.Update() if said.step == train_state.step + 1:
                    train_state.apply(update_of(said, tensors, self._device))
                    self._records.take(said.records)
                    self._tell(e.StepFollowed(train_state.step, train_state.origin))
                    following.memory.give(tensors)
                case peer.Update():
                    pass  # it is part of the state that came
            self._vitals.step = train_state.step
            if said.queued == 0:
                self._tell(e.CopyLevel())

    def catch_up(self, step: int, origin: int, is_over: Callable[[], bool]) -> None:
        """Wait until the state is that generation's of `step`, lags, or is_over(). PeerLost if it
        never will be."""
        deadline = time.monotonic() + self._spec.timeouts.join_s
        while not (self._stands_at(step, origin) or self._is_lagging):
            left_s = deadline - time.monotonic()
            if not self._has_more(step, is_late=left_s <= 0):
                if is_over():
                    return
                assert self._following is not None
                self._following.arrived.wait(min(left_s, 0.05))

    def _stands_at(self, step: int, origin: int) -> bool:
        return (self._train_state.step, self._train_state.origin) == (step, origin)

    def catch_up_late(self, step: int, origin: int, pieces: Pieces) -> None:
        """Who lags gets the state of `step` while the others, formed already, wait for it: as long
        as it gets further. PeerLost if the source is gone or the generation given up."""
        num_tensors = -1
        while not self._stands_at(step, origin):
            if self._has_more(step, is_late=False):
                continue
            following = self._following
            assert following is not None
            if following.num_tensors != num_tensors:
                num_tensors = following.num_tensors
                pieces.begin_apart()
            pieces.check()
            following.arrived.wait(0.05)

    def _has_more(self, step: int, *, is_late: bool) -> bool:
        """Apply what has come; False: nothing. PeerLost if the state will never stand at `step`."""
        following = self._following
        if following is not None:
            following.arrived.clear()
            if not following.received.empty():
                self.apply_received()
                return True
        is_lost = following is None or following.failure or is_late
        if is_lost or (self._train_state.step >= step and not self._is_lagging):
            raise PeerLost(
                f"{worker_name(self._spec.worker)} stands at step {self._train_state.step} of "
                f"generation {self._train_state.origin} and cannot reach step {step} as the others "
                "have it"
            )
        return False
