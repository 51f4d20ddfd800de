"""The training state and the one way in which it changes: `TrainState.apply(update)`.

Members and followers apply the same updates with the same code, so they hold the same bits.
Every micro-batch starts from the buffers of the last committed step (`TrackedBuffers`). Floating
ones become the mean over all micro-batches, integer ones must agree: session and vote see to that.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor, nn

from elastic.protocol.errors import UserError
from workers.reduction.norm import clip_coefficient, norm_of_rows, row_squares
from workers.step.precision import Casting, LossScale
from workers.step.vote import Prepared, Vote
from workers.tensors.local import flat_bytes, is_shard, local
from workers.tensors.strides import laid_out
from workers.torch_private.modules import BatchNorm, is_persistent, own_buffers
from workers.torch_private.tensors import copy_all_, divide_all_, multiply_all_, version_of
from workers.train_state import serialization
from workers.train_state.snapshot import Arena, HostMemory, Snapshot
from workers.train_state.state_header import entry, names_in

_WIDE = {False: torch.float64, True: torch.complex128}
_NUM_COMPARED = 2  # micro-batches in which unchanged version counters are not believed


@dataclass(frozen=True, slots=True)
class Update:
    """Everything that a committed step changes, by name."""

    step: int
    """Committed steps once it is applied."""
    is_finite: bool
    divisor: float
    num_microbatches: int
    gradients: Mapping[str, Tensor]
    """The sum over micro-batches per parameter; without those that no micro-batch used."""
    buffers: Mapping[str, Tensor]
    """The sum over micro-batches of each tracked floating buffer, float64."""
    integers: Mapping[str, Tensor]
    """The new value of each tracked integer buffer."""
    log_names: tuple[str, ...]
    """See `TrainState.log_names`."""
    origin: int = 0
    """The generation that computed it: another one's sums may be rounded otherwise."""
    squares: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Of each gradient's rows, of all ranks, for the norm; empty: who applies it looks itself."""

    @classmethod
    def of(cls, prepared: Prepared, vote: Vote, before: "TrainState") -> "Update":
        """A prepared step with its completed vote."""
        return cls(
            step=before.step + 1,
            is_finite=vote.is_finite,
            divisor=vote.divisor,
            num_microbatches=prepared.layout.num_microbatches,
            gradients={n: g for n, g in prepared.reduced.gradients.items() if n in vote.used},
            buffers=prepared.reduced.buffers,
            integers=before.buffers.integers,
            log_names=prepared.layout.log_names,
            origin=prepared.generation,
            squares=prepared.reduced.squares,
        )


# --- buffers ------------------------------------------------------------------------------
class _Buffer:
    """One buffer: the module that holds it, the live tensor, and the committed value."""

    def __init__(self, name: str, module: nn.Module, key: str, live: Tensor) -> None:
        self.name, self.module, self.key, self.live = name, module, key, live
        self.committed = live.detach().clone()
        self.version = version_of(live)

    @property
    def is_floating(self) -> bool:
        return self.live.is_floating_point() or self.live.is_complex()

    @property
    def current(self) -> Tensor:
        """What the module holds now: a forward may have put another tensor there."""
        current = own_buffers(self.module).get(self.key)
        if current is None or current.shape != self.live.shape or current.dtype != self.live.dtype:
            found = "None" if current is None else f"{current.dtype}{list(current.shape)}"
            raise UserError(
                f"buffer {self.name!r} changed from {self.live.dtype}{list(self.live.shape)} to "
                f"{found} in a step; keep caches outside of buffers, or of one shape",
                "",
            )
        return current.detach()

    def _is_grown_cache(self, held: Tensor) -> bool:
        """A table made anew for a longer input, as rotary embeddings do: not state."""
        return not is_persistent(self.module, self.key) and held.shape != self.live.shape

    def has_changed(self, compare: bool) -> bool:
        held = own_buffers(self.module).get(self.key)
        if held is not None and held is not self.live and self._is_grown_cache(held):
            self.live, self.committed = held, held.detach().clone()
            self.version = version_of(held)
            return False
        if held is not self.live or version_of(self.live) != self.version:
            return True
        return compare and not torch.equal(flat_bytes(self.live), flat_bytes(self.committed))


