"""An in-memory cluster: shipped controller and shipped workers, over a fake network and clock.

Messages are in order per worker and direction, late by any time, in any order across workers; a
link that is cut passes all of it later, or breaks: what is on the wire is lost then, and both ends
say again what is in force. So it is for a new controller, which has nothing to say again. The
cluster asserts on the way what no decision may ever violate.
"""

import random
from collections import deque
from dataclasses import replace
from typing import Any, TypeAlias, cast

from elastic.control import commands as c
from elastic.control import events as ev
from elastic.control.standing import Standing
from elastic.control.translation import copying, event_of, interruption
from elastic.on_ray.record.progress import Progress
from elastic.protocol.in_force import CommandsInForce
from elastic.protocol.mesh import DDP
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages import to_worker as t
from elastic.protocol.step_record import VoteHead
from tests.control.fake_copying import Copied
from tests.control.fake_group import Group
from tests.control.fake_process import Process
from tests.control.fake_record import FakeRecord
from tests.control.fake_votes import weights_in
from tests.control.faults import BURST_TURNS, Faults
from tests.control.harm import Harm
from workers.step.vote import CompletedVote

AT_REST = ("idle", "suspended", "paused", "done")
Interruption: TypeAlias = c.Pause | c.Checkpoint | c.Keep | c.Abort | c.Recall


