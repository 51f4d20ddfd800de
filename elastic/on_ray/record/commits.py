"""Steps that members have voted for, until they go on record.

Where shards are kept in peer memory, a step is committed once every rank's copy of it is held:
else the loss of a rank could take a recorded step along.
"""

from collections.abc import Callable
from typing import Any

from elastic.protocol.messages.to_controller import Committed, Held

Record = Callable[[int, dict[str, Any]], None]


class Commits:
    """One generation's at a time, and the newest vote."""

    def __init__(self, record: Record) -> None:
        """record: takes (generation, the step's line); it knows what it has already."""
        self._record = record
        self._generation, self._world_size = 0, 0
        self._lines: list[dict[str, Any]] = []
        self._held: dict[int, int] = {}  # rank -> step
        self.vote: tuple[tuple[int, int], dict[str, Any], bytes] | None = None
        """The newest completed one: step and the generation that did it, layout, content."""
        self.formed = 0
        """The newest generation that has said so."""
        self._given_up = 0
        """Generations up to this one report nothing any more."""
        self._ending = 0
        """The generation whose members write the final state."""

    def keep_vote(
        self, step: int, origin: int, layout: dict[str, Any] | None, content: bytes
    ) -> None:
        if layout is not None and (self.vote is None or (step, origin) >= self.vote[0]):
            self.vote = ((step, origin), layout, content)

    def is_news(self, generation: int) -> bool:
        """What is said of it is not older than what others have said of a later one."""
        return generation >= max(self.formed, self._given_up)

    def knows_vote_of(self, step: int, origin: int) -> bool:
        return self.vote is not None and self.vote[0] == (step, origin)

    def vote_of(self, step: int, origin: int) -> tuple[dict[str, Any], bytes]:
        """What rolls those forward to `step` who did not see its vote complete."""
        assert self.vote is not None
        assert self.vote[0] == (step, origin), (self.vote[0], step, origin)
        return self.vote[1:]

    def hear(self, report: Committed) -> None:
        """Some of the steps may have been said before."""
        last = report.steps[-1]["metrics"]
        self.keep_vote(last["step"], last["generation"], report.vote, report.payload)
        generation = report.generation
        if generation > self._given_up:  # whoever says Joined later does not begin it again
            self.formed = max(self.formed, generation)
        if not report.world_size or generation == self._ending:  # no loss of one takes it along
            for line in report.steps:
                self._record(generation, line)
            return
        if self._is_current(generation):
            self._world_size = report.world_size
            self._lines += report.steps
            self._pass_on()

    def hear_held(self, report: Held) -> None:
        """If there is no holder for it, backup/status.py tells."""
        if self._is_current(report.generation):
            self._held[report.rank] = max(report.step, self._held.get(report.rank, 0))
            self._pass_on()

    def hear_joined(self, generation: int) -> bool:
        """Whether this is the first word of a generation that it has formed."""
        is_first = self._is_current(generation) and generation != self.formed
        if is_first:
            self.formed = generation
        return is_first

    def end(self, generation: int) -> None:
        """Its members have stopped for good, and none did before its copy was held: what they say
        again is safe."""
        self._ending = generation

    def give_up(self, generation: int) -> None:
        """Its members may go back: what they have not committed for sure, their successors say."""
        self._given_up = max(self._given_up, generation)
        self._lines.clear()

    def _is_current(self, generation: int) -> bool:
        if generation <= self._given_up or generation < self._generation:
            return False
        if generation > self._generation:
            self._generation, self._world_size = generation, 0
            self._lines, self._held = [], {}
        return True

    def _pass_on(self) -> None:
        if not self._world_size or len(self._held) < self._world_size:
            return
        safe = min(self._held.values())
        while self._lines and self._lines[0]["metrics"]["step"] <= safe:
            self._record(self._generation, self._lines.pop(0))
