"""Where every second of every rank went: a pure fold over a run's journal.

The rule that gives a second its bucket is elastic/control/accounting.py's, so that a report and
`result.json` cannot disagree; here the seconds keep their place in time and their members.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

from elastic.control.accounting import Account, Recovery, account, losses_in, open_account
from elastic.control.commands import Retire
from elastic.control.events import Committed, DrainNotice, Loaded, WorkerLost, WorkerStarted
from elastic.control.replay import Entry, Started
from elastic.control.state import Active, Decision, Finished, Phase, Running
from elastic.control.transition import start, transition

PRODUCTIVE = "productive"  # steps that stayed committed
WAITING = "waiting"  # for capacity
ABSENT = "absent"  # fewer members than the run may have: this rank had no worker
DOWN = "down"  # between a controller's end and the next start of the same run
UNSETTLED = "unsettled"  # the end of a journal that does not end with the run
ROLLED_BACK = "rolled_back"
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Span:
    """A time that went to one bucket. Unix seconds."""

    began: float
    ended: float
    bucket: str
    members: tuple[int, ...]
    """Workers by rank; empty while there is no generation."""
    step: int = 0
    """The step that was committed at its end, if it is productive."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Episode:
    """One recovery: the losses it healed, and when its first step was committed."""

    recovery: Recovery
    losses: tuple[WorkerLost, ...]
    healed_at: float


@dataclass
class Life:
    """A worker's time from its start to its end."""

    worker: int
    started_at: float
    ended_at: float | None = None
    cause: str = ""
    """Empty: it was retired, or the journal ends before it does."""


@dataclass
class Timeline:
    """Spans follow each other without gap or overlap."""

    spans: list[Span] = field(default_factory=list[Span])
    episodes: list[Episode] = field(default_factory=list[Episode])
    losses: list[WorkerLost] = field(default_factory=list[WorkerLost])
    notices: list[DrainNotice] = field(default_factory=list[DrainNotice])
    lives: list[Life] = field(default_factory=list[Life])
    max_workers: int = 0
    lost_steps: int = 0
    outcome: str = "unfinished"

    @property
    def began(self) -> float:
        return self.spans[0].began

    @property
    def ended(self) -> float:
        return self.spans[-1].ended

    def buckets(self) -> dict[str, float]:
        """Seconds by bucket; they add up to the wall time."""
        return added((span.bucket, span.seconds) for span in self.spans)

    def seconds_of(self, bucket: str, began: float, ended: float) -> float:
        """Of a bucket within a time."""
        found = (s for s in self.spans if s.bucket == bucket)
        return sum(max(0.0, min(s.ended, ended) - max(s.began, began)) for s in found)

    def rank_buckets(self, rank: int) -> dict[str, float]:
        """Seconds of one rank by bucket; they add up to the wall time, too."""
        return added((bucket_of(span, rank), span.seconds) for span in self.spans)


def bucket_of(span: Span, rank: int) -> str:
    """Without a generation every rank waits alike; in one, ranks without a worker are absent."""
    return ABSENT if 0 < len(span.members) <= rank else span.bucket


