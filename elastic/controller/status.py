"""The content of status.json and result.json, from what the controller knows.

What the fields mean is in docs/running.md; who writes the files, and when, is in supervisor.py.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from elastic.control.accounting import Account
from elastic.control.state import Active, Decision, Finished, Waiting
from elastic.on_ray.slots import Slot
from elastic.protocol.membership import worker_name
from elastic.protocol.messages.to_controller import Planned, ScriptLevel, Stage
from elastic.store.claim import this_machine

RECOVERIES_SHOWN = 3
"""The last ones, for whoever watches."""


def status_of(
    decision: Decision,
    slots: Mapping[int, Slot],
    *,
    steps: int,
    committed_checkpoint: int | None,
    node_ip: str,
    reason: str,
    wanted: tuple[int, int],
    account: Account,
    lost_steps: int,
    planned: Planned | None = None,
    level: ScriptLevel | None = None,
) -> dict[str, Any]:
    """slots: the run's workers by number. node_ip: the controller's. wanted: from how many workers
    to how many. lost_steps: of this start of the run. planned, level: said last; level is a
    script's only."""
    phase, ledger = decision.phase, decision.ledger
    members = phase.membership.workers if isinstance(phase, Active) else ()
    ranks = {worker: rank for rank, worker in enumerate(members)}
    if planned is None or planned.generation != ledger.generation or not members:
        planned = None
    rows: list[dict[str, Any]] = [
        {
            "id": worker_name(w),
            "rank": ranks.get(w),
            "node_id": r.node_id or None,
            "node_ip": r.node_ip or None,
            "pid": r.pid or None,
            "device": r.device or None,
            "state": r.shown_state,
            "step": max(r.step, ledger.step) if w in ranks else r.step,
            "own_s": r.own_s,
            **_stage_of(planned, ranks.get(w)),
        }
        for w, r in sorted(slots.items())
    ]
    is_starting = isinstance(phase, Waiting) and ledger.num_generations == 0
    return {
        "phase": "starting" if is_starting else type(phase).__name__.lower(),
        "generation": ledger.generation,
        "world_size": len(members),
        "wanted": list(wanted),
        "layout": planned.layout if planned else "",
        "step": ledger.step,
        "steps": steps,
        "committed_checkpoint": committed_checkpoint,
        "workers": sorted((r for r in rows if r["rank"] is not None), key=lambda r: r["rank"]),
        "standby": [r for r in rows if r["rank"] is None],
        "controller": {"pid": os.getpid(), "node_ip": node_ip, "machine": this_machine()},
        "reason": reason,
        "account": {
            "goodput": account.goodput,
            "idle": idle_of(account),
            "num_recoveries": len(account.recoveries),
            "lost_steps": lost_steps,
            "recoveries": [asdict(r) for r in account.recoveries[-RECOVERIES_SHOWN:]],
        },
        **_level_of(level),
    }


def idle_of(account: Account) -> float:
    """The part of the wall time that members waited for each other in steps."""
    return account.badput_s.get("idle", 0.0) / account.wall_s if account.wall_s > 0 else 0.0


def _stage_of(planned: Planned | None, rank: int | None) -> dict[str, Any]:
    """Of a worker, where the members make pipelines."""
    if planned is None:
        return {}
    stage = None if rank is None else planned.stages[rank]
    if stage is None:
        return {"mesh": None, "blocks": None}
    return {"mesh": {"dp": stage.pipeline, "pp": stage.stage}, "blocks": list(stage.blocks)}


def stages_of(planned: Planned | None, decision: Decision | None) -> tuple[Stage | None, ...]:
    """Of the members, by rank, as they have said; empty if their generation has not."""
    phase = None if decision is None else decision.phase
    if planned is None or not isinstance(phase, Active):
        return ()
    return planned.stages if planned.generation == phase.membership.generation else ()


def stage_text(planned: Planned | None, decision: Decision | None, worker: int) -> str:
    """A member's place in a pipeline, to be added to why it is lost; empty if it has none."""
    stages = stages_of(planned, decision)
    phase = None if decision is None else decision.phase
    if not stages or not isinstance(phase, Active) or worker not in phase.membership.workers:
        return ""
    stage = stages[phase.membership.workers.index(worker)]
    if stage is None:
        return ""
    pairs = zip(stage.blocks[::2], stage.blocks[1::2], strict=True)
    blocks = " and ".join(f"{first} to {end - 1}" for first, end in pairs)
    return f"; it has stage {stage.stage} of pipeline {stage.pipeline}, blocks {blocks}"


def _level_of(level: ScriptLevel | None) -> dict[str, Any]:
    """Of a script's run."""
    return {} if level is None else {"level": level.level, "level_reason": level.reason}


def meters_of(
    status: Mapping[str, Any], metrics: Mapping[str, Any], account: Account, lost_steps: int
) -> dict[str, float | int | None]:
    """For Prometheus: a number per name. metrics: of the last committed step, if there is one."""
    recoveries = account.recoveries
    return {
        "step": status["step"],
        "steps": status["steps"],
        "loss": metrics.get("loss"),
        "learning_rate": metrics.get("learning_rate"),
        "gradient_norm": metrics.get("gradient_norm"),
        "step_seconds": metrics.get("step_s"),
        "samples": metrics.get("samples"),
        "world_size": status["world_size"],
        "wanted_workers": status["wanted"][1],
        "generation": status["generation"],
        "recoveries": len(recoveries),
        "lost_steps": lost_steps,
        "last_recovery_seconds": recoveries[-1].total_s if recoveries else None,
        "goodput": account.goodput,
        "idle": idle_of(account),
        "checkpoint_step": status["committed_checkpoint"],
    }


def result_of(
    finished: Finished,
    decision: Decision,
    account: Account,
    loss: Any,
    lost_steps: int,
    level: ScriptLevel | None,
) -> dict[str, Any]:
    """loss: of the last step on record. level: of a script's run, as it was said last."""
    return {
        "outcome": finished.outcome,
        "steps": decision.ledger.step,
        "loss": loss,
        "weights_sha256": finished.weights_sha256 if level is None else level.weights_sha256,
        "generations": decision.ledger.num_generations,
        "lost_steps": lost_steps,
        "goodput": account.goodput,
        "badput": account.badput_s,
        "recoveries": [asdict(r) for r in account.recoveries],
        **_level_of(level),
    }


def what_is_lost(step: int, checkpoint: int) -> str:
    """By a run that ends at once after `step` committed steps, as the end of a sentence."""
    if step <= checkpoint:
        return ""
    first = checkpoint + 1
    steps = f"step {step} is" if first == step else f"steps {first} to {step} are"
    return f"; {steps} in no checkpoint and will be done again"
