"""How one rank's tensor comes to another's, in a generation of stages.

Gloo tells messages between two ranks apart by their tags. NCCL does not: it matches them in order,
so each kind of message in each direction has a group of two there, and a wait in one of them holds
up no other. What is sent when is neighbours.py's and reducer.py's.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import Tensor
from torch.distributed import Work

from elastic.protocol.pipeline import PipelinePlan
from workers.distributed.pending import TorchWork
from workers.distributed.process_group import AnyGroup
from workers.parallel.pipeline.chain import Chain

Kind = Literal["activation", "gradient", "shared", "sum", "batch"]
"""Shared and sum: of a parameter that two stages use, a micro-batch's gradient and a step's sum.
Batch: the shapes of a micro-batch, on the host."""


class Link(NamedTuple):
    """From one rank to another, for messages of a kind that come in the order in which they go."""

    kind: Kind
    sender: int
    receiver: int
    turn: int = 0
    """Which of the borders between these two, where ranks have several stages."""


def links_of(plan: PipelinePlan, chain: Chain, ranks: list[int]) -> list[Link]:
    """All of a generation, in the order in which its ranks form them. ranks: by position."""
    found: set[Link] = set()
    begin = 0
    for stages in plan.pipelines:
        places = [ranks[begin + stages.place_of(stage)] for stage in range(stages.num_stages)]
        for border, (before, after) in enumerate(pairwise(places), 1):
            turn = border // stages.depth
            found.add(Link("activation", before, after, turn))
            found.add(Link("gradient", after, before, turn))
        for used in chain.shared.values():
            first, *others = sorted({stages.stage_of(block) for block in used})
            for other in others:
                found.add(Link("shared", places[other], places[first]))
                found.add(Link("sum", places[first], places[other]))
        begin += stages.depth
    return sorted(link for link in found if link.sender != link.receiver)


class Links:
    """Of one rank, for a generation."""

    def __init__(self, group: AnyGroup, links: Iterable[Link] = (), timeout_s: float = 0.0) -> None:
        """links: of all ranks; none where tags tell messages apart. timeout_s: for two ranks to
        meet. A collective. Raises PeerLost."""
        self.rank, self._group = group.rank(), group
        self._pairs: dict[Link, AnyGroup] = {}
        self._posted: list[Work] = []
        for link in links if not group.has_tags else ():
            if self.rank in (link.sender, link.receiver):
                name = f"{link.kind}{link.sender}-{link.receiver}/{link.turn}"
                members = (link.sender, link.receiver)
                self._pairs[link] = group.part(name, members, timeout_s, is_apart=True)

    def post(self, tensor: Tensor, rank: int, kind: Kind, tag: int, turn: int = 0) -> None:
        """tensor: contiguous, and not to be changed before it is sent, which `posted` tells."""
        if self._group.has_tags or kind == "batch":
            work = self._tagged(kind).post(tensor, rank, tag)
        else:
            pair, flat = self._pairs[Link(kind, self.rank, rank, turn)], tensor.view(-1)
            nothing, sizes = flat.new_empty(0), [0, flat.numel()]
            work = TorchWork(pair.all_to_all_flat(nothing, flat, [0, 0], sizes))
        if work is not None:
            self._posted.append(work)

    def posted(self) -> list[Work]:
        """What was posted since this was last asked."""
        works, self._posted = [*self._posted, self._group.posted()], []
        if self._group.control is not self._group:
            works.append(self._group.control.posted())
        return works

    def receive(self, tensor: Tensor, rank: int, kind: Kind, tag: int, turn: int = 0) -> TorchWork:
        """tensor: contiguous; it has what was sent once the work is done."""
        if self._group.has_tags or kind == "batch":
            return self._tagged(kind).recv([tensor], rank, tag)
        pair, flat = self._pairs[Link(kind, rank, self.rank, turn)], tensor.view(-1)
        nothing, sizes = flat.new_empty(0), [flat.numel(), 0]
        return TorchWork(pair.all_to_all_flat(flat, nothing, sizes, [0, 0]))

    def _tagged(self, kind: Kind) -> AnyGroup:
        return self._group.control if kind == "batch" else self._group
