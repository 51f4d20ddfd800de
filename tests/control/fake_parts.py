"""A worker's process whose state is a part, with copies in peer memory: see fake_process.py."""

from typing import TYPE_CHECKING, NamedTuple

from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages.to_worker import Form
from elastic.protocol.step_record import KnownSteps
from tests.control.fake_process import PeerLost, Process, Turns, Work
from workers.membership import events as e

if TYPE_CHECKING:
    from tests.control.sharded_cluster import ShardedCluster


class Rows(NamedTuple):
    """A rank's part of a state."""

    step: int
    origin: int
    state: int
    rank: int
    size: int


class PartsProcess(Process):
    """It has rows, or stands for a whole state that it does not hold: `reference`."""

    cluster: "ShardedCluster"

    def __init__(self, number: int, cluster: "ShardedCluster") -> None:
        super().__init__(number, cluster, is_whole=False, is_delayed=cluster.every == 1)
        self.live: Rows | None = None
        self.reference: int | None = None
        self.own_copies: tuple[Rows, ...] = ()
        self.is_pushed = True
        self.is_delayed = cluster.every == 1

    @property
    def has_state(self) -> bool:
        return self.live is not None or self.reference is not None or bool(self.own_copies)

    def forget(self) -> None:
        self.live, self.reference, self.own_copies, self.is_pushed = None, None, (), True
        self.records.forget()
        self.gradient = None

    def load(self, recorded: int) -> tuple[int, int]:
        """What holders have of the state on record, else the newest checkpoint, by reference."""
        step, self.weights = self.cluster.copied() or self.cluster.checkpoint
        self.live, self.own_copies, self.is_pushed, self.gradient = None, (), True, None
        self.reference = step
        return step, 0

    # --- copies ----------------------------------------------------------------------------
    def hold(self) -> None:
        """The last copy has come to a holder."""
        if not self.is_pushed and self.own_copies:
            self.is_pushed = True
            rows, copies = self.own_copies[-1], self.cluster.copies
            kept = copies.get((self.generation, rows.rank), ())
            copies[self.generation, rows.rank] = (*kept, rows)[-2:]
            if self.is_delayed:
                self.send(r.Held(self.generation, rows.rank, rows.step))

    def protect(self) -> None:
        self.hold()

    def compute(self) -> Turns:
        if self.rng.random() < 0.5:
            self.hold()
        yield from super().compute()

    def before_vote(self) -> None:
        self.hold()

    def commit(self, weights: int, *, should_pause: bool) -> Turns:
        yield from super().commit(weights, should_pause=should_pause)
        assert self.live is not None
        self.live = Rows(self.step, self.generation, weights, self.rank, self.live.size)
        if self.step % self.cluster.every == 0:
            if self.own_copies and self.rng.random() < 0.7:
                self.cluster.settle(self.generation, self.own_copies[-1].step)
            self.own_copies = (*self.own_copies[-1:], self.live)
            self.is_pushed = False

    def save(self) -> None:
        assert self.live is not None
        by_rank = self.cluster.saved.setdefault((self.generation, self.step), {})
        by_rank[self.rank] = self.live
        super().save()

    def write_final(self) -> Work:
        """The hash takes a collective."""
        yield
        try:
            yield from self.collective("hash")
        except PeerLost as error:
            return e.PeersLost(str(error))
        self.save()
        return e.FinalWritten(f"{self.weights:x}")

    # --- forming ---------------------------------------------------------------------------
    def assemble(self, form: Form) -> Work:
        """All find out alike which state they can put together, before anything is moved."""
        group = self.group
        assert group is not None
        group.arrive("assemble", self.number)
        while group.found is None and (not group.is_complete("assemble") or group.has_gap()):
            if self.is_abandoned or (group.has_gap() and self.rng.random() < 0.2):
                return e.PeersLost("connection reset")
            yield
        found = group.once(lambda: self.cluster.choose(group, form))
        if found is None:
            self.forget()
            self.cluster.rollbacks += self.rank == 0
            return e.PartsMissing("nobody holds row 3")
        if group.found_known is None:
            first = group.members[0]
            group.found_known = first.records.known()
        known = group.found_known
        yield from self.tell(e.PartBegun())
        if self.cluster.is_large:
            try:
                while self.rng.random() < 0.9:
                    self.at = "restoring"
                    yield
                yield from self.collective("restored", step=form.step)
            except PeerLost as error:
                return e.PeersLost(str(error))
        return self.enter(form, found, known)

    def enter(self, form: Form, found: Rows, known: KnownSteps) -> e.Event:
        self.weights, self.gradient = found.state, None
        self.live = found._replace(rank=form.rank, size=form.world_size)
        self.reference, self.is_pushed = None, False
        same = [rows for rows in self.own_copies if rows[:2] == found[:2]]
        self.own_copies = (*same[-1:], self.live)
        self.records.learn(known)
        self.records.go_back(found.step)
        self.recorded.go_back(form.generation, found.step, form.recorded_step)
        return e.StateEntered(found.step)
