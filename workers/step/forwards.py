"""How the batches of an evaluation go through the model on this rank: `Forwards`, and the plain
way, in which a rank computes whole batches.

What becomes of the values is workers/evaluation.py's.
"""

from collections.abc import Callable
from typing import Any, Protocol

from elastic.protocol.mesh import Mesh, microbatch_ids


class Elsewhere:
    """The result of a forward, on ranks that have it not."""


class Forwards(Protocol):
    """Of one rank, for an evaluation."""

    def ids(self, num_batches: int) -> range:
        """The batches that this rank computes, or its part of."""
        ...

    def num_echoes(self, num_batches: int) -> int:
        """Forwards more that the other ranks need of this one, whose results do not count."""
        ...

    def run(self, batch_id: int, forward: Callable[[], Any]) -> Any:
        """What the forward returns, or Elsewhere. Raises StepCancelled."""
        ...

    def end(self) -> None:
        """All batches have been through."""
        ...


class PlainForwards:
    """A rank computes whole batches."""

    def __init__(self, mesh: Mesh, rank: int, *, is_collective: bool) -> None:
        """is_collective: a forward exchanges parameters, so that all must make equally many."""
        self._mesh, self._rank, self._is_collective = mesh, rank, is_collective

    def ids(self, num_batches: int) -> range:
        mesh, rank = self._mesh, self._rank
        if mesh.is_inactive(rank):
            return range(0)
        return microbatch_ids(num_batches, mesh.num_active, mesh.position(rank))

    def num_echoes(self, num_batches: int) -> int:
        if not self._is_collective or self._mesh.is_inactive(self._rank):
            return 0
        most = len(microbatch_ids(num_batches, self._mesh.num_active, 0))  # no rank has more
        return most - len(self.ids(num_batches))

    def run(self, batch_id: int, forward: Callable[[], Any]) -> Any:
        return forward()

    def end(self) -> None:
        pass
