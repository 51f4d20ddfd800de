"""What stages of a pipeline send each other: activations down, their gradients back, and the
gradients of parameters that two stages use.

Every wait can be given up: a lost peer ends in `on_lost`, which must raise.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NoReturn, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed import Work

from elastic.protocol.errors import PeerLost
from workers.data.loader import AnyLoader
from workers.parallel.pipeline.links import Kind, Links

MOST_TENSORS = 64
"""Between two stages, of a micro-batch and a kind."""
POSTED_AT_ONCE = 8
"""Tensors that were sent, before it is asked whether they have arrived: that wakes a thread."""
MOST_TURNS = 2
"""Stages of a rank."""
T = TypeVar("T")
_KINDS = get_args(Kind)


class Arriving:
    """Tensors on their way to this rank; there once `wait` has returned."""

    def __init__(self, by: "Neighbours", works: Sequence[Work], into: list[Tensor]) -> None:
        self._by, self._works, self._into = by, works, into

    def wait(self) -> list[Tensor]:
        self._by.wait(self._works)
        return self._into


class Neighbours:
    """A rank's, by stage, for the life of a generation."""

    def __init__(
        self,
        links: Links,
        ranks: Sequence[int],
        on_lost: Callable[[PeerLost], NoReturn],
        gathering: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """ranks: of each stage, also where one has several. gathering: entered while this rank
        waits."""
        self._links, self._ranks = links, ranks
        self._num_ranks = len(set(ranks))
        self._on_lost, self._gathering = on_lost, gathering
        self._posted: list[Tensor] = []
        self._sending: list[tuple[Sequence[Work], Sequence[Tensor]]] = []
        """What is on its way, by what tells that it has arrived."""
        self._handed: dict[tuple[Kind, int, int], list[Tensor]] = {}
        """Between two stages of this rank, until both have asked for it."""
        self.sent_bytes = 0
        self.source: Callable[[AnyLoader], AnyLoader] = lambda loader: loader
        """Of this rank's micro-batches, by the worker's own loader."""

    def begin(self) -> None:
        """An attempt at a step."""
        self._handed = {}

    def send(self, tensors: Sequence[Tensor], stage: int, kind: Kind, microbatch_id: int) -> None:
        """They are on their way when this returns, and must not be changed before `settle`."""
        border = stage if kind == "activation" else stage + 1
        if self._is_mine(stage):
            self._hand(kind, microbatch_id, border).extend(_plain(t) for t in tensors)
            return
        turn = self._turn(border)
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                self._send(tensor, stage, kind, _tag(kind, microbatch_id, index, turn), turn)
        if len(self._posted) >= POSTED_AT_ONCE:
            self._await_posted()

    def _send(self, tensor: Tensor, stage: int, kind: Kind, tag: int, turn: int = 0) -> None:
        plain = _plain(tensor)
        self.sent_bytes += plain.nbytes
        self._do(lambda: self._links.post(plain, self._ranks[stage], kind, tag, turn))
        self._posted.append(plain)

    def _await_posted(self) -> None:
        """And let go of what has arrived."""
        posted, self._posted = self._posted, []
        self._sending.append((self._links.posted(), posted))
        self._sending = [
            (works, tensors)
            for works, tensors in self._sending
            if not all(work.is_completed() for work in works)
        ]

    def _turn(self, border: int) -> int:
        """Which of the borders between two ranks; border: the stage behind it."""
        return border // self._num_ranks

    def _is_mine(self, stage: int) -> bool:
        return self._ranks[stage] == self._links.rank

    def _hand(self, kind: Kind, microbatch_id: int, border: int) -> list[Tensor]:
        """The same list for who sends and who receives, in either order."""
        key = (kind, microbatch_id, border)
        if key in self._handed:
            return self._handed.pop(key)
        return self._handed.setdefault(key, [])

    def send_shared(self, gradient: Tensor, stage: int, index: int, microbatch_id: int) -> None:
        """Of the shared parameter of this number. Not to be changed before `settle`."""
        self._send(gradient, stage, "shared", _tag("shared", microbatch_id, index))

    def receive_shared(
        self, parameter: Tensor, stage: int, index: int, microbatch_id: int
    ) -> Tensor:
        found = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        rank, tag = self._ranks[stage], _tag("shared", microbatch_id, index)
        self.wait([self._do(lambda: self._links.receive(found, rank, "shared", tag))])
        return found

    def receive(
        self, like: Sequence[Tensor], stage: int, kind: Kind, microbatch_id: int
    ) -> Arriving:
        """Tensors of these shapes and dtypes; an absent one will do."""
        border = stage + 1 if kind == "activation" else stage
        if self._is_mine(stage):
            return Arriving(self, [], self._hand(kind, microbatch_id, border))
        into = [torch.empty(tuple(t.shape), dtype=t.dtype, device=t.device) for t in like]
        turn = self._turn(border)
        rank, works = self._ranks[stage], list[Work]()
        for index, tensor in enumerate(into):
            if tensor.numel():
                tag = _tag(kind, microbatch_id, index, turn)
                receive = partial(self._links.receive, tensor, rank, kind, tag, turn)
                works.append(self._do(receive))
        return Arriving(self, works, into)

    def announce(self, numbers: Tensor, stages: Sequence[int], microbatch_id: int) -> None:
        """Of a micro-batch, to these. Not to be changed before `settle`."""
        for stage in stages:
            self._send(numbers, stage, "batch", _tag("batch", microbatch_id, 0))

    def hear(self, numbers: Tensor, microbatch_id: int) -> None:
        """What the first stage announces."""
        rank, tag = self._ranks[0], _tag("batch", microbatch_id, 0)
        self.wait([self._do(lambda: self._links.receive(numbers, rank, "batch", tag))])

    def settle(self) -> None:
        """Until all that was sent has arrived."""
        self._await_posted()
        self.wait([work for works, _ in self._sending for work in works])
        self._sending = []

    def wait(self, works: Sequence[Work]) -> None:
        with self._gathering():
            for work in works:
                self._do(work.wait)

    def _do(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except PeerLost as error:
            self._on_lost(error)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()


def tag_of_sum(index: int) -> int:
    """Of the message with a step's sum of the shared parameter of this number."""
    return _tag("sum", 0, index)


def _tag(kind: Kind, microbatch_id: int, index: int, turn: int = 0) -> int:
    assert index < MOST_TENSORS
    assert turn < MOST_TURNS
    of_kind = (microbatch_id * len(_KINDS) + _KINDS.index(kind)) * MOST_TENSORS + index
    return of_kind * MOST_TURNS + turn