def added(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for bucket, seconds in parts:
        sums[bucket] = sums.get(bucket, 0.0) + seconds
    return {bucket: seconds for bucket, seconds in sums.items() if seconds > 0}


def follow(parts: Iterable[list[Started | Entry]], last_at: float) -> Timeline:
    """The timeline of a journal, one part per start of the run. `last_at`: its last line's time.

    Raises ValueError for a part without `Started`, UnexpectedEvent as transition does.
    """
    line = Timeline()
    for part in parts:
        if not part or not isinstance(part[0], Started):
            raise ValueError("the journal does not begin with its limits")
        follow_part(line, part[0], [e for e in part[1:] if isinstance(e, Entry)])
    if line.spans and line.outcome == "unfinished" and last_at > line.ended:
        members = line.spans[-1].members
        line.spans.append(Span(line.ended, last_at, UNSETTLED, members))
    return line


def follow_part(line: Timeline, head: Started, entries: list[Entry]) -> None:
    line.max_workers = max(line.max_workers, head.limits.max_workers)
    line.outcome = "unfinished"
    if line.spans and head.at > line.ended:
        line.spans.append(Span(line.ended, head.at, DOWN, ()))
        end_all(line, line.spans[-1].began)
    decision = start(head.limits, head.at, head.earlier_generations)
    so_far = open_account(head.at)
    losses: list[WorkerLost] = []
    quiet_until = 0
    for position, entry in enumerate(entries):
        if position < quiet_until:
            continue
        if steps := quiet_steps(entries, position, decision, so_far):
            so_far = take_quiet_steps(line, so_far, steps, decision.phase)
            quiet_until = position + len(steps)
            continue
        before, known = decision, so_far
        decision = transition(before.ledger, before.phase, entry.event, head.limits)
        so_far = account(known, entry.event, before, decision)
        line.max_workers = max(line.max_workers, decision.ledger.max_workers)
        found = losses_in(entry.event, before.phase)
        follow_workers(line, entry, decision, found)
        line.losses += found
        losses += found
        if isinstance(entry.event, DrainNotice):
            line.notices.append(entry.event)
        roll_back(line, entry, before, decision)
        line.spans += spans_of(known, so_far, before.phase)
        if isinstance(entry.event, Committed):
            line.spans = told_late(line.spans, known, so_far)
        if len(so_far.recoveries) > len(known.recoveries):
            line.episodes.append(Episode(so_far.recoveries[-1], tuple(losses), entry.event.at))
        if so_far.healing is None:
            losses = []
    line.lost_steps += so_far.lost_steps
    if isinstance(decision.phase, Finished):
        line.outcome = decision.phase.outcome
        end_all(line, so_far.since)


def quiet_steps(
    entries: list[Entry], position: int, before: Decision, known: Account
) -> list[Committed]:
    """Steps from `position` on, of a generation at work, that led to no decision and that such a
    step follows: that one's decision is as if all had been heard. Most of a long journal is these,
    and to decide each anew takes ten times as long."""
    if not isinstance(before.phase, Running) or known.healing or known.step != before.ledger.step:
        return []
    step, found = known.step, list[Committed]()
    for entry in islice(entries, position, None):
        event = entry.event
        if not isinstance(event, Committed) or entry.commands or entry.reason:
            break
        if event.step != step + 1 or event.generation != before.ledger.generation:
            break
        found.append(event)
        step += 1
    return found[:-1]


def take_quiet_steps(
    line: Timeline, known: Account, steps: list[Committed], phase: Phase
) -> Account:
    """As `account` and `spans_of` have it, to the bit: the same sums in the same order."""
    members = phase.membership.workers if isinstance(phase, Active) else ()
    goodput_s, waited_s, since = known.goodput_s, dict(known.badput)[IDLE], known.since
    for event in steps:
        now = max(event.at, since)
        idle_s = min(max(0.0, event.idle_s), now - since)
        worked_s = goodput_s
        goodput_s = goodput_s + (now - since) - idle_s
        before_s, waited_s = waited_s, waited_s + idle_s
        parts = [(PRODUCTIVE, goodput_s - worked_s), (IDLE, waited_s - before_s)]
        line.spans += spans_from(since, now, parts, members, event.step)
        since = now
    badput = tuple((bucket, waited_s if bucket == IDLE else s) for bucket, s in known.badput)
    step = steps[-1].step
    return replace(known, goodput_s=goodput_s, badput=badput, since=since, step=step)


def spans_of(before: Account, after: Account, phase: Phase) -> list[Span]:
    """What `account` gave to its buckets in one event: work comes first, then what followed."""
    members = phase.membership.workers if isinstance(phase, Active) else ()
    grown = {b: seconds - dict(before.badput)[b] for b, seconds in after.badput}
    moved_s = grown.pop(ROLLED_BACK)  # seconds that have their place in time already
    moved_s += min(0.0, *grown.values())  # those of a step that is told late have, too
    productive_s = after.goodput_s - before.goodput_s + moved_s
    parts = [(PRODUCTIVE, productive_s), ("retried", grown.pop("retried")), *grown.items()]
    return spans_from(before.since, after.since, parts, members, after.step)


def spans_from(
    at: float,
    ended: float,
    parts: list[tuple[str, float]],
    members: tuple[int, ...],
    step: int,
) -> list[Span]:
    """One after another from `at` on, without those of no time."""
    spans: list[Span] = []
    for bucket, seconds in parts:
        if seconds > 1e-9:
            of_step = step if bucket == PRODUCTIVE else 0
            spans.append(Span(at, at + seconds, bucket, members, of_step))
            at += seconds
    if spans:  # so that the next one begins exactly here
        spans[-1] = replace(spans[-1], ended=ended)
    return spans


def told_late(spans: list[Span], before: Account, after: Account) -> list[Span]:
    """A step turned out to have been committed in a time that was given up: it was productive."""
    began, ended = before.given_up.began, after.given_up.began
    if ended <= began:
        return spans
    parts: list[Span] = []
    for span in spans:
        cut = [at for at in (began, ended) if span.began < at < span.ended]
        for part_began, part_ended in pairwise((span.began, *cut, span.ended)):
            is_step = part_began >= began and part_ended <= ended
            part = replace(span, began=part_began, ended=part_ended)
            parts.append(replace(part, bucket=PRODUCTIVE, step=after.step) if is_step else part)
    return parts


def roll_back(line: Timeline, entry: Entry, before: Decision, decision: Decision) -> None:
    """Steps that the run fell back behind were not productive."""
    step = decision.ledger.step
    is_back = isinstance(entry.event, Loaded) or step < before.ledger.step
    if is_back:
        line.spans = [
            replace(s, bucket=ROLLED_BACK) if s.bucket == PRODUCTIVE and s.step > step else s
            for s in line.spans
        ]


def follow_workers(
    line: Timeline, entry: Entry, decision: Decision, found: tuple[WorkerLost, ...]
) -> None:
    """found: the losses in it."""
    event = entry.event
    if isinstance(event, WorkerStarted):
        line.lives.append(Life(event.worker, event.at))
    for loss in found:
        end_life(line, loss.worker, loss.at, loss.cause)
    for command in decision.commands:
        if isinstance(command, Retire):
            for worker in command.workers:
                end_life(line, worker, event.at, "")


def end_life(line: Timeline, worker: int, at: float, cause: str) -> None:
    for life in line.lives:
        if life.worker == worker and life.ended_at is None:
            life.ended_at, life.cause = at, cause


def end_all(line: Timeline, at: float) -> None:
    for life in line.lives:
        if life.ended_at is None:
            life.ended_at = at
