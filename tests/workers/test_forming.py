"""A member that is told to give a generation up while it forms."""

import threading
import time

import pytest
import torch

from elastic.protocol.errors import PeerLost
from tests.workers.session_rig import Rig, abort, form, obey
from workers.distributed import process_group
from workers.distributed.backends import connect_for
from workers.distributed.rendezvous import Rendezvous


@pytest.fixture
def rig():
    torch.set_num_threads(1)
    made = Rig("bitwise", join_s=60.0)
    yield made
    made.loader.close()


def test_an_abort_in_the_instant_a_formation_begins_ends_it(rig, monkeypatch):
    rendezvous, begin = Rendezvous("127.0.0.1"), process_group.form

    def taken_back(**asked):
        rig.member.hear(abort(1))
        return begin(**asked)

    monkeypatch.setattr(process_group, "form", taken_back)
    began = time.monotonic()
    assert not obey(rig.member, form(1, 0, world_size=2, store=rendezvous.open(1)))
    assert time.monotonic() - began < rig.spec.timeouts.join_s / 2
    obey(rig.member, abort(1))
    assert [kind for kind, _, _ in rig.link.sent] == ["suspended"]
    rendezvous.forget()


def test_a_formation_that_is_given_up_leaves_no_thread():
    """Its member has no peer, and the store knows nothing of one."""
    rendezvous, before = Rendezvous("127.0.0.1"), set(threading.enumerate())
    address = rendezvous.open(1)
    connect = connect_for(torch.device("cpu"), "127.0.0.1")
    formation = process_group.form(
        store_address=address, prefix="r/1", rank=0, world_size=2, connect=connect,
        join_timeout_s=60.0, operation_timeout_s=60.0,
    )  # fmt: skip
    threading.Timer(0.2, formation.abandon).start()
    with pytest.raises(PeerLost):
        formation.wait(60.0)
    forming = [t for t in set(threading.enumerate()) - before if t.name == "form"]
    for thread in forming:
        thread.join(1.0)
        assert not thread.is_alive()
    rendezvous.forget()


def raises(error):
    def connect(given_up):
        raise error

    return connect


def test_a_device_that_fails_in_forming_is_this_workers_loss_and_no_peers():
    fault = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    with pytest.raises(torch.AcceleratorError):
        process_group.Formation(raises(fault)).wait(60.0)
    with pytest.raises(PeerLost, match="forming failed: refused"):
        process_group.Formation(raises(RuntimeError("refused"))).wait(60.0)
