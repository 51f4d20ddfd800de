"""A member that is told to give a generation up while it forms."""

import time

import pytest
import torch
from torch.distributed import TCPStore

from tests.workers.session_rig import Rig


@pytest.fixture
def rig():
    torch.set_num_threads(1)
    made = Rig("bitwise")
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
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    form = Aborting(
        {
            "type": "form", "generation": 1, "rank": 0, "world_size": 2, "step": 0,
            "store": ["127.0.0.1", store.port], "then_pause": False, "recorded_step": 0,
            "evaluation": None, "vote": None,
        }
    )  # fmt: skip
    form.rig = rig
    began = time.monotonic()
    assert not rig.member._obey(form, b"")
    assert time.monotonic() - began < rig.spec.join_timeout_s / 2
    rig.member._obey({"type": "abort", "generation": 1}, b"")
    assert [kind for kind, _, _ in rig.link.sent] == ["suspended"]