class TrackedBuffers:
    """The buffers of a model, and the tracked ones: those that steps change.

    The tracked set starts with the statistics of normalisation layers, whose kernels change them
    without a trace, and grows by what is seen to change; it must be the same on all ranks, so the
    session votes on `untracked_changes()`, calls `track` everywhere and repeats the step. Other
    buffers (masks, caches) cost a comparison of two integers.
    """

    def __init__(self, model: nn.Module, tracked: Iterable[str] = ()) -> None:
        found: dict[str, _Buffer] = {}
        seen: set[int] = set()
        start = set(tracked)
        for path, module in model.named_modules():
            for key, live in own_buffers(module).items():
                if live is None or id(live) in seen:
                    continue
                seen.add(id(live))
                name = f"{path}.{key}" if path else key
                found[name] = _Buffer(name, module, key, live)
                if isinstance(module, BatchNorm):
                    start.add(name)
        self._buffers = [found[name] for name in sorted(found)]
        self.names = tuple(b.name for b in self._buffers)
        """All buffers, in their order."""
        self._is_tracked = [name in start for name in self.names]
        places = ((id(b.module), b.key) for b in self._buffers)
        self._index = {place: i for i, place in enumerate(places)}
        self._has_new_change = [False] * len(self.names)
        self._num_seen = 0
        self._integers: list[dict[str, Tensor]] = []

    @property
    def tracked(self) -> tuple[str, ...]:
        return tuple(b.name for b in self._tracked())

    def is_tracked(self, module: nn.Module, key: str) -> bool:
        index = self._index.get((id(module), key))
        return index is not None and self._is_tracked[index]

    @property
    def floating(self) -> dict[str, Tensor]:
        """The tracked floating buffers, in the order of the leaves."""
        return {b.name: b.live for b in self._tracked() if b.is_floating}

    @property
    def integer_names(self) -> tuple[str, ...]:
        """The tracked other buffers, in the order of the hashes."""
        return tuple(b.name for b in self._tracked() if not b.is_floating)

    @property
    def integers(self) -> dict[str, Tensor]:
        """The values that the newest micro-batch gave to the tracked integer buffers."""
        return self._integers[-1] if self._integers else {}

    @property
    def tracked_integers(self) -> dict[str, Tensor]:
        """The live tensors of the tracked integer buffers."""
        return {b.name: b.live for b in self._tracked() if not b.is_floating}

    def take_integers(self, values: dict[str, Tensor]) -> None:
        """As another rank's micro-batches gave them: this one computes none."""
        self._integers = [values]

    def replace_integers(self, values: dict[str, Tensor]) -> None:
        """As the ranks have them that computed with them, in each micro-batch of the step."""
        self._integers = [values for _ in self._integers] or [values]

    def track(self, names: Iterable[str]) -> None:
        """Track these buffers as well, from the next `begin_step` on."""
        added = set(names)
        for i, name in enumerate(self.names):
            self._is_tracked[i] = self._is_tracked[i] or name in added

    def track_only(self, names: Iterable[str]) -> None:
        """Forget what was tracked beyond these and look closely again: another state was taken
        over, or a step was given up."""
        kept = set(names)
        self._is_tracked = [name in kept for name in self.names]
        self._num_seen = 0

    @torch.no_grad()
    def begin_step(self) -> None:
        """Before the first micro-batch of every attempt at a step."""
        self.restore()
        self._integers = []

    @torch.no_grad()
    def begin_microbatch(self) -> None:
        """Put the tracked buffers back to their committed values."""
        _restore(self._tracked())

    @torch.no_grad()
    def separate(self) -> None:
        """The micro-batch that begins has tracked buffers in memory of its own: the next one begins
        before its backward has ended."""
        for buffer in self._tracked():
            own_buffers(buffer.module)[buffer.key] = buffer.live.clone()

    @torch.no_grad()
    def end_microbatch(self) -> list[Tensor]:
        """After a micro-batch's forward and backward: its floating leaves, in float64."""
        self._num_seen += 1
        compare = self._num_seen <= _NUM_COMPARED
        for i, buffer in enumerate(self._buffers):
            if not self._is_tracked[i] and buffer.has_changed(compare):
                self._has_new_change[i] = True
        tracked = self._tracked()
        integers = {b.name: b.current for b in tracked if not b.is_floating}
        self._integers.append(dict(zip(integers, _copied(integers.values()), strict=True)))
        return _copied((b.current for b in tracked if b.is_floating), _WIDE)

    def join_integers(self, number: int, names: Container[str]) -> None:
        """The newest forward was a part of the micro-batch of this number in the step, with these
        buffers. Parts of one are told in their order, the first ones in that of micro-batches."""
        newest = self._integers.pop()
        if number == len(self._integers):
            self._integers.append(newest)
        else:
            self._integers[number] |= {n: value for n, value in newest.items() if n in names}

    def untracked_changes(self) -> set[str]:
        """Buffers that a micro-batch of this step changed although they are not tracked."""
        pairs = zip(self.names, self._has_new_change, strict=True)
        return {name for name, has_changed in pairs if has_changed}

    def integer_hashes(self, read: Callable[[Tensor], Tensor]) -> list[tuple[int, ...]]:
        """Per micro-batch of this step: a signed 64-bit hash of each integer buffer's value.

        read: of the step's group."""
        plain = [flat_bytes(value) for values in self._integers for value in values.values()]
        if not plain:
            return [() for _ in self._integers]
        pieces = read(torch.cat(plain)).split([p.numel() for p in plain])  # one for all of them
        hashes = iter([_hash(piece) for piece in pieces])
        return [tuple(next(hashes) for _ in values) for values in self._integers]

    @torch.no_grad()
    def commit(
        self, sums: Mapping[str, Tensor], integers: Mapping[str, Tensor], num_microbatches: int
    ) -> None:
        """Make the means of `sums` (over all ids) and `integers` the new state."""
        for buffer in self._tracked():
            if buffer.is_floating:
                mean = sums[buffer.name] / num_microbatches
                buffer.committed.copy_(mean.view(buffer.live.shape))
            else:
                buffer.committed.copy_(integers[buffer.name])
        _restore(self._tracked())
        self._integers = []

    @torch.no_grad()
    def restore(self) -> None:
        """Put all buffers back to their committed values, the untracked that changed included."""
        flags = zip(self._buffers, self._is_tracked, self._has_new_change, strict=True)
        _restore([buffer for buffer, *is_other in flags if any(is_other)])
        self._has_new_change = [False] * len(self.names)

    @torch.no_grad()
    def restore_all(self) -> None:
        """After a pass that is no micro-batch of a step, or one that was cut off before anybody
        looked for changes: whatever it changed is put back."""
        _restore(self._buffers)
        self._has_new_change = [False] * len(self.names)

    @torch.no_grad()
    def refresh(self) -> None:
        """The live values are committed ones: after a load or a copy from a peer."""
        for buffer in self._buffers:
            current = buffer.current
            if current is not buffer.live:
                buffer.live.copy_(current)
            buffer.committed.copy_(buffer.live)
        _restore(self._buffers)

    def _tracked(self) -> list[_Buffer]:
        flags = zip(self._buffers, self._is_tracked, strict=True)
        return [buffer for buffer, is_tracked in flags if is_tracked]


