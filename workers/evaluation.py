"""`session.evaluate`: a map-style dataset shared among the ranks, folded in one order.

Batch ids and their values do not see the world size, so the result has the same bits for every
membership. A lost peer makes the survivors do it again; a survivor that missed the result of an
evaluation that another completed takes it from there.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from elastic.protocol.errors import PeerLost, StepCancelled
from elastic.protocol.messages.to_controller import Evaluation
from workers.data.placement import to_device
from workers.distributed.exchange import gather_json
from workers.membership.events import Loop
from workers.membership.member import Member
from workers.membership.unwinding import RolledBack
from workers.reduction.tree import fold_scalars
from workers.step.forwards import Elsewhere, Forwards
from workers.step.randomness import seed_microbatch

SCALAR = "value"
EVALUATION_SEED_SALT = 0x6576616C
"""Keeps the randomness of evaluation apart from that of training."""


def evaluate(member: Member, workload: Any, dataset: Any, fn: Any) -> Any:
    """See `Session.evaluate`."""
    step = member.train_state.step
    ordinal = member.evaluated.next_ordinal(step)
    member.move_loop(Loop.EVALUATION)
    member.vitals.enter("evaluate")
    try:
        while True:
            known = member.evaluated.known(step, ordinal)
            if known is not None:
                means, generation = known.values, known.generation
                break
            try:
                means = _evaluate_once(member, workload, dataset, fn)
                generation = member.generation
                break
            except (Exception, StepCancelled) as error:  # the latter of a sharded forward
                if not (isinstance(error, StepCancelled) or member.is_over_with(error)):
                    raise
                member.wait_for_generation()
                if member.train_state.step < step:
                    raise RolledBack from error
                member.vitals.enter("evaluate")
    finally:
        member.move_loop(Loop.OUTSIDE)
        member.vitals.enter("user")
    member.evaluated.add(Evaluation(step, ordinal, means, generation), member.rank)
    return means[SCALAR] if list(means) == [SCALAR] else means


def _evaluate_once(member: Member, workload: Any, dataset: Any, fn: Any) -> dict[str, float]:
    if member.is_cancelled:
        raise PeerLost("the generation was given up")
    assert member.group is not None
    num_batches = math.ceil(len(dataset) / member.spec.micro_batch)
    if num_batches == 0:
        raise ValueError("evaluate(): the dataset has no samples")
    forwards = member.strategy.forwards(member.mesh, member.group)
    rows = _evaluate_ids(member, workload, dataset, fn, forwards, num_batches)
    member.vitals.enter("vote")  # it waits for its peers
    gathered = gather_json(member.group, rows)
    return fold([row for of_rank in gathered for row in of_rank])


def _evaluate_ids(
    member: Member,
    workload: Any,
    dataset: Any,
    fn: Any,
    forwards: Forwards,
    num_batches: int,
) -> list[list[Any]]:
    """[batch id, {name: [sum, weight]}] of this rank's batches."""
    ids, echoes = forwards.ids(num_batches), [0] * forwards.num_echoes(num_batches)
    model, collate = member.train_state.model, getattr(workload, "collate", None)
    if collate is None:
        from torch.utils.data import default_collate as collate
    spec, modes = member.spec, {module: module.training for module in model.modules()}
    model.eval()
    rows: list[list[Any]] = []
    try:
        with torch.no_grad(), member.train_state.casting.applied():
            for i in (*ids, *echoes):
                if member.is_cancelled:
                    raise PeerLost("the generation was given up")
                at = range(i * spec.micro_batch, min((i + 1) * spec.micro_batch, len(dataset)))

                def forward(i: int = i, at: range = at) -> Any:
                    """Anew for each stage of this rank, whatever fn has done to the batch."""
                    seed_microbatch(spec.seed ^ EVALUATION_SEED_SALT, member.train_state.step, i)
                    batch = to_device(collate([dataset[k] for k in at]), member.device)
                    return fn(model, batch)

                value = forwards.run(i, forward)
                if not isinstance(value, Elsewhere) and len(rows) < len(ids):
                    rows.append([i, as_sums(value, len(at))])
            forwards.end()
    finally:
        for module, is_training in modes.items():
            module.training = is_training
        member.train_state.buffers.restore_all()
        member.strategy.reset()
    return rows


def as_sums(value: Any, num_samples: int) -> dict[str, tuple[float, float]]:
    """What fn returned, as name -> (sum, weight)."""
    if isinstance(value, Mapping):
        return {str(n): as_sums(v, num_samples)[SCALAR] for n, v in value.items()}
    if isinstance(value, tuple):
        total, weight = value
        return {SCALAR: (float(total), float(weight))}
    return {SCALAR: (float(value) * num_samples, float(num_samples))}


def fold(rows: list[list[Any]]) -> dict[str, float]:
    """Weighted means by name, through the canonical tree over batch ids."""
    table: dict[int, dict[str, list[float]]] = {int(i): values for i, values in rows}
    names = sorted({n for values in table.values() for n in values})
    means: dict[str, float] = {}
    for name in names:
        pairs = [table[i][name] for i in sorted(table) if name in table[i]]
        weight = fold_scalars([w for _, w in pairs])
        means[name] = fold_scalars([s for s, _ in pairs]) / weight if weight else math.nan
    return means
