"""A newcomer's part of a model in stages, copied while the others train: from each of several
members the tensors of some blocks, then what their steps change of them.

What comes over which connection, and when, is workers/membership/ahead.py's. Nobody counts on it:
once a generation takes the newcomer in, it is one more that holds these blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from elastic.protocol.layout import BlockSets, Position, TensorLayout
from elastic.protocol.mesh import Mesh
from elastic.protocol.messages.to_worker import Sync
from workers.train_state.snapshot import Snapshot
from workers.train_state.train_state import TrainState, Update


@dataclass(frozen=True, slots=True)
class Sources:
    """From whom a newcomer copies what."""

    mesh: Mesh
    """The one that is likely to come next."""
    rank: int
    """Its own there."""
    blocks: Mapping[int, BlockSets]
    """By rank of those who train now: the tensors of which blocks that one gives."""


class PartAhead:
    """Of one worker, as a member that gives, or as a newcomer."""

    def __init__(
        self,
        train_state: TrainState,
        layout: Callable[[str, Tensor], TensorLayout],
        plan: Callable[[Sync], Sources | None],
        *,
        is_live: Callable[[], bool],
        take: Callable[[Position, dict[str, Any], dict[str, Tensor]], None],
        claim: Callable[[Position], None],
    ) -> None:
        """plan: None if it cannot be known, or there is nothing to copy. is_live, take, claim: of
        its shards (workers/parallel/shards.py)."""
        self.train_state, self._layout, self.plan = train_state, layout, plan
        self._is_live, self._take, self._claim = is_live, take, claim

    # --- a member ------------------------------------------------------------------------
    def snapshot(self, blocks: BlockSets) -> Snapshot | None:
        """Of the last committed step; None if this worker does not have them."""
        if not self._is_live() or not self._has(blocks):
            return None
        return self.train_state.snapshot(lambda tensors: self._only(tensors, blocks))

    def _has(self, blocks: BlockSets) -> bool:
        parameters = ((f"model/{n}", p) for n, p in self.train_state.model.named_parameters())
        layouts = ((self._layout(name, p), p) for name, p in parameters)
        return all(tuple(p.shape) == of.shape for of, p in layouts if of.blocks in blocks)

    def update(self, update: Update, blocks: BlockSets) -> Update:
        gradients = {f"model/{n}": g for n, g in update.gradients.items()}
        wanted = self._only(gradients, blocks)
        return replace(update, gradients={n: wanted[f"model/{n}"] for n in update.gradients})

    def _only(self, tensors: Mapping[str, Tensor], blocks: BlockSets) -> dict[str, Tensor]:
        """All, those of other blocks without elements."""

        def is_foreign(name: str, tensor: Tensor) -> bool:
            needed_by = self._layout(name, tensor).blocks
            return bool(needed_by) and needed_by not in blocks

        return {n: t[:0] if is_foreign(n, t) else t for n, t in tensors.items()}

    # --- a newcomer -----------------------------------------------------------------------
    def install(
        self, header: dict[str, Any], parts: Sequence[Mapping[str, Tensor]], at: Position
    ) -> None:
        """A state of these. parts: of several sources, of the same step; given away. at: its own,
        which `Position.lacks` what is in none of them."""
        found: dict[str, Tensor] = {}
        for part in parts:
            found |= {n: t for n, t in part.items() if t.numel() or n not in found}
        self._take(at, header, found)

    def finish(self, sources: Sources) -> None:
        """All of it is there: it is this worker's to give."""
        self._claim(Position(sources.mesh, sources.rank))


def merged(updates: Sequence[Update]) -> Update:
    """What one step changes, of the sources that it came from."""
    gradients = dict(updates[0].gradients)
    for update in updates[1:]:
        gradients |= {n: g for n, g in update.gradients.items() if g.numel()}
    return replace(updates[0], gradients=gradients)
