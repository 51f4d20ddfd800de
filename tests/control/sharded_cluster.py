"""FakeCluster whose members hold shards: rows are lost with their holder.

Newcomers follow nobody; when a generation forms, its members find out alike whether together they
hold the state, and go back to the newest checkpoint if not.
"""

from dataclasses import replace

from elastic.control.commands import Abort, Command, Form, Load, Publish, Sync
from elastic.control.state import Joined, Loaded, Suspended, Synced, SyncFailed
from tests.control.fake_cluster import FakeCluster
from tests.control.fake_worker import Faults, Worker

REFERENCE = (0, 0, 0)
"""Holds everything, as a checkpoint or the initial weights on disk."""


class ShardedCluster(FakeCluster):
    def __init__(self, seed: int, steps: int, faults: Faults) -> None:
        super().__init__(seed, steps, faults)
        self.holdings: dict[int, tuple[int, int, int]] = {}  # worker -> generation, rank, size
        self.saved_states: dict[tuple[int, int], int] = {}
        self.checkpoint = (0, 1)  # step, state
        self.rollbacks = 0

    def execute(self, command: Command) -> None:
        if isinstance(command, Publish):
            state = self.saved_states[command.generation, command.step]
            self.checkpoint = (command.step, state)
        super().execute(command)

    def check_form(self, command, members: list[Worker]) -> None:
        assert len(set(command.membership.workers)) == len(members)
        for w in members:
            if w.is_alive and w.form is not None:
                assert w.mode in ("idle", "suspended", "paused", "done", "lobby"), (w, command)

    def obey(self, w: Worker, command: Command) -> None:
        match command:
            case Sync():
                w.step, w.prepared = -1, None
                self.holdings.pop(w.number, None)
                self.send(w, Synced(w.number, self.now))
            case Load():
                w.step, w.state = self.checkpoint
                w.prepared = None
                self.holdings[w.number] = REFERENCE
                self.send(w, Loaded(w.number, w.step, self.now))
            case Abort(membership):
                is_evaluating, has_gradient = w.mode == "evaluate", w.prepared is not None
                self.groups[membership.generation].is_broken = True
                w.mode = "suspended"
                step = w.step if w.number in self.holdings else -1
                event = Suspended(
                    membership.generation, w.rank, step, has_gradient, is_evaluating, self.now
                )
                self.send(w, event)
            case Form():  # nobody rolls forward: the lost one's rows of the step are gone as well
                super().obey(w, replace(command, roll_forward=()))
            case _:
                super().obey(w, command)

    def save(self, w: Worker, generation: int) -> None:
        self.saved_states[generation, w.step] = w.state
        super().save(w, generation)

    def in_lobby(self, w: Worker) -> None:
        w.mode = "rendezvous"
        self.group(w).arrived.add(w.rank)

    def in_rendezvous(self, w: Worker) -> None:
        group = self.group(w)
        assert w.form is not None
        if len(group.arrived) < len(group.members):
            if group.has_gap() and self.rng.random() < 0.2:
                self.fail(w)
            return
        if not hasattr(group, "state"):
            group.state = self.common_state(group.members, w.form.step)
        generation = w.form.membership.generation
        if group.state is None:
            self.holdings.pop(w.number, None)
            self.rollbacks += w.rank == 0
            w.mode = "failed"
            self.send(w, SyncFailed(w.number, "nobody holds row 3", self.now))
            return
        w.step, w.state = w.form.step, group.state
        self.holdings[w.number] = (generation, w.rank, len(group.members))
        self.send(w, Joined(generation, w.rank, 0.001, self.now))
        w.mode = "boundary"

    def common_state(self, members: list[Worker], step: int) -> int | None:
        """The state of `step` if the members hold all of it together."""
        at_step = [w for w in members if w.number in self.holdings and w.step == step]
        found: dict[int, set[int]] = {}
        for w in at_step:
            generation, rank, size = self.holdings[w.number]
            if size == 0:
                return w.state
            ranks = found.setdefault(generation, set())
            ranks.add(rank)
            if len(ranks) == size:
                return w.state
        return None
