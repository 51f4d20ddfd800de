"""Thousands of seeded runs against FakeCluster: safety, liveness, conservation, runs that fail."""

from collections import Counter, deque
from dataclasses import dataclass, replace
from random import Random

import pytest

from elastic.control.accounting import Account, account, open_account
from elastic.control.commands import Form, Retire
from elastic.control.pool import in_pool
from elastic.control.replay import Entry, Started, is_news, replay
from elastic.control.state import Active, Decision, Finished, Ledger, Limits, Phase, Suspending
from elastic.control.transition import start, transition
from tests.control.fake_cluster import FakeCluster
from tests.control.faults import LATE_S, Faults
from tests.control.slices import seeds

LIMITS = Limits(
    min_workers=2,
    max_workers=4,
    standby=0,
    steps=20,
    max_failures=50,
    join_timeout_s=60,
    end_timeout_s=max(LATE_S) + 30,  # whoever is missing at the end is heard of before
    confirm_timeout_s=3,
)
NUM_EVENTS = 30_000
STEP = ("compute", "reduce", "vote")
MODES = (
    (),
    STEP,
    ("vote",),
    ("torn",),
    ("torn",),
    ("pool", "rendezvous"),
    ("evaluate", "suspended"),
    ("evaluate",),
    ("paused", "done"),
)


@dataclass
class Run:
    cluster: FakeCluster
    ledger: Ledger
    phase: Phase
    journal: list[Started | Entry]
    account: Account
    seen: Counter[str]


def simulate(
    seed: int, limits: Limits, faults: Faults, kind: type[FakeCluster] = FakeCluster
) -> Run:
    cluster = kind(seed, limits.steps, faults)
    ledger, phase, commands, reason = start(limits, 0.0)
    journal: list[Started | Entry] = [Started(limits, 0.0, commands, reason)]
    entry, seen = open_account(0.0), Counter()
    past: deque[tuple[Ledger, Phase, int, Account]] = deque(maxlen=6)
    for i in range(NUM_EVENTS):
        past.append((ledger, phase, len(journal), entry))
        is_dying = faults.controller_kills > 0
        is_deaf = faults.dies_retiring and any(isinstance(c, Retire) for c in commands)
        is_dying = is_dying and (is_deaf or cluster.rng.random() < cluster.harm.controller_chance())
        is_dying = is_dying and not isinstance(phase, Finished)
        num_heard = 0 if is_deaf else cluster.rng.randint(0, len(commands)) if is_dying else None
        for command in commands[:num_heard] if is_dying else commands:
            cluster.execute(command)
        if isinstance(phase, Finished):
            return Run(cluster, ledger, phase, journal, entry, seen)
        if i % 8 == 0 and not is_dying:
            check_conservation(cluster, ledger, phase)
        if is_dying:  # the journal's tail, and some of the last commands, are lost with it
            faults.controller_kills -= 1
            ledger, phase, size, entry = past[-1] if is_deaf else cluster.rng.choice(past)
            past = deque((p for p in past if p[2] <= size), maxlen=past.maxlen)
            del journal[size:]
            event = cluster.lose_controller()
        else:
            event = cluster.next_event()
        seen[f"{type(phase).__name__} {type(event).__name__}"] += 1
        decision = transition(ledger, phase, event, limits)
        if (decision.commands or type(decision.phase) is not type(phase)) and not decision.reason:
            raise AssertionError(f"no reason for {decision}")
        if is_news(event, decision):
            entry = account(entry, event, Decision(ledger, phase), decision)
            journal.append(Entry(event, decision.commands, decision.reason))
        cluster.heard_step = max(cluster.heard_step, ledger.step, decision.ledger.step)
        ledger, phase, commands, reason = decision
    last = [str(e)[:300] for e in journal[-12:]]
    raise AssertionError(f"seed {seed} never ends: {ledger} {phase}\n" + "\n".join(last))


def check_conservation(cluster: FakeCluster, ledger: Ledger, phase: Phase) -> None:
    """Every live worker is known in exactly one place; members are in none of the sets."""
    sets = (
        ledger.spawned,
        ledger.standbys,
        ledger.loading,
        ledger.syncing,
        ledger.synced,
        ledger.with_state,
    )
    outside = set(in_pool(ledger))
    assert len(outside) == sum(len(s) for s in sets), ledger
    members = set(phase.membership.workers) if isinstance(phase, Active) else set()
    if isinstance(phase, Suspending):
        members -= set(phase.lost)
    assert not members & outside
    assert not isinstance(phase, Active) or not ledger.with_state
    assert ledger.saves.kept_step < 0 or ledger.saves.kept_step in cluster.published, ledger
    alive = {w.number for w in cluster.workers.values() if w.is_alive} | set(cluster.pending)
    assert not cluster.retired & (members | outside), "counts on somebody whom it has retired"
    assert set(ledger.leaving) <= members | outside, ledger
    assert alive <= members | outside, f"forgot {alive - members - outside}"


