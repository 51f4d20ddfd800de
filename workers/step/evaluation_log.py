"""What a member remembers of evaluations: its last result, and the last one of its peers.

How a result comes about is evaluation.py's. Every rank keeps it, the lowest reports it, and again
where it may not have been heard: elastic/on_ray/evaluations.py takes it once.
"""

from typing import NamedTuple

from workers.membership.link import ControllerLink


class Result(NamedTuple):
    """Of a completed evaluation."""

    step: int
    ordinal: int
    """How many were completed before it at this step."""
    values: dict[str, float]
    generation: int


class Evaluated:
    """Results of steps that the run stands by: going back forgets the later ones."""

    def __init__(self, link: ControllerLink) -> None:
        self._link = link
        self.last: Result | None = None
        self._of_peers: Result | None = None

    def next_ordinal(self, step: int) -> int:
        """Of the evaluation that begins at `step`."""
        return self.last.ordinal + 1 if self.last is not None and self.last.step == step else 0

    def known(self, step: int, ordinal: int) -> Result | None:
        """What the peers have completed, if this one is among it."""
        found = self._of_peers
        if found is None or found.step != step or found.ordinal < ordinal:
            return None
        return found

    def add(self, result: Result, rank: int) -> None:
        self.last = result
        self.say(rank)

    def hear(self, of_peers: list[object] | None, step: int) -> None:
        """A generation has formed at `step`; what its members know of evaluations."""
        self._of_peers = None if of_peers is None else Result(*of_peers)  # pyright: ignore[reportArgumentType]
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """What came after `step` will be done again."""
        if self.last is not None and self.last.step > step:
            self.last = None
        if self._of_peers is not None and self._of_peers.step > step:
            self._of_peers = None

    def say(self, rank: int) -> None:
        """The lowest rank reports the last one. Any thread."""
        last = self.last
        if rank == 0 and last is not None:
            self._link.send("evaluated", **last._asdict())
