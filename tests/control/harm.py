"""What goes wrong in a simulated run, turn by turn, as its `Faults` allow and its seed decides."""

from typing import TYPE_CHECKING

from elastic.control import events as ev
from tests.control.fake_process import Process
from tests.control.faults import BURST_TURNS, LATE_S

if TYPE_CHECKING:
    from tests.control.fake_cluster import FakeCluster

CUT_S = (0.05, 0.5, 2.0)


class Harm:
    """To one cluster."""

    def __init__(self, cluster: "FakeCluster") -> None:
        self.cluster, self.faults, self.rng = cluster, cluster.faults, cluster.rng
        self.has_drains = cluster.faults.drains > 0
        self.close_turns = 0
        """So many more, a fault has company."""

    def go_wrong(self) -> None:
        self.close_turns = max(0, self.close_turns - 1)
        chance = self.chance(self.faults.kill_chance)
        is_ahead = "ahead" in self.faults.kill_modes
        if is_ahead and self.cluster.num_adopted and self.torn_members():
            chance = 0.1  # before it has said so to the new controller
        if self.faults.kills and self.rng.random() < chance:
            self.kill_one()
        if self.has_drains:
            self.drain()
        if self.faults.resizes and self.rng.random() < 0.01:
            self.faults.resizes -= 1
            low, high = sorted(self.rng.randint(1, 4) for _ in range(2))
            self.cluster.news.append((self.cluster.now, ev.Resized(low, high, self.cluster.now)))
        if self.faults.link_breaks and self.rng.random() < 0.005:
            self.break_link()

    def chance(self, alone: float) -> float:
        """Of a fault, now; alone: without company."""
        return max(alone, self.faults.burst) if self.close_turns else alone

    def break_link(self) -> None:
        candidates = [w for w in self.cluster.workers.values() if w.is_alive and w.is_up]
        if candidates:
            self.faults.link_breaks -= 1
            w = self.rng.choice(candidates)
            w.cut_until = self.cluster.now + self.rng.choice(CUT_S)
            w.is_broken = w.is_broken or self.rng.random() < 0.7
            self.cluster.num_breaks += w.is_broken

    def kill_one(self) -> None:
        candidates = [w for w in self.cluster.workers.values() if w.is_alive]
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

    def torn_members(self) -> list[Process]:
        """Of a step that some have committed and others have not."""
        group = self.cluster.groups.get(self.cluster.generation)
        members = [w for w in group.members if w.is_alive] if group else []
        return members if len({w.step for w in members if not w.follows}) > 1 else []

    def controller_chance(self) -> float:
        """Of its death, now."""
        if "ahead" in self.faults.kill_modes:  # with those who are behind unable to follow
            group = self.cluster.groups.get(self.cluster.generation)
            return 0.5 * (group is not None and group.has_gap() and bool(self.torn_members()))
        return self.chance(self.faults.controller_chance)

    def drain(self) -> None:
        """Notices, now and then, and the end of those who have not left in time."""
        for w in self.cluster.workers.values():
            if w.is_alive and w.doomed_at is not None and self.cluster.now > w.doomed_at:
                w.doomed_at = None
                self.kill(w)
        if not self.faults.drains or self.rng.random() >= self.chance(self.faults.drain_chance):
            return
        workers = self.cluster.workers.values()
        candidates = [w for w in workers if w.is_alive and w.doomed_at is None]
        if candidates:
            self.faults.drains -= 1
            self.close_turns = BURST_TURNS
            worker = self.rng.choice(candidates)
            worker.doomed_at = self.cluster.now + self.rng.choice(self.faults.notice_s)
            notice = ev.DrainNotice(worker.number, "drain", worker.doomed_at, self.cluster.now)
            self.cluster.news.append((self.cluster.now, notice))

    def kill(self, worker: Process, delay_s: float | None = None) -> None:
        worker.is_alive = False
        while worker.unsent and self.rng.random() < 0.3:
            worker.unsent.pop()  # never left its process
        for w in self.cluster.workers.values():
            at = w.copying
            while at.source is worker and at.received and self.rng.random() < 0.5:
                at.received.pop()  # likewise
        if delay_s is None:
            is_slow = self.rng.random() < self.faults.slow_detection
            delay_s = self.rng.choice(LATE_S) if is_slow else 0.02 * self.rng.random()
        at = self.cluster.now + delay_s
        lost = ev.WorkerLost(worker.number, "process_died", self.cluster.now, at)
        self.cluster.news.append((at, lost))