def check_end(run: Run) -> None:
    assert isinstance(run.phase, Finished)
    assert not [w for w in run.cluster.workers.values() if w.is_alive], "a worker is left"
    assert not run.cluster.pending
    assert not in_pool(run.ledger)
    generations = [c.membership.generation for c in run.cluster.trace if isinstance(c, Form)]
    num_adopted = sum(n for pair, n in run.seen.items() if pair.endswith(" Adopted"))
    if not num_adopted:
        assert generations == list(range(1, len(generations) + 1))
    elif num_adopted == 1:  # of two, the first may be lost as well; without any, the run starts
        later = [generation for generation in generations if generation > 1]
        assert later == sorted(set(later)), "a generation repeats"
    faults, workers = run.cluster.faults, run.cluster.workers.values()
    is_late = faults.slow_detection > 0 or any(w.is_stuck for w in workers)
    is_hindered = is_late or num_adopted or any("PartFailed" in pair for pair in run.seen)
    if run.phase.outcome == "succeeded" and not is_hindered:
        assert run.cluster.published[-1] == run.ledger.step, "no final checkpoint"
    if run.phase.outcome == "succeeded":
        assert run.cluster.recorded == run.ledger.step, "a step is not on record"
    total = run.account.goodput_s + sum(s for _, s in run.account.badput)
    assert total == pytest.approx(run.account.wall_s)
    assert min(s for _, s in run.account.badput) > -1e-9
    for recovery in run.account.recoveries:
        parts = (recovery.detect_s, recovery.fence_s, recovery.form_s, recovery.state_s)
        assert min(*parts, recovery.first_step_s, recovery.waiting_s) >= -1e-9, recovery
        assert sum(parts) + recovery.first_step_s == pytest.approx(recovery.total_s)
        assert recovery.waiting_s <= recovery.form_s + 1e-9


def scenario(seed: int) -> tuple[Limits, Faults]:
    rng = Random(seed)
    low = rng.choice((1, 1, 2, 3))
    limits = replace(
        LIMITS,
        min_workers=low,
        max_workers=rng.randint(low, 4),
        standby=rng.choice((0, 0, 1)),
        steps=rng.choice((3, 8, 20)),
        save_every_s=(None, 0.05, 0.5)[seed % 3],
    )
    faults = Faults(
        kills=rng.choice((0, 1, 2, 4, 7)),
        kill_chance=rng.choice((0.002, 0.01, 0.05)),
        kill_modes=rng.choice(MODES),
        stillborn=rng.choice((0, 0, 2)),
        stuck=rng.choice((0, 0, 0, 1)),
        sync_failures=rng.choice((0, 0, 3)),
        eval_every=rng.choice((0, 0, 2, 3)),
        slow_detection=rng.choice((0.0, 0.0, 0.3)),
        failing_saves=rng.choice((0, 0, 2)),
        slots=rng.choice((((0.0, 99),), ((0.0, low), (3.0, 99)), ((0.0, 1), (2.0, 2), (6.0, 99)))),
    )
    if faults.kill_modes == ("torn",):
        faults.kill_chance = 0.3
    return limits, faults


NUM_ALWAYS, NUM_SEEDS = 450, 2850


@pytest.mark.parametrize("part", seeds(NUM_ALWAYS, NUM_SEEDS))
def test_runs_with_faults_end_with_all_steps_and_reach_the_interesting_places(part: range) -> None:
    seen: Counter[str] = Counter()
    commands: Counter[str] = Counter()
    for seed in part:
        limits, faults = scenario(seed)
        run = simulate(seed, limits, faults)
        check_end(run)
        assert isinstance(run.phase, Finished)
        if run.phase.outcome != "succeeded":  # killed between the last step and the end
            assert run.phase.reason.startswith("no member lived to say the hash"), (seed, run.phase)
        if seed % 10 == 0:
            assert not list(replay(run.journal))
        seen.update(run.seen)
        commands.update(commands_of(run))
    check_places(seen, commands)


