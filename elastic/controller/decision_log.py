"""The journal's lines of decisions: written one by one, read back by a controller's successor.

Who lives is asked in elastic/on_ray/failover.py, what follows is elastic/control/failover.py's.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elastic.control.accounting import Account, GivenUp, Healing, Recovery, account, open_account
from elastic.control.events import Event
from elastic.control.replay import JOURNAL_TYPES, Entry, Started
from elastic.control.state import Decision, Limits
from elastic.control.transition import start, transition
from elastic.protocol.encoding import decode, encode, registry
from elastic.protocol.errors import WrongInput, in_words
from elastic.protocol.messages.to_controller import Planned, ScriptLevel, Stage
from elastic.store.journal import lines_backwards

TYPES = {
    **JOURNAL_TYPES,
    **registry(Account, GivenUp, Healing, Recovery, Planned, Stage, ScriptLevel),
}


class DecisionLog(NamedTuple):
    """Where the run stood according to the last line of its journal."""

    decision: Decision
    account: Account
    lost_steps: int
    last_metrics: dict[str, Any]
    """Of the engine's last step on record, {} if there is none."""
    last_evaluation: tuple[int, int]
    """Step, and how many before it at this step; (-1, 0) for none since the last landmark."""
    planned: Planned | None = None
    """How members share the model, as they said last."""
    level: ScriptLevel | None = None
    """At which level a script runs, likewise."""


@dataclass(frozen=True)
class Landmark:
    """What a line has besides its event so that reading back may stop there."""

    run_id: str
    account: Account
    lost_steps: int
    planned: Planned | None = None
    """Said last, in a line of its own."""
    level: ScriptLevel | None = None
    """Likewise."""


def line_of(
    event: Event | None, decision: Decision, limits: Limits, at: float, landmark: Landmark | None
) -> dict[str, Any]:
    """A decision's line in journal.jsonl; the run's first one has no event, but a landmark."""
    ledger, phase = decision.ledger, decision.phase
    if event is None:
        earlier = ledger.earlier_generations
        entry = Started(limits, at, decision.commands, decision.reason, earlier)
    else:
        whole = (ledger, phase) if landmark is not None else (None, None)
        entry = Entry(event, decision.commands, decision.reason, *whole)
    line: dict[str, Any] = {
        "at": event.at if event is not None else at,
        "phase": type(phase).__name__.lower(),
        "generation": ledger.generation,
        "step": ledger.step,
        "entry": encode(entry),
    }
    if landmark is not None:
        line |= {"run": landmark.run_id, "account": encode(landmark.account)}
        line["lost_steps"] = landmark.lost_steps
        if landmark.planned is not None:
            line["planned_last"] = encode(landmark.planned)
        if landmark.level is not None:
            line["level_last"] = encode(landmark.level)
    return line


def read_past(
    directory: Path, run_id: str, limits: Limits, record: str = "metrics.jsonl"
) -> DecisionLog | None:
    """None if the journal has nothing of this run. Its torn last line must be gone already.
    WrongInput if it is not as this run's controllers write it.

    record: the file of the engine's steps.
    """
    try:
        return _read_past(directory, run_id, limits, record)
    except OSError:
        raise
    except Exception as error:  # a decision takes the types of its event's fields for granted
        what = f"cannot be gone on from: {in_words(error)}"
        raise WrongInput(f"{directory / 'journal.jsonl'} {what}") from error


def _read_past(directory: Path, run_id: str, limits: Limits, record: str) -> DecisionLog | None:
    tail: list[dict[str, Any]] = []
    for _, raw in lines_backwards(directory / "journal.jsonl"):
        tail.append(json.loads(raw))
        if "run" in tail[-1]:
            break
    if not tail or tail[-1].get("run") != run_id:
        return None
    head, lines = tail[-1], tail[-2::-1]
    entry = decode(head["entry"], TYPES)
    so_far: Account = decode(head["account"], TYPES)
    if isinstance(entry, Started):
        decision = start(limits, entry.at, entry.earlier_generations)
        so_far = open_account(entry.at)
    else:
        decision = Decision(entry.ledger, entry.phase)
    entries = [decode(line["entry"], TYPES) for line in lines if "entry" in line]
    for entry in entries:
        before = decision
        decision = transition(before.ledger, before.phase, entry.event, limits)
        so_far = account(so_far, entry.event, before, decision)
    lost_steps = head["lost_steps"] + sum(line.get("rolled_back", 0) for line in lines)
    metrics: dict[str, Any] = {}
    for _, raw in lines_backwards(directory / record):
        metrics = json.loads(raw)
        break
    said = [line["evaluation"] for line in lines if "evaluation" in line]
    last_evaluation = (said[-1]["step"], said[-1]["ordinal"]) if said else (-1, 0)
    planned, level = _said_last(head, lines, "planned"), _said_last(head, lines, "level")
    return DecisionLog(
        decision=decision,
        account=so_far,
        lost_steps=lost_steps,
        last_metrics=metrics,
        last_evaluation=last_evaluation,
        planned=planned,
        level=level,
    )


def _said_last(head: dict[str, Any], lines: list[dict[str, Any]], key: str) -> Any:
    """head: the landmark, which tells what was said last before it. None if nothing was."""
    said = [head.get(f"{key}_last"), *(line.get(key) for line in lines)]
    return next((decode(told, TYPES) for told in reversed(said) if told is not None), None)