class FakeCluster:
    is_whole = True
    """Every member holds the whole state."""
    parallel = DDP
    """Of its limits."""

    def __init__(self, seed: int, steps: int, faults: Faults) -> None:
        self.rng, self.steps, self.faults = random.Random(seed), steps, faults
        self.in_force: dict[int, CommandsInForce] = {}
        self.now = 0.0
        self.workers: dict[int, Process] = {}
        self.news: list[tuple[float, ev.Event]] = []
        """From outside the workers: (not before, event)."""
        self.to_emit: deque[ev.Event] = deque()
        self.pending: deque[int] = deque()
        """Spawned, no slot yet."""
        self.groups: dict[int, Group] = {}
        self.generation = 0
        """The highest that anybody alive was told of."""
        self.newest = -1
        """The highest number of a worker."""
        self.recalled: set[int] = set()
        """Generations that are never to form."""
        self.untold: c.Form | None = None
        """What waits for its rendezvous."""
        self.record = FakeRecord()
        self.progress = self.new_progress()
        self.votes: set[tuple[int, int]] = set()
        """Generations and steps of which it was heard."""
        self.loaded = 0
        self.loading: int | None = None
        self.heard_step = 0
        """The highest that the ledger has called committed."""
        self.falls = 0
        self.published: list[int] = []
        self.dropped: set[tuple[int, int]] = set()
        self.num_adopted = self.num_breaks = self.rollbacks = self.returns = 0
        self.retired: set[int] = set()
        self.started: set[int] = set()
        """Whose Started was heard."""
        self.trace: list[c.Command] = []
        self.kept: dict[int, tuple[int, int]] = {}
        """Step -> its origin and the state, saved for those who leave."""
        self.states: dict[int, set[int]] = {}
        """Step -> states that somebody has committed, of those on record."""
        self.harm = Harm(self)
        if faults.stop_at is not None:
            self.news.append((faults.stop_at, ev.StopRequested("SIGINT", faults.stop_at)))

    def new_progress(self) -> Progress:
        return Progress(cast(Any, self.record), self.to_emit.append, lambda: self.now)

    @property
    def recorded(self) -> int:
        return self.progress.recorded_step

    def spawned(self, number: int) -> Process:
        return Process(number, self)

    # --- commands ------------------------------------------------------------------------
    def execute(self, command: c.Command) -> None:
        self.trace.append(command)
        match command:
            case c.Spawn(workers):
                assert workers[0] > self.newest, "a number is given again"
                self.newest = workers[-1]
                self.pending.extend(workers)
            case c.Retire(workers):
                self.retire(workers)
            case c.Load(worker):
                self.loading = worker
                self.tell(worker, t.Load("/run", self.recorded))
            case c.Sync(worker):
                there = {number: ("w", number) for number, w in self.workers.items() if w.is_up}
                self.tell(worker, copying(command, there, {}, ()))
            case c.Form():
                self.form(command)
            case c.Publish() | c.Discard():
                self.conclude_save(command)
            case c.Pause() | c.Checkpoint() | c.Keep() | c.Abort() | c.Recall():
                self.interrupt(command)
            case c.Finish():
                self.finish(command)

    def tell(self, worker: int, command: t.Command) -> None:
        self.in_force.setdefault(worker, CommandsInForce()).say(command)
        self.workers[worker].wire.append(command)

    def interrupt(self, command: Interruption) -> None:
        membership, generation = command.membership, command.membership.generation
        if isinstance(command, c.Recall):
            assert generation > self.generation
            self.generation = generation
            self.recalled.add(generation)
            self.groups[generation] = Group([self.workers[w] for w in membership.workers])
        assert generation == self.generation
        is_unheard = self.untold is not None
        if isinstance(command, c.Abort | c.Recall):
            self.untold = None
            self.progress.commits.give_up(generation)
        for rank, number in enumerate(membership.workers):
            self.tell(number, interruption(command, rank, is_unheard=is_unheard))

    def finish(self, command: c.Finish) -> None:
        """By the members of the generation at work, or of a new one."""
        membership = command.membership
        generation, size = membership.generation, membership.world_size
        members = [self.workers[w] for w in membership.workers]
        if generation == self.generation:
            assert members == self.groups[generation].members
        assert generation >= self.generation, "a generation repeats"
        self.generation = generation
        self.groups.setdefault(generation, Group(members))
        self.progress.commits.end(generation)
        for rank, w in enumerate(members):
            told = t.Finish(generation, rank, size, command.outcome, None, self.recorded)
            self.tell(w.number, told)

    def conclude_save(self, command: c.Publish | c.Discard) -> None:
        save = command.generation, command.step
        if isinstance(command, c.Discard):  # perhaps again, for the part of a rank that was late
            self.dropped.add(save)
            return
        is_repeated = self.num_adopted or self.num_breaks
        assert save not in self.dropped or is_repeated, "it was discarded"
        group = self.groups[command.generation]
        assert group.saved[command.step] == set(range(len(group.members))), command
        assert command.step <= self.recorded, "published ahead of the record"
        self.published.append(command.step)
        for w in self.workers.values():
            is_told = w.cut_until <= self.now  # else it may say again what is published
            if is_told and w.last_part is not None and w.last_part.step == command.step:
                w.last_part = None

    def retire(self, workers: tuple[int, ...]) -> None:
        self.retired |= set(workers)
        for number in workers:
            if number in self.workers:
                self.workers[number].is_alive = False
            elif number in self.pending:
                self.pending.remove(number)

    # --- forming -------------------------------------------------------------------------
    def form(self, command: c.Form) -> None:
        membership, before = command.membership, self.generation
        assert membership.generation > before
        assert membership.generation == before + 1 or self.num_adopted
        self.generation = membership.generation
        members = [self.workers[w] for w in membership.workers]
        self.groups[self.generation] = Group(members)
        self.check_form(command, members, before)
        self.heard_step = command.step
        self.progress.evaluations.go_back(command.step)
        if command.step < self.recorded:
            self.begin_at(command.step)
        if self.rng.random() < 0.9:
            self.tell_form(command)
        else:  # it waits for its rendezvous
            self.untold = command

    def tell_form(self, form: c.Form) -> None:
        membership, self.untold = form.membership, None
        if self.progress.is_unknown_to(membership.workers):
            for worker in membership.workers:
                self.workers[worker].hear_word(self.recorded, self.progress.commits.formed)
        self.progress.members = frozenset(membership.workers)
        for rank, worker in enumerate(membership.workers):
            is_rolling = worker in form.roll_forward
            vote, content = None, b""
            if is_rolling:
                vote, content = self.progress.commits.vote_of(form.step, form.origin)
            told = t.Form(
                generation=membership.generation,
                rank=rank,
                world_size=membership.world_size,
                step=form.step,
                then_pause=form.then_pause,
                recorded_step=self.recorded,
                store=None,
                vote=vote,
                evaluation=self.progress.evaluations.newest(membership.workers),
                holders=(),
                order=form.order,
                origin=form.origin,
                payload=content,
            )
            self.tell(worker, told)

    def check_form(self, command: c.Form, members: list[Process], before: int) -> None:
        """Everybody can get to the step; no committed step is given up while somebody holds it."""
        assert len(set(command.membership.workers)) == len(members)
        states: set[int] = set()
        for w in members:
            if w.number in command.roll_forward:
                assert w.step == command.step - 1, (w, command)
                head, content = self.progress.commits.vote_of(command.step, command.origin)
                vote = weights_in(CompletedVote(head, content))
                assert w.gradient == vote, "no vote to roll forward with"
                states.add(vote)
            elif not w.follows and not w.has_complained and w.is_alive:  # who has cannot join
                assert w.step == command.step, (w, command)
                states.add(w.weights)
            if w.is_alive and not w.follows and w.generation:
                assert w.mode in AT_REST, (w, command)
        assert len(states) <= 1, "members differ"
        is_rolling = bool(command.roll_forward)
        assert not is_rolling or not any(w.follows for w in members), "misses an evaluation"
        assert command.vote_of is None or command.vote_of in command.membership.workers
        for w in self.workers.values():
            if w.is_alive and not w.follows and w.mode in ("suspended", "paused"):
                assert w.step <= command.step, (w, command)
                has_vote = (before, self.heard_step) in self.votes
                reach = w.step + (w.machine.is_prepared and has_vote)
                if command.step < self.heard_step:
                    assert reach < self.heard_step, (w, command, "a step fell although it lives on")
        self.falls += command.step < self.heard_step

    def check_commit(self, w: Process) -> None:
        is_replaced = w.generation < self.generation and self.generation not in self.recalled
        assert not is_replaced, "a generation that was replaced commits"

    # --- what is between workers -----------------------------------------------------------
    def feed(self, source: Process, update: Copied) -> None:
        """What one step changes, to whoever follows and does not lag."""
        for w in self.workers.values():
            at = w.copying
            if at.source is source and w.is_alive and not (at.is_copying or at.is_lagging):
                at.received.append(update)

    def renew(self, source: Process) -> None:
        """Whoever lags gets the state as it is now."""
        for w in self.workers.values():
            if w.copying.source is source and w.is_alive and w.copying.is_lagging:
                w.copying.received.append(source.state_of())

    def freeze_one(self, w: Process) -> None:
        """Told to form, it freezes, which is noticed late."""
        if self.faults.stuck and self.rng.random() < 0.2:
            self.faults.stuck -= 1
            w.is_stuck = True
            at = self.now + 100
            self.news.append((at, ev.WorkerLost(w.number, "heartbeat_silent", self.now, at)))

    # --- what is said ------------------------------------------------------------------------
    def next_event(self) -> ev.Event:
        for _ in range(40):
            self.now += 0.002
            self.start_pending()
            self.harm.go_wrong()
            if self.untold is not None and self.rng.random() < 0.1:
                self.tell_form(self.untold)
            draw = self.rng.random()
            if draw < 0.3:
                event = self.deliver()
                if event is not None:
                    return event
            elif draw < 0.985:
                self.advance_one()
            else:
                return ev.Tick(self.now)
        self.now += self.rng.choice((0.05, 1.0))
        return ev.Tick(self.now)

    def deliver(self) -> ev.Event | None:
        if self.to_emit:
            return replace(self.to_emit.popleft(), at=self.now)
        news = enumerate(self.news)
        due = [i for i, (not_before, e) in news if not_before <= self.now and self.may_hear(e)]
        if due and self.rng.random() < 0.5:
            event = self.news.pop(self.rng.choice(due))[1]
            if isinstance(event, ev.WorkerLost):
                self.workers[event.worker].is_alive = False  # a suspect is killed first
            return replace(event, at=self.now)
        for w in self.workers.values():
            if w.is_broken and w.cut_until <= self.now and w.is_alive and not w.is_stuck:
                self.say_again(w)
        senders = [w for w in self.workers.values() if w.unsent and w.cut_until <= self.now]
        if not senders:
            return None
        w = self.rng.choice(senders)
        return self.hear(w, w.unsent.popleft())

    def may_hear(self, event: ev.Event) -> bool:
        """Whoever is lost is not heard any more, as its link is dropped."""
        return not isinstance(event, ev.WorkerLost) or not self.workers[event.worker].unsent

    def hear(self, w: Process, report: r.Report) -> ev.Event | None:  # noqa: C901
        """As elastic/on_ray/cluster.py does."""
        if w.number in self.in_force:
            self.in_force[w.number].answered(report)
        match report:
            case r.Started():
                self.started.add(w.number)
                return ev.WorkerStarted(w.number, self.now)
            case r.Loaded(step, origin=origin):
                if self.loading != w.number:
                    return None  # a controller before this one had asked for it, or said again
                self.loading = None
                self.loaded = step
                self.begin_at(step)
                self.progress.commits.vote = None
                return ev.Loaded(w.number, step, self.now, origin)
            case r.UserFailed(message):
                return ev.UserFailed(w.number, message, self.now)
            case r.Committed():
                self.keep_vote(report.generation, report.steps[-1].step, report.vote)
                self.progress.commits.hear(report)
                return None
            case r.Held():
                self.progress.commits.hear_held(report)
                return None
            case r.Evaluated(evaluation):
                self.progress.evaluations.hear(evaluation)
                return None
            case r.Joined():
                before = self.recorded
                self.progress.hear_joined(report)
                if self.recorded < before:
                    self.check_return(before)
            case r.Suspended():
                self.keep_vote(report.generation, report.step, report.vote)
                if self.progress.commits.is_news(report.generation):
                    self.progress.hear_suspended(w.number, report)
            case _:
                pass
        event: Any = report
        return event_of(w.number, event, self.now)

    def keep_vote(self, generation: int, step: int, vote: VoteHead | None) -> None:
        if generation == self.generation and vote is not None:
            self.votes.add((generation, step))

    def begin_at(self, step: int) -> None:
        """Later steps have come to nothing."""
        if step < self.recorded:
            self.record.roll_back(step)
        self.progress.recorded_step = step

    def check_return(self, before: int) -> None:
        raise AssertionError(f"a generation begins at {self.recorded}, {before} is on record")

    # --- a new controller --------------------------------------------------------------------
    def lose_controller(self) -> ev.Adopted:
        """Its memory is gone, and what was on the wire from it and to it."""
        self.num_adopted += 1
        self.harm.close_turns = BURST_TURNS
        self.votes.clear()
        self.pending.clear()
        self.untold = self.loading = None
        self.in_force.clear()
        self.to_emit.clear()
        self.progress = self.new_progress()
        self.progress.recorded_step = len(self.record.steps)
        self.progress.recorded_generation = self.record.generation
        standings: list[Standing] = []
        everybody = sorted(self.workers.items())
        if self.faults.slow_failover:
            self.rng.shuffle(everybody)
        for number, w in everybody:
            self.go_on_alone()
            if not w.is_alive or w.is_stuck:
                w.is_alive = False  # what does not answer is ended
                continue
            standings.append(self.introduced(w) if w.is_up else Standing(number, "starting"))
        standings.sort(key=lambda s: s.worker)
        known = {s.worker for s in standings}
        self.news = [
            (at, e) for at, e in self.news if not isinstance(e, ev.WorkerLost) or e.worker in known
        ]
        for number, w in self.workers.items():
            if number not in known:
                w.unsent.clear()
        told = [self.workers[n].machine.word.told.generation for n in known]
        self.generation = max(told, default=0)
        return ev.Adopted(tuple(standings), self.now, self.newest, self.recorded)

    def go_on_alone(self) -> None:
        """Without a controller, until the next worker has found its successor."""
        for _ in range(self.rng.randint(0, 25) if self.faults.slow_failover else 0):
            self.now += 0.002
            self.harm.go_wrong()
            self.advance_one()

    def introduced(self, w: Process) -> Standing:
        """Over another connection."""
        for _ in range(self.rng.randint(0, len(w.unsent))):
            w.unsent.popleft()
        for _ in range(self.rng.randint(0, len(w.wire))):
            w.wire.pop()
        while w.wire:  # has come before the connection ended
            w.hear()
        w.is_broken, said = False, w.introduction()
        place = said.generation, said.rank, said.world_size
        return Standing(w.number, said.kind, *place, said.step, origin=said.origin)

    def say_again(self, w: Process) -> None:
        """To the same controller, which does likewise."""
        self.introduced(w)
        if w.number in self.in_force:
            again = self.in_force[w.number].again()
            w.wire.extend(c for c in again if not isinstance(c, t.SaveConcluded))
        if w.number not in self.started:  # that it has started may be lost
            w.unsent.appendleft(w.started())

    def start_pending(self) -> None:
        if not self.pending:
            return
        slots = max((n for at, n in self.faults.slots if at <= self.now), default=0)
        alive = sum(w.is_alive for w in self.workers.values())
        while self.pending and alive < slots:
            number = self.pending.popleft()
            self.workers[number] = self.spawned(number)
            alive += 1

    # --- workers -----------------------------------------------------------------------------
    def advance_one(self) -> None:
        alive = [w for w in self.workers.values() if w.is_alive and not w.is_stuck]
        if not alive:
            return
        worker = self.rng.choice(alive)
        if self.rng.random() < 0.1:
            worker.hear_word(self.recorded, self.progress.commits.formed)
        if not worker.is_up:
            self.boot(worker)
        elif worker.wire and worker.cut_until <= self.now and self.rng.random() < 0.6:
            worker.hear()
        else:
            worker.turn()

    def boot(self, worker: Process) -> None:
        if self.faults.stillborn and self.rng.random() < 0.5:
            self.faults.stillborn -= 1
            self.harm.kill(worker)
        elif self.rng.random() < 0.5:
            worker.is_up = True
            worker.send(worker.started())

    def followers_of(self, w: Process) -> list[Process]:
        return [f for f in self.workers.values() if f.copying.source is w and f.is_alive]
