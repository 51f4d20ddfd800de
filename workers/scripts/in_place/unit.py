"""A unit: the gradients of one synchronised backward, summed over the members by samples.

Local gradients stay as they are until all members hold the sums, which the vote at its end says;
only then the means take their place. A unit that lost a member before is reduced again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elastic.protocol.errors import PeerLost
from workers.distributed.device_wait import mark, wait_for
from workers.distributed.pending import Settling
from workers.distributed.process_group import Group
from workers.scripts.in_place.buckets import Bucket, Limits, at_first, rebuilt


@dataclass(slots=True)
class Attempt:
    """At one unit, over one group; another one has memory of its own, as what was abandoned may
    still be written to."""

    group: Group
    weight: float
    sums: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    """By bucket: flat, and by parameter."""
    pending: list[Settling] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    """The lowest rank's, flat."""
    heard: set[int] = field(default_factory=set)
    """Parameters whose gradients the backward has brought."""
    is_summed: bool = False
    """The sums are here; the vote on them may have begun."""
    failure: Exception | None = None
    """Of a launch in the middle of the backward: it is raised at its end."""


class SecondGradient(RuntimeError):
    """A parameter got one in a backward after its first was sent."""


class Unit:
    """Of one model. All members launch its buckets in one order."""

    def __init__(self, parameters: Sequence[Tensor], limits: Limits) -> None:
        self._parameters, self._limits = tuple(parameters), limits
        self._buckets = at_first(self._parameters, limits)
        self._is_cut_anew = not limits.then
        self._knows_graph = not limits.skips_first_backward
        self._order: list[int] = []
        """Of the parameters, as the gradients of this unit have come."""
        self._attempt: Attempt | None = None

    def begin(self, group: Group, weight: float) -> None:
        """A backward; it is not launched over another group than this one."""
        self._attempt, self._order = Attempt(group, weight), []

    def note_order(self, index: int) -> None:
        """By it the buckets are cut anew, once."""
        if not self._is_cut_anew:
            self._order.append(index)

    def note_backward(self) -> None:
        """One without a unit."""
        self._knows_graph = True

    def hear_gradient(self, index: int) -> None:
        """It is there: what is complete is launched."""
        attempt = self._attempt
        if attempt is None or attempt.failure is not None:
            return
        if index in attempt.heard and self._is_launched(attempt, index):
            attempt.failure = SecondGradient(
                "a parameter got a second gradient in one backward after the first was sent; use "
                "checkpoint(use_reentrant=False)"
            )
            return
        attempt.heard.add(index)
        try:
            while len(attempt.sums) < len(self._buckets):
                bucket = self._buckets[len(attempt.sums)]
                if not attempt.heard.issuperset(bucket.indices):
                    return
                launch(attempt, bucket)
        except PeerLost as error:
            attempt.failure = error

    def _is_launched(self, attempt: Attempt, index: int) -> bool:
        return any(index in b.indices for b in self._buckets[: len(attempt.sums)])

    def reduce(self, group: Group, weight: float, buffers: Sequence[Tensor]) -> list[Any]:
        """What the vote says: the sum of the weights, which parameters nobody has used, and
        the lowest rank's order where it is to be taken. Raises PeerLost; what was launched is done
        again then, over another group."""
        attempt = self._attempt
        if attempt is None or attempt.group is not group:
            attempt = self._attempt = Attempt(group, weight)
        if attempt.failure is not None:
            raise attempt.failure
        while len(attempt.sums) < len(self._buckets):
            launch(attempt, self._buckets[len(attempt.sums)])
        attempt.buffers = flattened(buffers)
        for flat in attempt.buffers:
            attempt.pending += group.broadcast([flat])._pending
        for pending in attempt.pending:
            pending.wait()
        if (summed := mark(self._parameters[0].device)) is not None:
            wait_for(summed, group.device_waits_in)
        attempt.is_summed = True
        return self._vote(group, weight)

    def _vote(self, group: Group, weight: float) -> list[Any]:
        used = [float(parameter.grad is not None) for parameter in self._parameters]
        ballot = torch.tensor([weight, *used], dtype=torch.float64)
        group.control.all_reduce(ballot).wait()
        total, *num_used = group.control.read(ballot).tolist()
        unused = [i for i, num in enumerate(num_used) if not num]
        return [total, unused, self._agreed_order(group)]

    def _agreed_order(self, group: Group) -> list[int]:
        """The lowest rank's; empty where nothing is cut anew."""
        if self._is_cut_anew or not self._knows_graph:
            return []
        others = reversed(range(len(self._parameters)))
        order = torch.tensor(list(dict.fromkeys([*self._order, *others])))
        group.control.broadcast([order]).wait()
        return group.control.read(order).tolist()

    @torch.no_grad()
    def take(self, vote: Sequence[Any], buffers: Sequence[Tensor]) -> None:
        """The means are the gradients, and the buffers the lowest rank's."""
        assert self._attempt is not None
        assert self._attempt.is_summed
        total, unused = vote[0], set(vote[1])
        share = self._attempt.group.size() / total
        """1 where all had batches of the script's own size: the bits are stock DDP's then."""
        for bucket, (flat, views) in zip(self._buckets, self._attempt.sums, strict=True):
            if share != 1:
                flat.mul_(share)
            for index, parameter, view in zip(
                bucket.indices, bucket.parameters, views, strict=True
            ):
                if index in unused:
                    continue
                if parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)
            bucket.spare = (flat, views)
        unflatten(self._attempt.buffers, buffers)
        self._attempt, self._knows_graph = None, True
        if order := vote[2]:
            self._buckets, self._is_cut_anew = rebuilt(self._parameters, self._limits, order), True


@torch.no_grad()
def launch(attempt: Attempt, bucket: Bucket) -> None:
    flat, views = bucket.take_memory()
    factor = attempt.weight / attempt.group.size()
    for parameter, view in zip(bucket.parameters, views, strict=True):
        if parameter.grad is None or not factor:
            view.zero_()
        else:
            torch.mul(parameter.grad, factor, out=view)
    attempt.sums.append((flat, views))
    attempt.pending.append(attempt.group.all_reduce(flat))


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


@torch.no_grad()
def flattened(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([t.reshape(-1) for t in kind]) for kind in by_kind(tensors)]


@torch.no_grad()
def unflatten(flats: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for flat, kind in zip(flats, by_kind(tensors), strict=True):
        pieces = flat.split([t.numel() for t in kind])
        for tensor, piece in zip(kind, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
