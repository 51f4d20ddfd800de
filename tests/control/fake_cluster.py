"""An in-memory cluster of honest workers: obeys commands, delivers events in a seeded order.

Commands and events are first in, first out per worker and in any order across workers. Workers
compute, reduce, vote and commit one by one, so that a kill leaves them where a real one would.
The cluster asserts on the way what no decision may ever violate.
"""

import random
from collections import deque
from dataclasses import replace

from elastic.control.commands import (
    Abort,
    Checkpoint,
    Command,
    Discard,
    Finish,
    Form,
    Keep,
    Load,
    Pause,
    Publish,
    Recall,
    Retire,
    Spawn,
    Sync,
)
from elastic.control.events import (
    Adopted,
    CollectiveFailed,
    Committed,
    Done,
    DrainNotice,
    Ended,
    Event,
    Joined,
    Kept,
    Loaded,
    PartFailed,
    PartSaved,
    Paused,
    StopRequested,
    Suspended,
    Synced,
    SyncFailed,
    Tick,
    UserFailed,
    WorkerLost,
    WorkerReady,
)
from elastic.control.standing import Standing
from elastic.protocol.membership import Membership
from tests.control.fake_worker import Faults, Group, Worker

AT_REST = ("idle", "suspended", "paused", "done")
BURST_TURNS = 60
LATE_S = (1.0, 5.0, 70.0)
"""After so long a loss may be heard."""


