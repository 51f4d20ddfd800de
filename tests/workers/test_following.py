"""A newcomer that follows a source, and what it can say when the source is lost."""

import time

import pytest
import torch

from tests.workers.session_rig import Rig
from workers.digest import weights_sha256


@pytest.fixture
def pair():
    """A source with one committed step, and who follows it."""
    torch.set_num_threads(1)
    source, newcomer = Rig("bitwise"), Rig("bitwise")
    source.form(generation=1, step=0)
    assert source.step().committed
    sync = {"type": "sync", "address": list(source.member.peers.address)}
    newcomer.member._obey(sync, b"")
    deadline = time.monotonic() + 30
    while not newcomer.link.of("synced"):
        assert time.monotonic() < deadline
        source.member._take_on_newcomers()
        newcomer.member._copying.apply_received()
        time.sleep(0.001)  # polling, bounded by the deadline
    yield source, newcomer
    for rig in (source, newcomer):
        rig.loader.close()


def lines_of(rig) -> list[dict]:
    return [line for fields, _ in rig.link.of("committed") for line in fields["steps"]]


def test_a_follower_says_the_steps_that_its_source_could_not(pair):
    """Copied with the state: step 1, which is on record, and 2, 3, which the source's last breath
    has not put there. Without them no later step would ever go on record."""
    source, newcomer = pair
    assert source.step().committed
    assert source.step().committed
    newcomer.form(generation=2, step=3, recorded_step=1)
    assert newcomer.step().committed
    *repeated, last = newcomer.link.of("committed")
    assert [line["metrics"]["step"] for line in repeated[0][0]["steps"]] == [2, 3]
    assert repeated[0][0]["steps"] == lines_of(source)[1:]
    assert repeated[0][1] == source.link.of("committed")[-1][1], "the newest vote"
    assert last[0]["steps"][-1]["metrics"]["step"] == 4
    assert source.step().committed
    assert weights_sha256(source.replica.model) == weights_sha256(newcomer.replica.model)


def test_a_follower_whose_source_is_lost_goes_on_from_its_own_state(pair):
    source, newcomer = pair
    assert source.step().committed
    newcomer.member._copying.catch_up(2, lambda: False)
    load = {"type": "load", "place": "", "recorded_step": 1}
    newcomer.member._obey(load, b"")
    (said,) = newcomer.link.of("committed")
    assert [line["metrics"]["step"] for line in said[0]["steps"]] == [2]
    assert newcomer.link.sent[-1][0:2] == ("loaded", {"step": 2, "damaged": []})


def test_what_is_on_record_is_not_kept(pair):
    source, newcomer = pair
    newcomer.link.recorded_step = 2
    for _ in range(3):
        assert source.step().committed
    newcomer.member._copying.catch_up(4, lambda: False)
    assert newcomer.member.records.known_from(2) == 4
    assert len(newcomer.member.records.to_frame()["steps"]) == 2
