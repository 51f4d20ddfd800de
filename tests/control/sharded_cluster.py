"""FakeCluster whose members hold shards, with peer memory: rows are lost only with their holders.

Newcomers follow nobody; when a generation forms, its members find out alike which newest state
they can put together from live rows, shadows and copies, and go back to the newest checkpoint if
there is none. The shell's own `Commits` says when a step goes on record.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from elastic.control.commands import Abort, Command, Finish, Form, Load, Publish, Recall, Sync
from elastic.control.events import (
    Adopted,
    Committed,
    Connected,
    Done,
    Event,
    Joined,
    Loaded,
    Paused,
    Suspended,
    Synced,
    SyncFailed,
    WorkerLost,
)
from elastic.control.standing import Standing
from elastic.on_ray.commits import Commits
from elastic.protocol.messages import to_controller as messages
from tests.control.fake_cluster import FakeCluster
from tests.control.fake_worker import Faults, Group, Worker


class Rows(NamedTuple):
    """A rank's part of a state."""

    step: int
    origin: int
    state: int
    rank: int
    size: int


@dataclass(frozen=True)
class Held:
    generation: int
    rank: int
    step: int
    at: float


@dataclass
class Memory:
    """What a worker has; `reference`: the step of a state that it stands for without holding it."""

    live: Rows | None = None
    reference: int | None = None
    shadows: tuple[Rows, ...] = ()
    is_pushed: bool = True
    known: frozenset[int] = frozenset()
    """Steps that it could report."""
    is_following: bool = False
    """It is to get its rows from the members when the generation forms."""

    @property
    def has_state(self) -> bool:
        return self.live is not None or self.reference is not None or bool(self.shadows)


