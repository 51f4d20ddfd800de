"""What a member remembers of evaluations: its last result, and the last one of its peers.

How a result comes about is evaluation.py's. Every rank keeps it, the lowest reports it, and again
where it may not have been heard: elastic/on_ray/record/evaluations.py takes it once.
"""

from collections.abc import Callable

from elastic.protocol.messages.to_controller import Evaluated, Evaluation, Report


class EvaluationLog:
    """Results of steps that the run stands by: going back forgets the later ones."""

    def __init__(self, send: Callable[[Report], None]) -> None:
        """send: to the controller."""
        self._send = send
        self.last: Evaluation | None = None
        self._of_peers: Evaluation | None = None

    def next_ordinal(self, step: int) -> int:
        """Of the evaluation that begins at `step`."""
        return self.last.ordinal + 1 if self.last is not None and self.last.step == step else 0

    def known(self, step: int, ordinal: int) -> Evaluation | None:
        """What the peers have completed, if this one is among it."""
        found = self._of_peers
        if found is None or found.step != step or found.ordinal < ordinal:
            return None
        return found

    def add(self, result: Evaluation, rank: int) -> None:
        self.last = result
        self.say(rank)

    def hear(self, of_peers: Evaluation | None, step: int) -> None:
        """A generation has formed at `step`; what its members know of evaluations."""
        self._of_peers = of_peers
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
            self._send(Evaluated(last))
