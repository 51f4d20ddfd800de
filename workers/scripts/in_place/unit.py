"""A unit: the gradients of one synchronised backward, summed over the members by samples.

Local gradients stay as they are until the sums are here; only then the means take their place. A
member that has them keeps them until its next unit has ended: whoever is behind when another one is
lost gets them from there. A unit that no member has ended is reduced again among who is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions

from elastic.protocol.errors import PeerLost
from workers.distributed.device_wait import mark, wait_for
from workers.distributed.pending import Settling
from workers.distributed.process_group import Group
from workers.scripts.in_place.buckets import Bucket, Limits, at_first, rebuilt
from workers.scripts.in_place.rule import SECOND_GRADIENT
from workers.torch_private.tensors import copy_all_, multiply_all_


@dataclass(frozen=True, slots=True)
class Part:
    """What a member brings to a unit besides its gradients."""

    weight: float
    """By samples: 1 for as many as without a loss."""
    refuses: bool = False
    """It has news that the others have not heard: that it cannot go on in place, for one."""


class Outcome(NamedTuple):
    """Of a unit; the same on all members. As JSON it is a list, in this order."""

    size: int
    """So many members have brought a part."""
    weight: float
    """Of all parts together."""
    num_refusing: int
    unused: Sequence[int]
    """Parameters that nobody has used."""
    order: Sequence[int]
    """Of the lowest rank's parameters, as their gradients came; empty: nothing is cut anew."""


@dataclass(slots=True)
class Attempt:
    """At one unit, over one group; another one has memory of its own, as what was abandoned may
    still be written to."""

    group: Group
    part: Part
    missing: list[int]
    """By bucket: so many gradients that the backward has not brought yet."""
    sums: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    """By bucket: flat, and by parameter."""
    pending: list[Settling] = field(default_factory=list)
    ballot: Tensor | None = None
    buffers: list[Tensor] = field(default_factory=list)
    """The lowest rank's, flat."""
    heard: set[int] = field(default_factory=set)
    """Parameters whose gradients the backward has brought."""
    failure: Exception | None = None
    """Of a launch in the middle of the backward: it is raised at its end."""

    def flats(self) -> list[Tensor]:
        return [*(flat for flat, _ in self.sums), *self.buffers]


class SecondGradient(RuntimeError):
    """A parameter got one in a backward after its first was sent."""


