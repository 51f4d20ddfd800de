"""A member that is told to give a generation up while it forms."""

import time

import pytest
import torch

from tests.workers.session_rig import Rig
from workers.distributed.rendezvous import Rendezvous


@pytest.fixture
def rig():
    torch.set_num_threads(1)
    made = Rig("bitwise", join_timeout_s=60.0)
    yield made
    made.loader.close()


class Aborting(dict):
    """A Form command that is taken back in the instant in which the member begins to form."""

    rig: Rig

    def __getitem__(self, key):
        if key == "store":
            self.rig.member.interrupt({"type": "abort", "generation": self["generation"]})
        return super().__getitem__(key)


def test_an_abort_in_the_instant_a_formation_begins_ends_it(rig):
    rendezvous = Rendezvous("127.0.0.1")
    form = Aborting(
        {
            "type": "form", "generation": 1, "rank": 0, "world_size": 2, "step": 0,
            "store": rendezvous.open(1), "then_pause": False, "recorded_step": 0,
            "evaluation": None, "vote": None,
        }
    )  # fmt: skip
    form.rig = rig
    began = time.monotonic()
    assert not rig.member._obey(form, b"")
    assert time.monotonic() - began < rig.spec.join_timeout_s / 2
    rig.member._obey({"type": "abort", "generation": 1}, b"")
    assert [kind for kind, _, _ in rig.link.sent] == ["suspended"]
    rendezvous.forget()