def commands_of(run: Run) -> Counter[str]:
    """How often each was given, and in which way."""
    commands: Counter[str] = Counter()
    for c in run.cluster.trace:
        commands[type(c).__name__] += 1
        if isinstance(c, Form):
            commands["roll_forward"] += bool(c.roll_forward)
            commands["vote of the dead"] += bool(c.roll_forward) and c.vote_of is None
            commands["then_pause"] += c.then_pause
    commands["rolled back"] += run.account.lost_steps > 0
    commands["fall"] += run.cluster.falls
    return commands


def check_places(seen: Counter[str], commands: Counter[str]) -> None:
    places = ("Waiting", "Forming", "Running", "Pausing", "Suspending", "Ending")
    for phase in places:
        assert seen[f"{phase} WorkerLost"] > 5, (phase, seen)
    for event in ("SyncFailed", "CollectiveFailed", "Suspended", "Committed", "Paused", "Done"):
        assert sum(n for pair, n in seen.items() if pair.endswith(f" {event}")) > 20, (event, seen)
    wanted = ("Spawn", "Load", "Sync", "Form", "Pause", "Abort", "Finish", "Retire", "Publish")
    assert commands["Discard"] > 20, commands
    assert min(commands[k] for k in (*wanted, "Checkpoint")) > 50, commands
    assert min(commands[k] for k in ("roll_forward", "then_pause", "fall")) >= 10, commands
    assert min(commands[k] for k in ("vote of the dead", "rolled back")) >= 1, commands


@pytest.mark.parametrize("part", seeds(150, 1000))
def test_runs_whose_controller_dies_end_with_all_steps(part: range) -> None:
    """Also while it forms, recovers or ends, with the tail of its journal, of its commands and of
    the reports to it lost, and with workers dying at the same time."""
    seen: Counter[str] = Counter()
    for seed in part:
        limits, faults = scenario(seed)
        faults.controller_kills = 1 + seed % 3
        run = simulate(seed, limits, faults)
        check_end(run)
        seen.update(run.seen)
        assert isinstance(run.phase, Finished)
        if run.phase.outcome != "succeeded":
            assert run.phase.reason.startswith("no member lived"), (seed, run.phase)
        if seed % 10 == 0:
            assert not list(replay(run.journal))
    for phase in ("Waiting", "Forming", "Running", "Pausing", "Suspending", "Ending"):
        assert seen[f"{phase} Adopted"] > len(part) / 200, seen


@pytest.mark.parametrize("part", seeds(150, 400))
def test_stopped_runs_end_stopped_or_complete(part: range) -> None:
    outcomes: Counter[str] = Counter()
    for seed in part:
        limits, faults = scenario(seed)
        faults.stop_at = Random(seed).random() * 4
        run = simulate(seed, limits, faults)
        check_end(run)
        assert isinstance(run.phase, Finished)
        outcomes[run.phase.outcome] += 1
        assert run.phase.outcome in ("stopped", "succeeded") or "no member lived" in (
            run.phase.reason
        ), (seed, run.phase)
    assert outcomes["stopped"] > len(part) / 4, outcomes


@pytest.mark.parametrize("part", seeds(100, 200))
def test_runs_whose_user_code_raises_fail_with_its_message(part: range) -> None:
    failed = 0
    for seed in part:
        limits, faults = scenario(seed)
        faults.user_failure = 0.05
        run = simulate(seed, limits, faults)
        check_end(run)
        assert isinstance(run.phase, Finished)
        if run.phase.outcome == "failed" and "no member lived" not in run.phase.reason:
            failed += 1
            assert run.phase.reason.endswith("ValueError: no")
    assert failed > len(part) / 3, "hardly a run met the error that it was given"


@pytest.mark.parametrize("part", seeds(150, 400))
def test_runs_that_lose_too_many_fail_with_the_budget_and_forget_nobody(part: range) -> None:
    outcomes: Counter[str] = Counter()
    for seed in part:
        limits, faults = scenario(seed)
        faults.kills, faults.kill_chance = 40, 0.08
        run = simulate(seed, replace(limits, max_failures=2), faults)
        check_end(run)
        assert isinstance(run.phase, Finished)
        outcomes[run.phase.outcome] += 1
        if run.phase.outcome == "failed":
            reason = run.phase.reason
            assert "max_failures is 2" in reason or "no member lived" in reason, reason
    assert outcomes["failed"] > len(part) / 4, outcomes