class Unit:
    """Of one model. All members launch its buckets in one order."""

    def __init__(self, parameters: Sequence[Tensor], limits: Limits) -> None:
        self._parameters, self._limits = tuple(parameters), limits
        self._cut(at_first(self._parameters, limits))
        self._is_cut_anew = not limits.then
        self._knows_graph = not limits.skips_first_backward
        self._order: list[int] = []
        """Of the parameters, as the gradients of this unit have come."""
        self._attempt: Attempt | None = None
        self._ended: Attempt | None = None
        """The newest unit that has ended here."""

    def _cut(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._bucket_of = {i: number for number, b in enumerate(buckets) for i in b.indices}
        self._sizes = [len(bucket.indices) for bucket in buckets]

    def begin(self, group: Group, part: Part) -> None:
        """A backward; it is not launched over another group than this one."""
        self._attempt, self._order = Attempt(group, part, list(self._sizes)), []

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
        number = self._bucket_of[index]
        if index in attempt.heard:
            if number < len(attempt.sums):
                attempt.failure = SecondGradient(SECOND_GRADIENT.why)
            return
        attempt.heard.add(index)
        attempt.missing[number] -= 1
        if number == len(attempt.sums) and not attempt.missing[number]:
            self._launch_complete(attempt)

    def _launch_complete(self, attempt: Attempt) -> None:
        try:
            while not attempt.missing[len(attempt.sums)]:
                launch(attempt, self._buckets[len(attempt.sums)])
                if len(attempt.sums) == len(self._buckets):
                    self._cast(attempt)
                    return
        except PeerLost as error:
            attempt.failure = error

    def reduce(self, group: Group, part: Part, buffers: Sequence[Tensor]) -> Outcome:
        """Raises PeerLost; what was launched is done again then, over another group."""
        attempt = self._attempt
        if attempt is None or attempt.group is not group:
            attempt = self._attempt = Attempt(group, part, list(self._sizes))
        if attempt.failure is not None:
            raise attempt.failure
        while len(attempt.sums) < len(self._buckets):
            launch(attempt, self._buckets[len(attempt.sums)])
        if attempt.ballot is None:
            self._cast(attempt)
        attempt.buffers = flattened(buffers)
        for flat in attempt.buffers:
            attempt.pending += group.broadcast([flat])._pending
        for pending in attempt.pending:
            pending.wait()
        if (summed := mark(self._parameters[0].device)) is not None:
            wait_for(summed, group.device_waits_in)
        return self._outcome(attempt)

    def _cast(self, attempt: Attempt) -> None:
        """Behind the last bucket, and along with it."""
        used = [float(parameter.grad is not None) for parameter in self._parameters]
        said = [attempt.part.weight, float(attempt.part.refuses), *used]
        attempt.ballot = torch.tensor(said, dtype=torch.float64)
        attempt.pending.append(attempt.group.control.all_reduce(attempt.ballot))

    def _outcome(self, attempt: Attempt) -> Outcome:
        group = attempt.group
        assert attempt.ballot is not None
        weight, num_refusing, *num_used = group.control.read(attempt.ballot).tolist()
        unused = () if all(num_used) else tuple(i for i, num in enumerate(num_used) if not num)
        order = self._agreed_order(group)
        return Outcome(group.size(), weight, int(num_refusing), unused, order)

    def _agreed_order(self, group: Group) -> tuple[int, ...]:
        """The lowest rank's; empty where nothing is cut anew."""
        if self._is_cut_anew or not self._knows_graph:
            return ()
        others = reversed(range(len(self._parameters)))
        order = torch.tensor(list(dict.fromkeys([*self._order, *others])))
        group.control.broadcast([order]).wait()
        return tuple(group.control.read(order).tolist())

    @torch.no_grad()
    def take(self, outcome: Outcome, buffers: Sequence[Tensor]) -> Attempt:
        """The means are the gradients, and the buffers the lowest rank's. Gives what is to be kept
        for who has missed the end of this unit."""
        attempt = self._attempt
        assert attempt is not None
        share = outcome.size / outcome.weight
        """1 where all had as many samples as without a loss: the bits are stock DDP's then."""
        unused = set(outcome.unused)
        for bucket, (_, views) in zip(self._buckets, attempt.sums, strict=True):
            means = [
                (gradient_of(parameter), view)
                for index, parameter, view in zip(
                    bucket.indices, bucket.parameters, views, strict=True
                )
                if index not in unused
            ]
            if not means:
                continue
            gradients = [gradient for gradient, _ in means]
            copy_all_(gradients, [view for _, view in means])
            if share != 1:
                multiply_all_(gradients, share)
        unflatten(attempt.buffers, buffers)
        self._give_back(self._ended)
        self._attempt, self._ended, self._knows_graph = None, attempt, True
        if outcome.order:
            self._cut(rebuilt(self._parameters, self._limits, outcome.order))
            self._is_cut_anew, self._ended = True, None
        return attempt

    def _give_back(self, ended: Attempt | None) -> None:
        """Its memory is the next unit's: all members have begun one after it."""
        if ended is not None:
            for bucket, memory in zip(self._buckets, ended.sums, strict=True):
                bucket.spare = memory

    def receive(self, group: Group, source: int, buffers: Sequence[Tensor]) -> None:
        """This member is behind: the sums are those of another one. Raises PeerLost."""
        assert self._attempt is not None
        received = Attempt(group, self._attempt.part, [])
        received.sums = [bucket.take_memory() for bucket in self._buckets]
        received.buffers = flattened(buffers)
        broadcast(group, received.flats(), source)
        self._attempt = received


def gradient_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad


def send(group: Group, ended: Attempt, source: int) -> None:
    """What a member that is behind receives; all who are not behind call it. Raises PeerLost."""
    is_source = group.rank() == source
    flats = ended.flats()
    broadcast(group, flats if is_source else [torch.empty_like(f) for f in flats], source)


def broadcast(group: Group, flats: Sequence[Tensor], source: int) -> None:
    options = BroadcastOptions()
    options.rootRank = source
    for flat in flats:
        group.broadcast([flat], options).wait()
    if flats and (received := mark(flats[0].device)) is not None:
        wait_for(received, group.device_waits_in)


@torch.no_grad()
def launch(attempt: Attempt, bucket: Bucket) -> None:
    flat, views = bucket.take_memory()
    factor = attempt.part.weight / attempt.group.size()
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
