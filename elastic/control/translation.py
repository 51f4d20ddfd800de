"""Between messages and decisions: what a worker reports is an event, and what interrupts a
generation is told to each of its members.

The events are in events.py, the commands in commands.py; messages are elastic/protocol's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from elastic.control import commands as c
from elastic.control import events as e
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages import to_worker as t

Eventful: TypeAlias = (
    r.Synced
    | r.SyncFailed
    | r.DrainNotice
    | r.Connected
    | r.Joined
    | r.Paused
    | r.Kept
    | r.Suspended
    | r.CollectiveFailed
    | r.Done
    | r.Ended
    | r.PartSaved
    | r.PartFailed
    | r.StillSaving
)


def event_of(worker: int, report: Eventful, at: float) -> e.Event:  # noqa: C901
    """What a worker has reported, as the decisions take it."""
    match report:
        case r.Synced():
            return e.Synced(worker, at)
        case r.SyncFailed(reason):
            return e.SyncFailed(worker, reason, at)
        case r.DrainNotice(cause, notice_s):
            return e.DrainNotice(worker, cause, at + notice_s, at)
        case r.Connected(generation, rank):
            return e.Connected(generation, rank, at)
        case r.Joined(generation, rank, state_s, step):
            return e.Joined(generation, rank, state_s, at, step)
        case r.Paused(generation, rank, step, origin):
            return e.Paused(generation, rank, step, at, origin)
        case r.Kept(generation, rank):
            return e.Kept(generation, rank, at)
        case r.Suspended() as said:
            return e.Suspended(
                generation=said.generation,
                rank=said.rank,
                step=said.step,
                is_prepared=said.prepared_by > 0,
                is_between_steps=said.is_between_steps,
                at=at,
                origin=said.origin,
                prepared_by=said.prepared_by,
                is_copied=said.is_copied,
                has_vote=said.vote is not None,
            )
        case r.CollectiveFailed(generation, rank, message, is_refused, is_explained, too_few):
            return e.CollectiveFailed(
                generation, rank, message, at, is_explained, is_refused, too_few=too_few
            )
        case r.Done(generation, rank, step, origin):
            return e.Done(generation, rank, step, at, origin)
        case r.Ended(generation, rank, weights_sha256):
            return e.Ended(generation, rank, weights_sha256, at)
        case r.PartSaved(generation, rank, step):
            return e.PartSaved(generation, rank, step, at)
        case r.PartFailed(generation, rank, step, message):
            return e.PartFailed(generation, rank, step, message, at)
        case r.StillSaving(generation, rank):
            return e.StillSaving(generation, rank, at)


def copying(
    command: c.Sync,
    addresses: Mapping[int, tuple[str, int] | None],
    nodes: Mapping[int, str],
    stages: tuple[r.Stage | None, ...],
) -> t.Sync:
    """addresses, nodes: of each worker that is there, where it may be followed, and its node.
    stages: of the members, by rank, if they have said them."""
    ranks = {worker: rank for rank, worker in enumerate(command.members)}
    told = t.Sync(source=command.source, address=addresses.get(command.source))
    if not command.members:
        return told
    return replace(
        told,
        members=tuple(addresses.get(worker) for worker in command.members),
        stages=stages,
        rank=command.next_members.index(command.worker),
        next_ranks=tuple(ranks.get(worker, -1) for worker in command.next_members),
        next_nodes=tuple(nodes.get(worker, "") for worker in command.next_members),
        next_order=command.next_order,
    )


def interruption(
    command: c.Pause | c.Checkpoint | c.Keep | c.Abort | c.Recall, rank: int, *, is_unheard: bool
) -> t.OfGeneration:
    """What `rank` is told. is_unheard: members may not have heard of the generation yet; to them
    an Abort would mean nothing."""
    generation, world_size = command.membership.generation, command.membership.world_size
    match command:
        case c.Pause():
            return t.Pause(generation, rank, world_size)
        case c.Keep():
            return t.Keep(generation, rank, world_size)
        case c.Checkpoint(step=step):
            return t.Checkpoint(generation, rank, world_size, step)
        case c.Abort() if not is_unheard:
            return t.Abort(generation, rank, world_size)
        case c.Abort() | c.Recall():
            return t.Recall(generation, rank, world_size)
