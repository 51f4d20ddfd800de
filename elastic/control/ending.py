"""The end of the run: members say the hash of the final state, then everyone is retired."""

from dataclasses import replace

from elastic.control.lobby import lobby, lost_members
from elastic.control.state import (
    NOBODY,
    Active,
    Decision,
    Ended,
    Ending,
    Finish,
    Finished,
    Ledger,
    Limits,
    Pausing,
    Phase,
    Retire,
    Running,
)
from elastic.protocol.membership import NumberSet


def end(
    ledger: Ledger, phase: Running | Pausing, outcome: str, reason: str, at: float, limits: Limits
) -> Decision:
    """All members stand at the last step: no step will follow."""
    membership = phase.membership
    ending = Ending(membership, outcome, reason, at + limits.join_timeout_s)
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
    ended = phase.ended.add(event.rank)
    return conclude(ledger, replace(phase, ended=ended, weights_sha256=expected))


def lose_at_end(ledger: Ledger, phase: Ending, worker: int) -> Decision:
    """The others hold the same state: a loss only reduces who must still say its hash."""
    rank = phase.membership.rank_of(worker)
    return conclude(ledger, replace(phase, lost=phase.lost.add(rank)))


def conclude(ledger: Ledger, phase: Ending, is_over: bool = False) -> Decision:
    """Finish once everybody has answered, is lost, or is late."""
    num_heard = len(phase.ended) + len(phase.lost - phase.ended)
    if not is_over and num_heard < phase.membership.world_size:
        return Decision(ledger, phase)
    if not phase.ended:
        reason = f"no member lived to say the hash of the final weights of step {ledger.step}"
        return finish(ledger, phase, "failed", reason)
    return finish(ledger, phase, phase.outcome, phase.reason, phase.weights_sha256)


def finish(
    ledger: Ledger, phase: Phase, outcome: str, reason: str, weights_sha256: str = ""
) -> Decision:
    """Over: nobody may be forgotten."""
    everyone = lobby(ledger)
    if isinstance(phase, Active):
        everyone = everyone | (NumberSet.of(phase.membership.workers) - lost_members(phase))
    ledger = replace(
        ledger,
        spawned=NOBODY,
        ready=NOBODY,
        loading=NOBODY,
        syncing=NOBODY,
        synced=NOBODY,
        holders=NOBODY,
        behind=NOBODY,
    )
    commands = (Retire(tuple(everyone)),) if everyone else ()
    first_line = (reason.splitlines() or [outcome])[0]  # of a traceback, too
    return Decision(ledger, Finished(outcome, reason, weights_sha256), commands, first_line)
