"""A member that is told to give a generation up while it forms."""

import time

import pytest
import torch

from tests.workers.session_rig import Rig, abort, form, obey
from workers.distributed import process_group
from workers.distributed.rendezvous import Rendezvous


@pytest.fixture
def rig():
    torch.set_num_threads(1)
    made = Rig("bitwise", join_timeout_s=60.0)
    yield made
    made.loader.close()


def test_an_abort_in_the_instant_a_formation_begins_ends_it(rig, monkeypatch):
    rendezvous, form_for = Rendezvous("127.0.0.1"), process_group.form_for

    def taken_back(*asked):
        rig.member.hear(abort(1))
        return form_for(*asked)

    monkeypatch.setattr(process_group, "form_for", taken_back)
    began = time.monotonic()
    assert not obey(rig.member, form(1, 0, world_size=2, store=rendezvous.open(1)))
    assert time.monotonic() - began < rig.spec.join_timeout_s / 2
    obey(rig.member, abort(1))
    assert [kind for kind, _, _ in rig.link.sent] == ["suspended"]
    rendezvous.forget()
