"""The end of the run: members say the hash of the final state, then everyone is retired."""

from dataclasses import replace

from elastic.control.checkpointing import drop_save
from elastic.control.commands import Finish, Retire
from elastic.control.events import Ended
from elastic.control.pool import in_pool, lost_members
from elastic.control.state import (
    NOBODY,
    Active,
    Decision,
    Ending,
    Finished,
    Ledger,
    Limits,
    Pausing,
    Phase,
    Running,
)
from elastic.protocol.membership import Membership, NumberSet, worker_name


def end(
    ledger: Ledger, phase: Running | Pausing, outcome: str, reason: str, at: float, limits: Limits
) -> Decision:
    """All members stand at the last step: no step will follow."""
    membership = phase.membership
    ending = Ending(membership, outcome, reason, at + limits.end_timeout_s)
    return Decision(ledger, ending, (Finish(membership, outcome),), f"{outcome}: {reason}")


def hear_end(ledger: Ledger, phase: Ending, event: Ended) -> Decision:
    expected = phase.weights_sha256 or event.weights_sha256
    if event.weights_sha256 != expected:
        workers = phase.membership.workers
        reason = (
            f"the final weights differ: rank {event.rank} (w{workers[event.rank]}) has "
            f"{event.weights_sha256}, another rank {expected}"
        )
        return finish(ledger, phase, "failed", reason)
    phase = replace(phase, ended=phase.ended.add(event.rank), weights_sha256=expected)
    if len(phase.ended) < phase.membership.world_size:
        return Decision(ledger, phase)
    return finish(ledger, phase, phase.outcome, phase.reason, expected)


def lose_at_end(ledger: Ledger, phase: Ending, worker: int, at: float, limits: Limits) -> Decision:
    """The others hold the same state and write all of it, as another generation."""
    ledger = replace(ledger, leaving=ledger.leaving.remove(worker))
    survivors = tuple(w for w in phase.membership.workers if w != worker)
    membership = Membership(ledger.generation + 1, survivors)
    ending = replace(phase, membership=membership, deadline=at + limits.end_timeout_s, ended=NOBODY)
    if not survivors:
        reason = f"no member lived to say the hash of the final weights of step {ledger.step}"
        return finish(ledger, ending, "failed", reason)
    ledger, dropped = drop_save(replace(ledger, generation=membership.generation))
    reason = f"{worker_name(worker)} lost at the end, the other {len(survivors)} write the state"
    return Decision(ledger, ending, (*dropped, Finish(membership, phase.outcome)), reason)


def end_late(ledger: Ledger, phase: Ending) -> Decision:
    """The state is as it is; whoever said its hash said it for all."""
    if phase.weights_sha256:
        return finish(ledger, phase, phase.outcome, phase.reason, phase.weights_sha256)
    reason = f"no member said the hash of the final weights of step {ledger.step} in time"
    return finish(ledger, phase, "failed", reason)


def finish(
    ledger: Ledger, phase: Phase, outcome: str, reason: str, weights_sha256: str = ""
) -> Decision:
    """Over: nobody may be forgotten."""
    everyone = in_pool(ledger)
    if isinstance(phase, Active):
        everyone = everyone | (NumberSet.of(phase.membership.workers) - lost_members(phase))
    ledger, dropped = drop_save(ledger)
    ledger = replace(
        ledger,
        spawned=NOBODY,
        standbys=NOBODY,
        outdated=NOBODY,
        left=NOBODY,
        loading=NOBODY,
        syncing=NOBODY,
        synced=NOBODY,
        with_state=NOBODY,
        behind=NOBODY,
        leaving=NOBODY,
    )
    commands = (*dropped, Retire(tuple(everyone))) if everyone else dropped
    first_line = (reason.splitlines() or [outcome])[0]  # of a traceback, too
    return Decision(ledger, Finished(outcome, reason, weights_sha256), commands, first_line)
