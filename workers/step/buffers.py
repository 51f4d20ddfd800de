"""Committed buffers: every micro-batch starts from those of the last committed step.

Floating buffers become the mean over all micro-batches, integer buffers must agree; who sums and
votes is the session's business.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor, nn

from elastic.protocol.errors import UserError
from workers.torch_private.modules import BatchNorm, is_persistent, own_buffers
from workers.torch_private.tensors import version_of

_NUM_COMPARED = 2  # micro-batches in which unchanged version counters are not believed


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

    def restore(self) -> None:
        self.live.copy_(self.committed)
        own_buffers(self.module)[self.key] = self.live
        self.version = version_of(self.live)

    def has_changed(self, compare: bool) -> bool:
        held = own_buffers(self.module).get(self.key)
        if held is not None and held is not self.live and self._is_grown_cache(held):
            self.live, self.committed = held, held.detach().clone()
            self.version = version_of(held)
            return False
        if held is not self.live or version_of(self.live) != self.version:
            return True
        return compare and not torch.equal(_plain(self.live), _plain(self.committed))


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
        for buffer in self._tracked():
            buffer.restore()

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
        self._integers.append({b.name: b.current.clone() for b in tracked if not b.is_floating})
        return [_widened(b.current) for b in tracked if b.is_floating]

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
        plain = [_plain(value) for values in self._integers for value in values.values()]
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
            buffer.restore()
        self._integers = []

    @torch.no_grad()
    def restore(self) -> None:
        """Put all buffers back to their committed values, the untracked that changed included."""
        for i, buffer in enumerate(self._buffers):
            if self._is_tracked[i] or self._has_new_change[i]:
                buffer.restore()
            self._has_new_change[i] = False

    @torch.no_grad()
    def restore_all(self) -> None:
        """After a pass that is no micro-batch of a step, or one that was cut off before anybody
        looked for changes: whatever it changed is put back."""
        for i, buffer in enumerate(self._buffers):
            buffer.restore()
            self._has_new_change[i] = False

    @torch.no_grad()
    def refresh(self) -> None:
        """The live values are committed ones: after a load or a copy from a peer."""
        for buffer in self._buffers:
            current = buffer.current
            if current is not buffer.live:
                buffer.live.copy_(current)
            buffer.committed.copy_(buffer.live)
            buffer.restore()

    def _tracked(self) -> list[_Buffer]:
        flags = zip(self._buffers, self._is_tracked, strict=True)
        return [buffer for buffer, is_tracked in flags if is_tracked]


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def _hash(value: Tensor) -> int:
    digest = blake2b(memoryview(cast(Any, value.numpy())), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
