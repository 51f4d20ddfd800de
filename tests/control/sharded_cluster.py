"""FakeCluster whose members hold parts, with peer memory: rows are lost only with their holders.

Newcomers follow nobody; when a generation forms, its members find out alike which newest state
they can put together from live rows, own copies and holders' copies, and go back to the newest
checkpoint if there is none. The shell's own `Commits` says when a step goes on record.
"""

from elastic.control import commands as c
from elastic.control.events import Event
from elastic.protocol.mesh import Parallel
from elastic.protocol.messages.to_worker import Form
from tests.control.fake_cluster import FakeCluster
from tests.control.fake_group import Group
from tests.control.fake_parts import PartsProcess, Rows
from tests.control.fake_process import Process
from tests.control.faults import Faults


class ShardedCluster(FakeCluster):
    every = 1
    """Steps between snapshots."""
    is_large = False
    """Members are long in getting their part."""

    def __init__(self, seed: int, steps: int, faults: Faults) -> None:
        super().__init__(seed, steps, faults)
        self.copies: dict[tuple[int, int], tuple[Rows, ...]] = {}
        """(generation, rank) -> what holders have."""
        self.has_lost_copies = False
        self.saved: dict[tuple[int, int], dict[int, Rows]] = {}
        """(generation, step) -> by rank."""
        self.checkpoint = (0, 1)
        """Step, state."""

    def spawned(self, number: int) -> Process:
        return PartsProcess(number, self)

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.Publish):
            parts = self.saved[command.generation, command.step]
            assert {(rows.rank, rows.size) for rows in parts.values()} == {
                (rank, len(parts)) for rank in parts
            }, "rows in the wrong places"
            (state,) = {rows.state for rows in parts.values()}
            self.checkpoint = (command.step, state)
        super().execute(command)

    def deliver(self) -> Event | None:
        if self.faults.holder_losses and self.rng.random() < 0.002:
            self.lose_state()
        return super().deliver()

    def check_return(self, before: int) -> None:
        assert self.has_lost_copies or 1 < self.every >= before - self.recorded
        self.returns += 1

    def lose_state(self) -> None:
        """Of some ranks."""
        self.faults.holder_losses -= 1
        self.has_lost_copies = True
        for key in tuple(self.copies):
            if self.rng.random() < 0.5:
                del self.copies[key]

    def check_form(self, command: c.Form, members: list[Process], before: int) -> None:
        assert len(set(command.membership.workers)) == len(members)
        assert not command.roll_forward
        for w in members:
            assert isinstance(w, PartsProcess)
            if w.is_alive and w.generation and w.has_state:
                assert w.mode in ("idle", "suspended", "paused", "done", "pool"), (w, command)

    def copied(self) -> tuple[int, int] | None:
        """The state on record, if holders have all of it."""
        rows = [r for of_rank in self.copies.values() for r in of_rank if r.step == self.recorded]
        for row in rows:
            ranks = {r.rank for r in rows if (r.origin, r.size) == (row.origin, row.size)}
            if self.recorded and len(ranks) == row.size:
                return row.step, row.state
        return None

    def settle(self, generation: int, step: int) -> None:
        """All hold `step`."""
        self.copies = {
            key: tuple(r for r in rows if r.step >= step)
            for key, rows in self.copies.items()
            if key[0] >= generation
        }

    def choose(self, group: Group, form: Form) -> Rows | None:
        """The newest state that they can put together, of at most the step of the Form."""
        members: list[PartsProcess] = group.members
        for w in members:
            if w.reference == form.step:
                return Rows(form.step, form.generation, w.weights, 0, 1)
        recorded = max(w.recorded_step for w in members)
        for w in members:
            w.recorded.hear_of_peers(recorded)
        limit = members[0].records.known_step
        rows = [r for w in members for r in (w.live, *w.own_copies) if r is not None]
        rows += [r for of_rank in self.copies.values() for r in of_rank]
        whole = [
            label for label in sorted({r[:2] for r in rows}, reverse=True) if covers(rows, label)
        ]
        for step, origin in whole:
            if step <= min(form.step, limit):
                return next(r for r in rows if r[:2] == (step, origin))
        is_at_reference = self.recorded == self.loaded
        is_on_record = any(0 <= self.recorded - step < self.every for step, _ in whole)
        is_excused = is_at_reference or (self.has_lost_lines(rows) and not is_on_record)
        assert self.has_lost_copies or is_excused, (form, limit, rows, self.recorded)
        return None

    def has_lost_lines(self, rows: list[Rows]) -> bool:
        """All who did the newest steps are lost: copies of these have taken the place of those on
        record, and nobody can report them (one of an earlier generation may have come back)."""
        newest = max((r.origin for r in rows), default=0)
        return newest in self.groups and not any(w.is_alive for w in self.groups[newest].members)


def covers(rows: list[Rows], label: tuple[int, int]) -> bool:
    """Whether these are all of a state's, of that step and origin."""
    parts = [r for r in rows if r[:2] == label]
    assert len({r.state for r in parts}) == 1, "two states of one label"
    found = {(r.size, r.rank) for r in parts}
    return any(all((size, rank) in found for rank in range(size)) for size, _ in found)


class RareSnapshots(ShardedCluster):
    every = 3


class StagesCluster(ShardedCluster):
    """Newcomers copy ahead what they are likely to get."""

    parallel = Parallel.of("pp:2")


class LargeStates(ShardedCluster):
    """Members wait for each other before the first is through: longer than a generation has for
    forming, too."""

    is_large = True
