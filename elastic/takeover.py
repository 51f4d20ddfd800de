"""What a run's journal says to the controller that takes the run over.

Who lives is asked in elastic/on_ray/takeover.py, what follows is elastic/control/adoption.py's.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.control.accounting import Account, Healing, Recovery, account, open_account
from elastic.control.replay import JOURNAL_TYPES, Started
from elastic.control.state import Decision, Limits
from elastic.control.transition import start, transition
from elastic.protocol.encoding import decode, encode, registry
from elastic.store.journal import lines_backwards

TYPES = {**JOURNAL_TYPES, **registry(Account, Healing, Recovery)}


@dataclass(frozen=True)
class Past:
    """Where the run stood according to the last line of its journal."""

    decision: Decision
    account: Account
    lost_steps: int
    num_events: int


def landmark(run_id: str, so_far: Account, lost_steps: int) -> dict[str, Any]:
    """What a journal line with the whole ledger has besides: reading back may stop there."""
    return {"run": run_id, "account": encode(so_far), "lost_steps": lost_steps}


def read_past(journal: Path, run_id: str, limits: Limits) -> Past | None:
    """None if the journal has nothing of this run. Its torn last line must be gone already."""
    tail: list[dict[str, Any]] = []
    for _, raw in lines_backwards(journal):
        tail.append(json.loads(raw))
        if "run" in tail[-1]:
            break
    if not tail or tail[-1].get("run") != run_id:
        return None
    head, lines = tail[-1], tail[-2::-1]
    entry = decode(head["entry"], TYPES)
    so_far: Account = decode(head["account"], TYPES)
    if isinstance(entry, Started):
        decision, so_far = start(limits, entry.at), open_account(entry.at)
    else:
        decision = Decision(entry.ledger, entry.phase)
    entries = [decode(line["entry"], TYPES) for line in lines if "entry" in line]
    for entry in entries:
        before = decision
        decision = transition(before.ledger, before.phase, entry.event, limits)
        generation = before.ledger.generation
        so_far = account(so_far, entry.event, before.phase, generation, decision)
    lost_steps = head["lost_steps"] + sum(line.get("rolled_back", 0) for line in lines)
    return Past(decision, so_far, lost_steps, len(entries))
