"""A worker without memory for its state, or for a copy of it that it makes for others."""

import socket
from types import SimpleNamespace

import pytest
import torch

from elastic.protocol.messages import peer
from elastic.protocol.messages.to_worker import Load
from elastic.protocol.step_record import KnownSteps
from tests.workers.places import Place
from tests.workers.session_rig import Rig, Tiny, obey
from tests.workers.sharded_rig import spec
from tests.workers.test_rolled_back import form
from workers.backup.client import BackupClient
from workers.membership.state_stream import Follower, Start
from workers.parallel.shards import Ownership
from workers.train_state.out_of_memory import OutOfMemory
from workers.train_state.snapshot import Snapshot

DEADLINE_S = 120.0
LARGE = {"w": torch.empty(2**46, device="meta")}
"""256 TiB, which no host has."""


def test_a_shard_that_no_memory_is_left_for_loses_its_worker_and_not_the_run():
    backup_client = BackupClient(spec("fsdp"), lambda kind, **fields: None)
    train_state = SimpleNamespace(
        step=0,
        snapshot=lambda select, memory: Snapshot({}, select(LARGE), memory),
    )
    backup_client.begin(train_state, 1, Place(1))
    with pytest.raises(OutOfMemory, match="out of memory while it copied its shard"):
        backup_client.wait(lambda: False)


@pytest.mark.parametrize("what", ["snapshot", "update"])
def test_a_newcomer_whose_source_has_no_memory_for_its_copy_is_let_go(what):
    ours, theirs = socket.socketpair()
    follower = Follower(ours, worker=3)
    if what == "snapshot":
        follower.begin(Start(Snapshot({}, LARGE), KnownSteps((), None)))
    else:
        follower.offer(peer.Update(1, True, 1.0, 1, (), KnownSteps((), None)), LARGE)
    theirs.settimeout(DEADLINE_S)
    while theirs.recv(2**16):
        pass
    assert follower.is_lost


class Greedy(Tiny):
    """Its weights need more memory than there is, when they are made."""

    def init_weights(self, module, name):
        torch.empty(2**46)


def test_a_state_that_cannot_be_loaded_for_want_of_memory_loses_its_worker_alone():
    rig = Rig("bitwise")
    rig.member._on_load = lambda place, step: torch.empty(2**46)
    with pytest.raises(OutOfMemory, match=r"while it loaded the state: .*can't allocate memory"):
        obey(rig.member, Load("", 0))
    assert rig.link.sent == []
    rig.loader.close()


def test_a_shard_that_cannot_be_taken_on_for_want_of_memory_loses_its_worker_alone():
    rig = Rig("bitwise", Greedy(), parallel="fsdp")
    rig.strategy.shards.holding = Ownership("initial")
    with pytest.raises(OutOfMemory, match=r"it got its part of the state: .*can't allocate memory"):
        obey(rig.member, form(1, 0))
    assert [kind for kind, _, _ in rig.link.sent] == ["connected"]
    rig.loader.close()