class ShardedCluster(FakeCluster):
    every = 1
    """Steps between snapshots."""

    def __init__(self, seed: int, steps: int, faults: Faults) -> None:
        super().__init__(seed, steps, faults)
        self.memories: dict[int, Memory] = {}
        self.copies: dict[tuple[int, int], tuple[Rows, ...]] = {}  # generation, rank
        self.has_lost_copies = False
        self.saved: dict[tuple[int, int], dict[int, Rows]] = {}  # generation, step -> by rank
        self.met: dict[int, int] = {}  # worker -> which controller it has met last...
        self.told: dict[int, int] = {}  # ...and which one it has told all that it knows
        self.checkpoint = (0, 1)  # step, state
        self.rollbacks = 0
        self.returns = 0
        self.commits = Commits(self.record)
        self.recorded = self.loaded = 0
        self.recorded_at: dict[int, int] = {}  # generation -> step, as Form said
        self.to_emit: deque[Event] = deque()

    def memory(self, w: Worker) -> Memory:
        return self.memories.setdefault(w.number, Memory())

    # --- the shell ----------------------------------------------------------------
    def execute(self, command: Command) -> None:
        match command:
            case Publish():
                parts = self.saved[command.generation, command.step]
                assert {(r.rank, r.size) for r in parts.values()} == {
                    (rank, len(parts)) for rank in parts
                }, "rows in the wrong places"
                (state,) = {r.state for r in parts.values()}
                self.checkpoint = (command.step, state)
            case Abort(membership) | Recall(membership):
                self.commits.give_up(membership.generation)
            case Finish(membership):
                self.commits.end(membership.generation)
            case Form(membership):
                self.recorded = min(self.recorded, command.step)
                self.recorded_at[membership.generation] = self.recorded
            case _:
                pass
        super().execute(command)

    def lose_controller(self) -> Adopted:
        adopted = super().lose_controller()
        self.commits = Commits(self.record)
        self.to_emit.clear()
        return adopted

    def introduce(self, w: Worker) -> Standing:
        self.met[w.number] = self.num_adopted
        told, kind, step = w.newest_membership, w.kind, max(w.step, 0)
        if kind == "ready" and self.memory(w).is_following:
            is_forming = told is not None and told.generation > w.formed
            kind = "stopped" if is_forming else "synced"
        if told is None:
            return Standing(w.number, kind, step=step)
        rank = told.rank_of(w.number)
        return Standing(w.number, kind, told.generation, rank, told.world_size, step)

    def record(self, generation: int, line: dict[str, Any]) -> None:
        step = line["metrics"]["step"]
        if step == self.recorded + 1:
            self.recorded = step
            self.to_emit.append(Committed(generation, step, 0.1, self.now))

    def deliver(self) -> Event | None:
        if self.to_emit:
            return replace(self.to_emit.popleft(), at=self.now)
        if self.faults.holder_losses and self.rng.random() < 0.002:
            self.lose_holder()
        event = super().deliver()
        match event:
            case Held(generation, rank, step):
                self.commits.hear_held(messages.Held(generation, rank, step))
                return None
            case Committed(generation, step):
                if generation in self.groups:
                    size = len(self.groups[generation].members) if self.every == 1 else 0
                    lines = ({"metrics": {"step": step}},)
                    self.commits.hear(messages.Committed(generation, size, lines, vote={}))
                return None
            case Joined(generation=generation, step=step):
                if self.commits.hear_joined(generation) and step < self.recorded:
                    assert self.has_lost_copies or 1 < self.every >= self.recorded - step
                    self.recorded = step
                    self.returns += 1
            case Loaded(step=step):
                self.recorded = self.loaded = step
            case _:
                pass
        return event

    def may_hear(self, event: Event) -> bool:
        """Whoever is lost is not heard any more, as its link is dropped: what it said came before,
        and none of its steps goes on record behind the state that is loaded then."""
        return not isinstance(event, WorkerLost) or not self.outbox.get(event.worker)

    def lose_holder(self) -> None:
        """Of some ranks."""
        self.faults.holder_losses -= 1
        self.has_lost_copies = True
        for key in tuple(self.copies):
            if self.rng.random() < 0.5:
                del self.copies[key]

    # --- workers ------------------------------------------------------------------
    def check_form(self, command: Form, members: list[Worker], before: int) -> None:
        assert len(set(command.membership.workers)) == len(members)
        assert not command.roll_forward
        for w in members:
            if w.is_alive and w.form is not None and self.memory(w).has_state:
                assert w.mode in ("idle", "suspended", "paused", "done", "lobby"), (w, command)

    def obey(self, w: Worker, command: Command) -> None:
        match command:
            case Sync():
                w.step, w.prepared = -1, None
                self.memories[w.number] = Memory(is_following=True)
                self.send(w, Synced(w.number, self.now))
            case Load():
                w.step, w.state = self.copied() or self.checkpoint
                w.prepared = None
                self.memories[w.number] = Memory(reference=w.step)
                self.send(w, Loaded(w.number, w.step, self.now))
            case _:
                super().obey(w, command)

    def suspend(self, w: Worker, generation: int) -> None:
        is_between, has_gradient = w.mode in ("evaluate", "done"), w.prepared is not None
        self.groups[generation].is_broken = True
        w.mode = "suspended"
        step = w.step if self.memory(w).has_state else -1
        said = (w.rank, step, has_gradient, is_between)
        self.send(w, Suspended(generation, *said, self.now))

    def end(self, w: Worker, command: Finish) -> None:
        """The hash takes a collective."""
        super().end(w, command)
        if self.groups[command.membership.generation].has_gap() and self.rng.random() < 0.7:
            self.outbox[w.number].pop()
            self.fail(w)
            w.mode = "ended"

    def send(self, worker: Worker, event: Event) -> None:
        if isinstance(event, Paused | Done):  # it stops at a step that is safe
            self.hold(worker)
        met = self.met.get(worker.number, 0)
        if isinstance(event, Committed) and self.told.get(worker.number, 0) != met:
            self.told[worker.number] = met
            for step in sorted(self.memory(worker).known):
                if step < event.step:
                    super().send(worker, replace(event, step=step))
        super().send(worker, event)

    def save(self, w: Worker, generation: int) -> None:
        rows = self.memory(w).live
        assert rows is not None
        self.saved.setdefault((generation, w.step), {})[w.rank] = rows
        super().save(w, generation)

    def copied(self) -> tuple[int, int] | None:
        """The state on record, if holders have all of it."""
        rows = [r for of_rank in self.copies.values() for r in of_rank if r.step == self.recorded]
        for row in rows:
            ranks = {r.rank for r in rows if (r.origin, r.size) == (row.origin, row.size)}
            if self.recorded and len(ranks) == row.size:
                return row.step, row.state
        return None

    # --- peer memory ----------------------------------------------------------------
    def hold(self, w: Worker) -> None:
        """The last shadow has come to a holder."""
        memory = self.memory(w)
        if memory.is_pushed or w.form is None:
            return
        memory.is_pushed = True
        generation, rows = w.form.membership.generation, memory.shadows[-1]
        kept = self.copies.get((generation, rows.rank), ())
        self.copies[generation, rows.rank] = (*kept, rows)[-2:]
        held: Any = Held(generation, rows.rank, rows.step, self.now)
        if self.every == 1:
            super().send(w, held)

    def settle(self, generation: int, step: int) -> None:
        """All hold `step`."""
        self.copies = {
            key: tuple(r for r in rows if r.step >= step)
            for key, rows in self.copies.items()
            if key[0] >= generation
        }

    def in_compute(self, w: Worker) -> None:
        if self.rng.random() < 0.5:
            self.hold(w)
        super().in_compute(w)

    def in_reduce(self, w: Worker) -> None:
        self.hold(w)
        super().in_reduce(w)

    def step_to(self, w: Worker, state: int) -> None:
        super().step_to(w, state)
        assert w.form is not None
        generation, memory = w.form.membership.generation, self.memory(w)
        assert memory.live is not None
        memory.live = Rows(w.step, generation, w.state, w.rank, memory.live.size)
        memory.known |= {w.step}
        if w.step % self.every == 0:
            if self.rng.random() < 0.7:
                self.settle(generation, memory.shadows[-1].step)
            memory.shadows = (*memory.shadows[-1:], memory.live)
            memory.is_pushed = False

    # --- forming ----------------------------------------------------------------------
    def in_lobby(self, w: Worker) -> None:
        w.mode = "rendezvous"
        self.group(w).arrived.add(w.rank)

    def in_rendezvous(self, w: Worker) -> None:
        group = self.group(w)
        assert w.form is not None
        if not hasattr(group, "choice"):
            if len(group.arrived) < len(group.members) or group.has_gap():
                if group.has_gap() and self.rng.random() < 0.2:
                    self.fail(w)
                return
            group.choice = self.choose(group, w.form)
            group.known = self.memory(group.members[0]).known
        if group.choice is None:  # all find out alike, before anything is moved
            self.enter(w, None)
        else:
            self.restore(w, group.choice)

    def restore(self, w: Worker, found: Rows) -> None:
        self.enter(w, found)

    def enter(self, w: Worker, found: Rows | None) -> None:
        assert w.form is not None
        generation, memory = w.form.membership.generation, self.memory(w)
        if found is None:
            self.memories.pop(w.number)
            self.rollbacks += w.rank == 0
            w.mode = "failed"
            self.send(w, SyncFailed(w.number, "nobody holds row 3", self.now))
            return
        w.step, w.state = found.step, found.state
        memory.live = found._replace(rank=w.rank, size=len(w.form.membership.workers))
        memory.reference, memory.is_pushed = None, False
        same = [r for r in memory.shadows if r[:2] == found[:2]]
        memory.shadows = (*same[-1:], memory.live)
        known = memory.known | self.group(w).known  # the lowest rank tells the others
        memory.known = frozenset(s for s in known if s <= w.step)
        self.send(w, Joined(generation, w.rank, 0.001, self.now, w.step))
        w.formed = generation
        if w.rank == 0:
            for step in sorted(memory.known):
                if step > self.recorded_at[generation]:
                    self.send(w, Committed(generation, step, 0.1, self.now))
        w.mode = "boundary"

    def choose(self, group: Group, form: Form) -> Rows | None:
        """The newest state that they can put together, of at most the step of the Form."""
        memories = [self.memory(w) for w in group.members]
        generation = form.membership.generation
        for w, memory in zip(group.members, memories, strict=True):
            if memory.reference == form.step:
                return Rows(form.step, generation, w.state, 0, 1)
        limit = self.recorded_at[generation]
        while limit + 1 in memories[0].known:
            limit += 1
        rows = [r for m in memories for r in (m.live, *m.shadows) if r is not None]
        rows += [r for of_rank in self.copies.values() for r in of_rank]
        for step, origin in sorted({r[:2] for r in rows}, reverse=True):
            parts = [r for r in rows if r[:2] == (step, origin)]
            assert len({r.state for r in parts}) == 1, "two states of one label"
            covers = {(r.size, r.rank) for r in parts}
            is_whole = any(
                all((size, rank) in covers for rank in range(size)) for size, _ in covers
            )
            if is_whole and step <= min(form.step, limit):
                return parts[0]
        is_at_reference = self.recorded == self.loaded
        assert self.has_lost_copies or is_at_reference, (form, limit, rows, self.recorded)
        return None


class RareSnapshots(ShardedCluster):
    every = 3


class LargeStates(ShardedCluster):
    """Members are long in getting their part, and wait for each other before the first is through:
    longer than a generation has for forming, too."""

    def restore(self, w: Worker, found: Rows) -> None:
        assert w.form is not None
        self.send(w, Connected(w.form.membership.generation, w.rank, self.now))
        w.mode = "restoring"

    def in_restoring(self, w: Worker) -> None:
        group = self.group(w)
        if self.rng.random() < 0.1:
            group.restored.add(w.rank)
        if len(group.restored) == len(group.members):
            self.enter(w, group.choice)
        elif group.has_gap() and self.rng.random() < 0.2:
            self.fail(w)
