"""A step's vote as one rank casts it: what goes into it, and what is done with what comes out.

The vector itself is vote.py's; what a step is, is session.py's.
"""

import time
from dataclasses import replace

import numpy as np
import torch

from elastic.protocol.errors import PeerLost, StepCancelled
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.exchange import gather_json
from workers.health.nonfinite import Inspection, explain, told_of_no_weight
from workers.health.verify import verify
from workers.membership.member import Member
from workers.reduction.reducers import Reduced
from workers.step.microbatches import names_in
from workers.step.vote import MicrobatchRecord, Prepared, Vote, VoteLayout, decode, encode


class Repeated(StepCancelled):
    """The step is done again by all ranks alike, without regrouping."""


def cast(
    member: Member,
    spec: WorkerSpec,
    reduced: Reduced,
    records: list[MicrobatchRecord],
    used: list[bool],
    began: float,
    inspection: Inspection,
) -> tuple[Prepared, Vote, np.ndarray]:
    """Vote and learn what all have agreed on. A collective.

    began: of this attempt (perf_counter). Raises PeerLost; Repeated, which all ranks do.
    """
    train_state, group = member.train_state, member.group
    assert group is not None
    if spec.verify_every is not None:
        verify(member, spec.verify_every)
    is_finite = reduced.is_finite()
    untracked = train_state.buffers.untracked_changes()
    while True:
        layout = VoteLayout(
            num_microbatches=spec.num_microbatches,
            micro_batch=spec.micro_batch,
            num_parameters=len(used),
            num_buffers=len(untracked),
            integer_buffers=train_state.buffers.integer_names,
            log_names=train_state.log_names,
        )
        vector = encode(
            layout,
            records,
            used=used,
            untracked=untracked,
            wants_pause=member.wants_pause,
            is_saving=member.saver.is_busy,
            wants_save=member.wants_save,
            is_finite=is_finite,
        )
        step_s = time.perf_counter() - began
        prepared = Prepared(reduced, layout, step_s, member.generation, member.world_size)
        member.prepared = prepared
        summed = torch.from_numpy(vector).to(member.device)
        group.all_reduce(summed).wait()
        vector = summed.cpu().numpy()
        if group.is_abandoned:  # an aborted NCCL kernel leaves garbage and no error
            raise PeerLost("the generation was given up")
        vote = decode(layout, vector)
        if vote.untracked_buffers:  # all ranks see it: repeat the step with them
            member.prepared = None
            train_state.buffers.track(train_state.buffers.names[i] for i in vote.untracked_buffers)
            raise Repeated
        if not vote.has_unknown_names:
            break
        names = gather_json(group, names_in(records), member.device)
        found = {n for of_rank in names for n in of_rank}
        train_state.log_names = tuple(sorted(found | set(train_state.log_names)))
    if not vote.is_finite and train_state.skipped_in_a_row >= train_state.max_nonfinite:
        member.prepared = None  # the run stops with this step: nobody rolls forward to it
        if vote.divisor == 0:
            train_state.first_nonfinite = told_of_no_weight(train_state.step + 1)
        elif not inspection.is_on:
            inspection.ask(member.generation, train_state.step)
            raise Repeated
        else:
            train_state.first_nonfinite = explain(inspection, records, member)
    return replace(prepared, step_s=time.perf_counter() - began), vote, vector