def _restore(buffers: Sequence[_Buffer]) -> None:
    """Their committed values. A few kernels for all of them: each has a few numbers only."""
    if buffers:
        copy_all_([b.live for b in buffers], [b.committed for b in buffers])
    for buffer in buffers:
        own_buffers(buffer.module)[buffer.key] = buffer.live
        buffer.version = version_of(buffer.live)


def _copied(
    tensors: Iterable[Tensor], wide: Mapping[bool, torch.dtype] | None = None
) -> list[Tensor]:
    """wide: the dtype of the copies of real tensors, and of complex ones; None: their own."""
    plain = list(tensors)
    dtypes = [t.dtype if wide is None else wide[t.is_complex()] for t in plain]
    found = [torch.empty_like(t, dtype=dtype) for t, dtype in zip(plain, dtypes, strict=True)]
    if found:
        copy_all_(found, plain)
    return found


def _hash(value: Tensor) -> int:
    digest = blake2b(memoryview(cast(Any, value.numpy())), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# --- all of the state ---------------------------------------------------------------------
def step_of(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


class TrainState:
    """Model, optimizer, scheduler and the number of committed steps."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scheduler: Any | None,
        *,
        clip_norm: float | None,
        max_nonfinite: int,
        casting: Casting | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """parameters: those that are trained. casting: of the parameters in a forward; None: they
        are used as they are. loss_scale: to begin with; None: losses are not scaled."""
        self.model, self.parameters = model, parameters
        self.optimizer, self.scheduler = optimizer, scheduler
        self.clip_norm, self.max_nonfinite = clip_norm, max_nonfinite
        self.casting = casting or Casting(model, None)
        self.loss_scale = loss_scale
        self.buffers = TrackedBuffers(model)
        self.step, self.origin = 0, 0
        self.skipped_in_a_row = 0
        self.first_nonfinite = ""
        """Of the step that stops the run: where, and what to do (workers/nonfinite.py)."""
        self.log_names: tuple[str, ...] = ()
        """Names given to session.log so far, sorted: the layout of votes."""
        self._agreed = (self.buffers.tracked, self.log_names)
        """As of the last committed step: a vote that was cut off reached some members only."""
        self.gradient_norm: float | None = None
        self._snapshots: list[Snapshot] = []

    def apply(
        self,
        update: Update,
        step: Callable[[torch.optim.Optimizer], Any] = step_of,
    ) -> None:
        """Take one step, by oneself: all have voted for it. step: of the optimizer. Raises
        FloatingPointError after too many steps that are not finite."""
        assert update.step == self.step + 1, (update.step, self.step)
        self.settle()
        self.buffers.track({**update.buffers, **update.integers})
        if update.is_finite:
            self._change_weights(update, step)
        else:
            self.buffers.restore()
        self.drop_gradients()
        if self.scheduler is not None:
            self.scheduler.step()
        self.log_names = update.log_names
        self._agreed = (self.buffers.tracked, self.log_names)
        self.step, self.origin = update.step, update.origin
        self._count_skipped(update.is_finite)
        if self.skipped_in_a_row > self.max_nonfinite:
            raise FloatingPointError(
                f"the gradients of {self.skipped_in_a_row} steps in a row, up to step "
                f"{self.step}, were not finite: {self.first_nonfinite}, or raise "
                f"faults.max_nonfinite (now {self.max_nonfinite})"
            )

    def _count_skipped(self, is_finite: bool) -> None:
        """A step that only found the loss scale too high is no sign of trouble."""
        scale = self.loss_scale
        is_search = scale is not None and scale.value > 1
        if scale is not None:
            self.loss_scale = scale.after(is_finite)
        if is_finite:
            self.skipped_in_a_row = 0
        elif not is_search:
            self.skipped_in_a_row += 1

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _change_weights(self, update: Update, step: Callable[[torch.optim.Optimizer], Any]) -> None:
        self._scale(update)
        self.drop_gradients()
        for name, gradient in update.gradients.items():
            parameter = self.parameters[name]
            if not is_shard(gradient):  # a follower receives it row by row
                gradient = laid_out(gradient, parameter.stride())
            parameter.grad = gradient
        step(self.optimizer)
        self.buffers.commit(update.buffers, update.integers, update.num_microbatches)

    def _scale(self, update: Update) -> None:
        """Sums become means, clipped. The norm is of the sums, whose divisor the vote has found."""
        divisor = update.divisor * (self.loss_scale.value if self.loss_scale else 1.0)
        sums = [local(gradient) for gradient in update.gradients.values()]
        coefficient = 1.0
        if self.clip_norm is not None:
            known = update.squares
            squares = [known[n] for n in update.gradients if n in known] or [row_squares(sums)]
            self.gradient_norm = norm_of_rows(torch.cat(squares)) / divisor
            coefficient = clip_coefficient(self.gradient_norm, self.clip_norm)
        if math.frexp(divisor)[0] == 0.5:  # by a power of two: exact, so that one pass is enough
            divisor, coefficient = 1.0, coefficient / divisor
        if sums and divisor != 1.0:
            divide_all_(sums, divisor)
        if sums and coefficient != 1.0:
            multiply_all_(sums, coefficient)

    def snapshot(
        self,
        select: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
        memory: HostMemory | Arena | None = None,
    ) -> Snapshot:
        """The state of the last committed step; to be asked for between steps.

        select: gives those tensors, or views of them, that the reader wants.
        memory: for the copies.
        """
        header, tensors = self.header_and_tensors()
        snapshot = Snapshot(header, select(tensors), memory)
        self._snapshots.append(snapshot)
        return snapshot

    def header_and_tensors(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What `restore` takes: JSON, and the live tensors (a rank's shard where sharded)."""
        values, tensors = serialization.capture(self.model, self.optimizer, self.scheduler)
        header = {
            "type": "snapshot",
            "step": self.step,
            "origin": self.origin,
            "values": values,
            "weights": serialization.weight_names(self.model),
            "tracked": list(self._agreed[0]),
            "log_names": list(self._agreed[1]),
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_scale": None if self.loss_scale is None else astuple(self.loss_scale),
        }
        return header, tensors

    def tensors(self) -> dict[str, Tensor]:
        """The live state by its names in a snapshot; who changes it calls `settle` first."""
        return serialization.capture(self.model, self.optimizer, self.scheduler)[1]

    def settle(self) -> None:
        """The state is about to change: copy what readers have not."""
        while self._snapshots:
            self._snapshots.pop().settle()

    def restore(self, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over a snapshot; `tensors` are given away."""
        self.settle()
        values = entry(header, "values", dict)
        step, skipped = entry(header, "step", int), entry(header, "skipped_in_a_row", int)
        log_names, tracked = names_in(header, "log_names"), names_in(header, "tracked")
        serialization.restore(
            self.model, self.optimizer, self.scheduler, values, tensors, is_owned=True
        )
        self.step, self.skipped_in_a_row = step, skipped
        self.origin = entry(header, "origin", int) if "origin" in header else 0
        loss_scale = header.get("loss_scale")
        if self.loss_scale is not None and loss_scale:  # else keep the first one
            self.loss_scale = LossScale(*loss_scale)
        self.log_names = tuple(log_names)
        self.buffers.track_only(tracked)
        self._agreed = (self.buffers.tracked, self.log_names)
        self.buffers.refresh()

    def forget_unagreed(self) -> None:
        """Before another attempt at a step, by other members: they may not know what this one
        found out (changing buffers, names of logged values) in a step that was never committed."""
        tracked, self.log_names = self._agreed
        self.buffers.track_only(tracked)
