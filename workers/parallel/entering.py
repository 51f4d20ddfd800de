"""A sharded member at the beginning of a generation: it gets its rows, and they are copied to a
holder from then on.

Which rows those are is sharded.py's and resharding/assemble.py's, what a member does else is
member.py's.
"""

from functools import partial
from typing import TYPE_CHECKING

from elastic.protocol.errors import DamagedCheckpoint, PeerLost
from elastic.protocol.messages.to_controller import Connected, SyncFailed
from elastic.protocol.messages.to_worker import Form
from workers.distributed.exchange import gather_json
from workers.distributed.pieces import Pieces
from workers.parallel.shards import RowsLost

if TYPE_CHECKING:
    from workers.membership.member import Member

ROUND_OF_JOINING = 0.5
"""Ranks that are apart meet after this part of what a generation has for forming."""


def pieces_of(member: "Member") -> Pieces:
    """Of the generation that a group has formed for."""
    assert member.group is not None
    say_alive = partial(member.vitals.enter, "restore")
    round_s = member.spec.join_timeout_s * ROUND_OF_JOINING
    return Pieces(member.group, member.device, say_alive, round_s)


def enter_shard(member: "Member", form: Form, pieces: Pieces) -> bool:
    """Obey a Form command that a group has formed for. False if that failed.

    The state may be of an earlier step than the command's: the newest that is whole.
    """
    train_state, group = member.train_state, member.group
    sharded = train_state.sharded
    assert sharded is not None
    assert group is not None
    member.hear_holders(form.holders)
    connected = Connected(member.generation, member.rank)
    try:
        sharded.enter(
            group,
            form.step,
            member.saver.catalogue,
            member.collective_failed,
            member.vitals.gathering,
            pieces=pieces,
            on_connected=lambda: member.link.send(connected),
            generation=member.generation,
            known_step=member.records.known_step,
        )
        frame = member.records.to_frame() if group.rank() == 0 else None
        member.records.learn(gather_json(group, frame, member.device)[0])
    except (RowsLost, DamagedCheckpoint) as error:  # the run goes back to a checkpoint
        sharded.forget()
        member.link.send(SyncFailed(str(error)))
        return False
    except PeerLost as error:
        member.collective_failed(error)
        return False
    member.records.go_back(train_state.step)
    member.link.go_back(member.generation, train_state.step)
    member.prepared = None
    member.vitals.step = train_state.step
    if sharded.backup_client is not None:
        origin, is_held = sharded.holding.origin, sharded.is_held
        sharded.backup_client.begin(train_state, origin, member, is_held=is_held)
    return True