class FakeCluster:
    def __init__(self, seed: int, steps: int, faults: Faults) -> None:
        self.rng, self.steps, self.faults = random.Random(seed), steps, faults
        self.now = 0.0
        self.workers: dict[int, Worker] = {}
        self.outbox: dict[int, deque[tuple[Event, int]]] = {}  # with the sender's state
        self.news: list[tuple[float, Event]] = []  # from outside the workers: (not before, event)
        self.pending: deque[int] = deque()  # spawned, no slot yet
        self.groups: dict[int, Group] = {}
        self.generation = 0  # the highest that anybody alive was told of
        self.newest = -1  # the highest number of a worker
        self.recalled: set[int] = set()  # generations that are never to form
        self.votes: dict[tuple[int, int], int] = {}  # (generation, step) -> state, as heard
        self.heard_step = 0  # highest that the ledger has called committed
        self.falls = 0
        self.published: list[int] = []  # steps of checkpoints
        self.dropped: set[tuple[int, int]] = set()
        self.num_adopted = 0
        self.retired: set[int] = set()
        self.trace: list[Command] = []
        self.has_drains = faults.drains > 0
        self.kept: dict[int, int] = {}  # step -> state, saved for those who leave
        self.close_turns = 0  # so many more, a fault has company
        if faults.stop_at is not None:
            self.news.append((faults.stop_at, StopRequested("SIGINT", faults.stop_at)))

    # --- commands -----------------------------------------------------------------
    def execute(self, command: Command) -> None:
        self.trace.append(command)
        match command:
            case Spawn(workers):
                assert workers[0] > self.newest, "a number is given again"
                self.newest = workers[-1]
                self.pending.extend(workers)
            case Retire(workers):
                self.retire(workers)
            case Load(worker) | Sync(worker=worker):
                self.workers[worker].inbox.append(command)
            case Form():
                self.form(command)
            case Recall():
                self.recall(command)
            case Publish() | Discard():
                self.conclude_save(command)
            case (
                Finish(membership)
                | Pause(membership)
                | Abort(membership)
                | Keep(membership)
                | Checkpoint(membership)
            ):
                if isinstance(command, Finish):
                    self.begin_end(membership)
                assert membership.generation == self.generation
                for number in membership.workers:
                    self.workers[number].inbox.append(command)

    def recall(self, command: Recall) -> None:
        membership = command.membership
        assert membership.generation > self.generation
        self.generation = membership.generation
        self.recalled.add(self.generation)
        members = [self.workers[w] for w in membership.workers]
        self.groups[self.generation] = Group(members, is_broken=True)
        for w in members:
            w.aborted = self.generation
            w.inbox.append(command)

    def begin_end(self, membership: Membership) -> None:
        """By the members of the generation at work, or of a new one."""
        members = [self.workers[w] for w in membership.workers]
        if membership.generation == self.generation:
            assert members == self.groups[self.generation].members
        assert membership.generation >= self.generation, "a generation repeats"
        self.generation = membership.generation

    def conclude_save(self, command: Publish | Discard) -> None:
        save = command.generation, command.step
        if isinstance(command, Discard):  # perhaps again, for the part of a rank that was late
            self.dropped.add(save)
            return
        assert save not in self.dropped or self.num_adopted, "it was discarded"
        group = self.groups[command.generation]
        assert group.saved[command.step] == set(range(len(group.members))), command
        self.published.append(command.step)

    def lose_controller(self) -> Adopted:
        """Its memory is gone, and the reports that were on their way to it."""
        self.num_adopted += 1
        self.close_turns = BURST_TURNS
        self.votes.clear()
        self.pending.clear()
        standings: list[Standing] = []
        everybody = sorted(self.workers.items())
        if self.faults.slow_takeover:
            self.rng.shuffle(everybody)
        for number, w in everybody:
            self.go_on_alone()
            if not w.is_alive or w.is_stuck:
                w.is_alive = False  # what does not answer is ended
                continue
            if not w.is_up:
                standings.append(Standing(number, "starting"))
                continue
            box = self.outbox.setdefault(number, deque())
            for _ in range(self.rng.randint(0, len(box))):
                box.popleft()
            standings.append(self.introduce(w))
        standings.sort(key=lambda s: s.worker)
        known = {s.worker for s in standings}
        self.news = [
            (at, e) for at, e in self.news if not isinstance(e, WorkerLost) or e.worker in known
        ]
        self.outbox = {n: box for n, box in self.outbox.items() if n in known}
        told = [w.newest_membership for w in self.workers.values() if w.number in known]
        self.generation = max((m.generation for m in told if m), default=0)
        return Adopted(tuple(standings), self.now, self.newest)

    def go_on_alone(self) -> None:
        """Without a controller, until the next worker has found its successor."""
        for _ in range(self.rng.randint(0, 25) if self.faults.slow_takeover else 0):
            self.now += 0.002
            self.go_wrong()
            self.advance_one()

    def introduce(self, w: Worker) -> Standing:
        told, kind = w.newest_membership, w.kind
        if told is None:
            return Standing(w.number, kind, step=w.step)
        if kind == "working" and w.rank == 0 and w.step > 0:
            self.send(w, Committed(told.generation, w.step, 0.1, self.now))
        rank = told.rank_of(w.number)
        return Standing(w.number, kind, told.generation, rank, told.world_size, w.step)

    def retire(self, workers: tuple[int, ...]) -> None:
        self.retired |= set(workers)
        for number in workers:
            if number in self.workers:
                self.workers[number].is_alive = False
            elif number in self.pending:
                self.pending.remove(number)

    def form(self, command: Form) -> None:
        membership, before = command.membership, self.generation
        assert membership.generation > before
        assert membership.generation == before + 1 or self.num_adopted
        self.generation = membership.generation
        members = [self.workers[w] for w in membership.workers]
        self.groups[self.generation] = Group(members)
        self.check_form(command, members, before)
        self.heard_step = command.step
        for w in members:
            w.inbox.append(command)

    def check_form(self, command: Form, members: list[Worker], before: int) -> None:
        """Everybody can get to the step; no committed step is given up while somebody holds it."""
        assert len(set(command.membership.workers)) == len(members)
        states: set[int] = set()
        for w in members:
            is_rolling = w.number in command.roll_forward
            if is_rolling:
                assert w.step == command.step - 1, (w, command)
                vote = self.votes[before, command.step]
                assert w.prepared == vote, "no vote to roll forward with"
                states.add(vote)
            elif w.source is None and not w.has_complained and w.is_alive:
                assert w.step == command.step, (w, command)
                states.add(w.state)
            if w.is_alive and w.source is None and w.form is not None:
                assert w.mode in AT_REST, (w, command)
        assert len(states) <= 1, "members differ"
        is_rolling = bool(command.roll_forward)
        assert not is_rolling or not any(w.source for w in members), "misses an evaluation"
        assert command.vote_of is None or command.vote_of in command.membership.workers
        for w in self.workers.values():
            if w.is_alive and w.source is None and w.mode in ("suspended", "paused"):
                assert w.step <= command.step, (w, command)
                has_vote = (before, self.heard_step) in self.votes
                reach = w.step + (w.prepared is not None and has_vote)
                if command.step < self.heard_step:
                    assert reach < self.heard_step, (w, command, "a step fell although it lives on")
        self.falls += command.step < self.heard_step

    # --- events -------------------------------------------------------------------
    def send(self, worker: Worker, event: Event) -> None:
        self.outbox.setdefault(worker.number, deque()).append((event, worker.state))

    def next_event(self) -> Event:
        for _ in range(40):
            self.now += 0.002
            self.start_pending()
            self.go_wrong()
            draw = self.rng.random()
            if draw < 0.3:
                event = self.deliver()
                if event is not None:
                    return event
            elif draw < 0.985:
                self.advance_one()
            else:
                return Tick(self.now)
        self.now += self.rng.choice((0.05, 1.0))
        return Tick(self.now)

    def deliver(self) -> Event | None:
        news = enumerate(self.news)
        due = [i for i, (not_before, e) in news if not_before <= self.now and self.may_hear(e)]
        if due and self.rng.random() < 0.5:
            event = self.news.pop(self.rng.choice(due))[1]
            if isinstance(event, WorkerLost):
                self.workers[event.worker].is_alive = False  # a suspect is killed first
            return replace(event, at=self.now)
        senders = [n for n, box in self.outbox.items() if box]
        if not senders:
            return None
        return self.hear(*self.outbox[self.rng.choice(senders)].popleft())

    def may_hear(self, _: Event) -> bool:
        return True

    def hear(self, event: Event, state: int) -> Event:
        """The votes that reports bring along stay with the controller."""
        if isinstance(event, Committed | Suspended) and event.generation == self.generation:
            self.votes[event.generation, event.step] = state
        return replace(event, at=self.now)

    def start_pending(self) -> None:
        slots = max((n for at, n in self.faults.slots if at <= self.now), default=0)
        alive = sum(w.is_alive for w in self.workers.values()) if self.pending else 0
        while self.pending and alive < slots:
            number = self.pending.popleft()
            self.workers[number] = Worker(number)
            alive += 1

    def go_wrong(self) -> None:
        self.close_turns = max(0, self.close_turns - 1)
        chance = self.chance(self.faults.kill_chance)
        if "ahead" in self.faults.kill_modes and self.num_adopted and self.torn_members():
            chance = 0.1  # before it has said so to the new controller
        if self.faults.kills and self.rng.random() < chance:
            self.kill_one()
        if self.has_drains:
            self.drain()

    def chance(self, alone: float) -> float:
        """Of a fault, now; alone: without company."""
        return max(alone, self.faults.burst) if self.close_turns else alone

    def kill_one(self) -> None:
        candidates = [w for w in self.workers.values() if w.is_alive]
        modes, is_close = self.faults.kill_modes, self.close_turns and self.faults.burst
        torn = self.torn_members() if "torn" in modes else []
        if is_close and torn:
            candidates = [w for w in torn if w.step == max(w.step for w in torn)]
        elif "torn" in modes and not is_close:
            candidates = torn
        elif modes and not is_close:
            candidates = [w for w in candidates if w.mode in modes]
        if candidates:
            self.faults.kills -= 1
            self.close_turns = BURST_TURNS
            self.kill(self.rng.choice(candidates))

    def torn_members(self) -> list[Worker]:
        """Of a step that some have committed and others have not."""
        group = self.groups.get(self.generation)
        members = [w for w in group.members if w.is_alive] if group else []
        return members if len({w.step for w in members if w.source is None}) > 1 else []

    def controller_chance(self) -> float:
        """Of its death, now."""
        if "ahead" in self.faults.kill_modes:  # with those who are behind unable to follow
            group = self.groups.get(self.generation)
            return 0.5 * (group is not None and group.has_gap() and bool(self.torn_members()))
        return self.chance(self.faults.controller_chance)

    def drain(self) -> None:
        """Notices, now and then, and the end of those who have not left in time."""
        for w in self.workers.values():
            if w.is_alive and w.doomed_at is not None and self.now > w.doomed_at:
                w.doomed_at = None
                self.kill(w)
        candidates = [w for w in self.workers.values() if w.is_alive and w.doomed_at is None]
        chance = self.chance(self.faults.drain_chance)
        if candidates and self.faults.drains and self.rng.random() < chance:
            self.faults.drains -= 1
            self.close_turns = BURST_TURNS
            worker = self.rng.choice(candidates)
            worker.doomed_at = self.now + self.rng.choice(self.faults.notice_s)
            notice = DrainNotice(worker.number, "drain", worker.doomed_at, self.now)
            self.news.append((self.now, notice))

    def kill(self, worker: Worker, delay_s: float | None = None) -> None:
        worker.is_alive = False
        box = self.outbox.get(worker.number)
        while box and self.rng.random() < 0.3:
            box.pop()  # never left its process
        if delay_s is None:
            is_slow = self.rng.random() < self.faults.slow_detection
            delay_s = self.rng.choice(LATE_S) if is_slow else 0.02 * self.rng.random()
        at = self.now + delay_s
        self.news.append((at, WorkerLost(worker.number, "process_died", self.now, at)))

    # --- workers ------------------------------------------------------------------
    def advance_one(self) -> None:
        alive = [w for w in self.workers.values() if w.is_alive and not w.is_stuck]
        if not alive:
            return
        worker = self.rng.choice(alive)
        if not worker.is_up:
            self.boot(worker)
        elif worker.inbox and self.rng.random() < 0.6:
            self.obey(worker, worker.inbox.popleft())
        else:
            self.follow(worker)
            work = getattr(self, f"in_{worker.mode}", None)
            if work is not None:
                work(worker)

    def boot(self, worker: Worker) -> None:
        if self.faults.stillborn and self.rng.random() < 0.5:
            self.faults.stillborn -= 1
            self.kill(worker)
        elif self.rng.random() < 0.5:
            worker.is_up = True
            self.send(worker, WorkerReady(worker.number, self.now))

    def obey(self, w: Worker, command: Command) -> None:
        match command:
            case Load():
                self.load(w)
            case Sync(source=source):
                w.source, w.is_copying, w.has_complained = self.workers[source], True, False
                w.step, w.prepared = -1, None
            case Form():
                self.be_told(w, command)
            case Recall():
                self.be_recalled(w, command)
            case Abort():
                self.abort(w, command)
            case Pause():
                w.wants_pause = True
            case Checkpoint(membership, step):
                w.save_asked = (membership.generation, step)
            case Keep():
                self.keep(w, command)
            case Finish():
                self.end(w, command)
            case _:
                raise AssertionError(command)

    def be_told(self, w: Worker, form: Form) -> None:
        rank = form.membership.rank_of(w.number)
        w.membership = form.membership
        if form.membership.generation <= w.aborted:
            w.form, w.rank = form, rank  # it is recalled already
            return
        if self.faults.stuck and self.rng.random() < 0.2:
            self.faults.stuck -= 1
            w.is_stuck = True
            at = self.now + 100
            self.news.append((at, WorkerLost(w.number, "heartbeat_silent", self.now, at)))
            return
        w.form, w.rank, w.mode = form, rank, "lobby"
        w.wants_pause = False
        if w.number in form.roll_forward:
            assert w.prepared is not None
            self.step_to(w, w.prepared)
        w.prepared = None

    def abort(self, w: Worker, command: Abort) -> None:
        assert w.form is not None
        assert w.form.membership == command.membership, (w, command)
        self.suspend(w, command.membership.generation)

    def be_recalled(self, w: Worker, command: Recall) -> None:
        if w.form is not None and w.form.membership.generation in self.groups:
            self.groups[w.form.membership.generation].is_broken = True
        w.rank, w.membership = command.membership.rank_of(w.number), command.membership
        self.suspend(w, command.membership.generation)

    def suspend(self, w: Worker, generation: int) -> None:
        is_between, has_gradient = w.mode in ("evaluate", "done"), w.prepared is not None
        if w.source is not None:
            w.source = None
            w.step = -1 if w.is_copying else w.step
        self.groups[generation].is_broken = True
        w.mode = "suspended"
        said = (w.rank, w.step, has_gradient, is_between)
        self.send(w, Suspended(generation, *said, self.now))

    def end(self, w: Worker, command: Finish) -> None:
        has_followed = w.mode == "idle" and w.step >= 0 and not w.is_copying
        assert has_followed or w.mode in ("paused", "done", "ended"), w
        w.membership = membership = command.membership
        w.mode, w.rank = "ended", membership.rank_of(w.number)
        members = [self.workers[number] for number in membership.workers]
        self.groups.setdefault(membership.generation, Group(members))
        if w.rank == 0 and w.step > 0 and self.rng.random() < 0.5:
            self.send(w, Committed(membership.generation, w.step, 0.1, self.now))
        self.save(w, membership.generation)
        sha = f"{w.state:x}"
        self.send(w, Ended(membership.generation, w.rank, sha, self.now))

    def save(self, w: Worker, generation: int) -> None:
        """This worker's part of the checkpoint of its step."""
        w.save_begun = (generation, w.step)
        if self.faults.failing_saves and self.rng.random() < 0.1:
            self.faults.failing_saves -= 1
            self.send(w, PartFailed(generation, w.rank, w.step, "disk full", self.now))
        else:
            self.groups[generation].saved[w.step].add(w.rank)
            self.send(w, PartSaved(generation, w.rank, w.step, self.now))

    def keep(self, w: Worker, command: Keep) -> None:
        assert w.mode == "paused", w
        generation = command.membership.generation
        if generation <= w.aborted:
            return
        self.kept[w.step] = w.state
        self.save(w, generation)
        self.send(w, Kept(generation, w.rank, self.now))

    def load(self, w: Worker) -> None:
        """What it has from peers, unless the record of it is lost, or was saved for leavers; there
        are no other checkpoints."""
        if w.is_copying or not 0 <= w.step <= self.heard_step:
            w.step, w.state = 0, 1
        newest = max((s for s in self.kept if s in self.published), default=0)
        if newest > w.step:
            w.step, w.state = newest, self.kept[newest]
        w.source, w.is_copying, w.prepared = None, False, None
        self.send(w, Loaded(w.number, w.step, self.now))

    def step_to(self, w: Worker, state: int) -> None:
        """Commit one step; followers were never allowed to stay two steps behind."""
        for follower in self.workers.values():
            if follower.source is w and not follower.is_copying and follower.is_alive:
                follower.step, follower.state = w.step, w.state
        w.step, w.state, w.prepared = w.step + 1, state, None

    def follow(self, w: Worker) -> None:
        source = w.source
        if source is None:
            return
        is_gone = not source.is_alive or source.step < 0
        if is_gone and not w.is_copying and source.step > w.step and self.rng.random() < 0.3:
            w.step, w.state = source.step, source.state  # was on the wire already
        if is_gone and w.form and w.mode == "lobby" and w.step == w.form.step:
            return  # needs nobody any more
        if not is_gone and w.is_copying and self.faults.sync_failures and self.rng.random() < 0.2:
            self.faults.sync_failures -= 1
            is_gone = True
        if is_gone:
            w.source, w.has_complained = None, True
            w.step = -1 if w.is_copying else w.step
            w.is_copying = False
            self.send(w, SyncFailed(w.number, "source is gone", self.now))
        elif w.is_copying:
            if self.rng.random() < 0.4:
                w.is_copying, w.step, w.state = False, source.step, source.state
                self.send(w, Synced(w.number, self.now))
        elif w.mode == "idle" or (w.form and w.step < w.form.step):
            w.step, w.state = source.step, source.state

    def group(self, w: Worker) -> Group:
        assert w.form is not None
        return self.groups[w.form.membership.generation]

    def fail(self, w: Worker) -> None:
        assert w.form is not None
        self.group(w).is_broken = True
        w.mode = "failed"
        generation = w.form.membership.generation
        self.send(w, CollectiveFailed(generation, w.rank, "connection reset", self.now))

    def in_lobby(self, w: Worker) -> None:
        assert w.form is not None
        if w.step == w.form.step and not w.is_copying:
            w.source, w.mode = None, "rendezvous"
            self.group(w).arrived.add(w.rank)
        elif w.step > w.form.step and not w.has_complained:
            w.source, w.has_complained = None, True
            self.send(w, SyncFailed(w.number, "ahead of the generation", self.now))

    def in_rendezvous(self, w: Worker) -> None:
        group = self.group(w)
        assert w.form is not None
        if len(group.arrived) == len(group.members) and self.rng.random() < 0.7:
            generation = w.form.membership.generation
            self.send(w, Joined(generation, w.rank, 0.001, self.now))
            w.mode, w.formed = "boundary", generation
            if w.rank == 0 and w.step > 0 and self.rng.random() < 0.5:
                self.send(w, Committed(generation, w.step, 0.1, self.now))
        elif group.has_gap() and self.rng.random() < 0.2:
            self.fail(w)

    def in_boundary(self, w: Worker) -> None:
        assert w.form is not None
        generation = w.form.membership.generation
        every = self.faults.eval_every
        if every and w.step % every == 0 and w.evaluated < w.step:
            w.mode = "evaluate"
        elif w.form.then_pause:
            w.mode = "paused"
            self.send(w, Paused(generation, w.rank, w.step, self.now))
        elif w.step >= self.steps:
            w.mode = "done"
            self.send(w, Done(generation, w.rank, w.step, self.now))
        else:
            w.mode = "compute"

    def in_evaluate(self, w: Worker) -> None:
        if self.rng.random() < 0.2:
            w.evaluated, w.mode = w.step, "boundary"

    def in_compute(self, w: Worker) -> None:
        if self.rng.random() < self.faults.user_failure:
            w.mode = "failed"
            self.send(w, UserFailed(w.number, "ValueError: no", self.now))
            return
        self.group(w).contributed[w.step, "reduce"].add(w.rank)
        w.mode = "reduce"

    def in_reduce(self, w: Worker) -> None:
        group = self.group(w)
        assert w.form is not None
        if not self.passes(w, group, "reduce"):
            return
        w.prepared = hash((w.state, w.form.membership.generation, w.step + 1))
        group.contributed[w.step, "vote"].add(w.rank)
        if w.wants_pause:
            group.pause_at.add(w.step)
        if w.wants_save:
            group.save_at.add(w.step)
        w.mode = "vote"

    def in_vote(self, w: Worker) -> None:
        group = self.group(w)
        assert w.form is not None
        if not self.passes(w, group, "vote"):
            return
        generation = w.form.membership.generation
        if generation < w.aborted:  # it was recalled while it waited
            self.fail(w)
            return
        is_replaced = generation < self.generation and self.generation not in self.recalled
        assert not is_replaced, "a generation that was replaced commits"
        assert w.prepared is not None
        must_pause, must_save = w.step in group.pause_at, w.step in group.save_at
        self.step_to(w, w.prepared)
        if w.rank == 0:
            self.send(w, Committed(generation, w.step, 0.1, self.now))
        if w.step % 3 == 0 or (must_save and w.step < self.steps):
            self.save(w, generation)
        if must_pause and w.step < self.steps:
            w.mode = "paused"
            self.send(w, Paused(generation, w.rank, w.step, self.now))
        else:
            w.mode = "boundary"

    def passes(self, w: Worker, group: Group, what: str) -> bool:
        """Whether the collective completes for `w` now; it may also fail if a peer is gone."""
        if group.has_gap() and self.rng.random() < 0.7:
            self.fail(w)
            return False
        return group.is_complete(w.step, what)
