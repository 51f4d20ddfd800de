"""A newcomer that follows a source, and what it can say when the source is lost."""

import errno
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch

from elastic.protocol import wire
from elastic.protocol.errors import PeerLost
from elastic.protocol.messages import peer
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.to_worker import Load, LogTo, Sync
from elastic.protocol.step_record import KnownSteps, StepRecord
from tests.workers.session_rig import Rig, form, obey
from tests.workers.waits import waits
from workers.train_state.digest import weights_sha256
from workers.train_state.out_of_memory import OutOfMemory, told_as_loss

pytestmark = pytest.mark.usefixtures("place")


def copy(source, newcomer) -> None:
    """The newcomer gets the source's state, and follows it."""
    num_before = len(newcomer.link.of("synced"))
    obey(newcomer.member, Sync(0, source.member.peers.address))
    deadline = time.monotonic() + 120
    while len(newcomer.link.of("synced")) == num_before:
        assert time.monotonic() < deadline
        source.member._take_on_newcomers()
        newcomer.member._copying.apply_received()
        time.sleep(0.001)  # polling, bounded by the deadline


@pytest.fixture
def pair():
    """A source with one committed step, and who follows it."""
    torch.set_num_threads(1)
    source, newcomer = Rig("bitwise"), Rig("bitwise")
    source.form(generation=1, step=0)
    assert source.step().committed
    copy(source, newcomer)
    yield source, newcomer
    for rig in (source, newcomer):
        rig.loader.close()


def steps_of(rig) -> list[StepRecord]:
    return [step for fields, _ in rig.link.of("committed") for step in fields["steps"]]


def without_its_seconds(step: StepRecord) -> StepRecord:
    """What a source tells of a step is under way before the step is over on it."""
    return replace(step, metrics=replace(step.metrics, step_s=0.0))


def test_a_follower_says_the_steps_that_its_source_could_not(pair):
    """Copied with the state: step 1, which is on record, and 2, 3, which the source's last breath
    has not put there. Without them no later step would ever go on record."""
    source, newcomer = pair
    assert source.step().committed
    assert source.step().committed
    newcomer.link.recorded_step = 1  # as the controller has said, whose storage has the line
    newcomer.form(generation=2, step=3, recorded_step=1)
    assert newcomer.step().committed
    *repeated, last = newcomer.link.of("committed")
    assert [step.step for step in repeated[0][0]["steps"]] == [2, 3]
    theirs = [without_its_seconds(step) for step in steps_of(source)[1:]]
    assert [without_its_seconds(step) for step in repeated[0][0]["steps"]] == theirs
    assert repeated[0][1] == source.link.of("committed")[-1][1], "the newest vote"
    assert last[0]["steps"][-1].step == 4
    assert source.step().committed
    assert weights_sha256(source.train_state.model) == weights_sha256(newcomer.train_state.model)


def test_a_follower_whose_source_is_lost_goes_on_from_its_own_state(pair):
    source, newcomer = pair
    assert source.step().committed
    newcomer.member._copying.catch_up(2, 1, lambda: False)
    load = Load("", 1)
    obey(newcomer.member, load)
    (said,) = newcomer.link.of("committed")
    assert [step.step for step in said[0]["steps"]] == [2]
    assert newcomer.link.sent[-1][0:2] == ("loaded", {"step": 2, "damaged": (), "origin": 1})


def test_a_follower_that_is_ahead_of_all_members_says_so_and_copies_again(pair):
    """Its source has died with a step that nobody else has: the others do that step once more."""
    source, newcomer = pair
    assert source.step().committed
    newcomer.member._copying.catch_up(2, 1, lambda: False)
    assert not obey(newcomer.member, form(2, 1))
    (failed,) = newcomer.link.of("sync_failed")
    assert failed[0]["generation"] == 2
    assert "stands at step 2 of generation 1 and cannot reach step 1" in failed[0]["reason"]
    assert newcomer.link.of("joined") == []
    other = Rig("bitwise")
    other.form(generation=1, step=0)
    assert other.step().committed
    copy(other, newcomer)
    assert newcomer.train_state.step == 1
    copied, kept = newcomer.train_state.model, other.train_state.model
    assert weights_sha256(copied) == weights_sha256(kept)
    other.loader.close()


def test_what_is_on_record_is_not_kept(pair):
    source, newcomer = pair
    newcomer.link.recorded_step = 2
    for _ in range(3):
        assert source.step().committed
    newcomer.member._copying.catch_up(4, 1, lambda: False)
    assert newcomer.member.records.known_from(2) == 4
    assert len(newcomer.member.records.known().steps) == 2


TCP_REPAIR = 19


def vanish(connection: socket.socket) -> None:
    """Its host says nothing any more, as if the link were cut."""
    try:
        connection.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except PermissionError:
        pytest.skip("closing a connection without a word needs root")
    connection.close()


def test_a_source_whose_link_is_cut_is_given_up(pair):
    source, newcomer = pair
    (follower,) = source.member.followers._all
    vanish(follower._connection)
    following = newcomer.member._copying._following
    following.arrived.clear()
    assert following.arrived.wait(60)
    newcomer.member._look_around()
    (failed,) = newcomer.link.of("sync_failed")
    assert "the source closed the connection" in failed[0]["reason"]


def test_a_generation_does_not_wait_for_an_update_that_was_lost_with_its_link(pair):
    """The newcomer counts as synced, and is told to catch up to a step that never comes."""
    source, newcomer = pair
    newcomer.member._copying._spec = replace(newcomer.spec, timeouts=waits(join_s=120.0))
    (follower,) = source.member.followers._all
    vanish(follower._connection)
    assert source.step().committed
    began = time.monotonic()
    with pytest.raises(PeerLost, match="cannot reach step 2"):
        newcomer.member._copying.catch_up(2, 1, lambda: False)
    assert time.monotonic() - began < 60, "it waited for the whole join timeout"


def offer_too_much(listener: socket.socket) -> None:
    """A source whose state is larger than any memory."""
    connection, _ = listener.accept()
    wire.receive(connection)
    connection.sendall(pack(peer.State({}, KnownSteps((), None), 0, (("w", "float32", (2**46,)),))))


def test_a_newcomer_without_memory_for_the_copy_leaves_alone_and_says_why():
    """As if it had been killed for it: no error of the user's, which would end the run."""
    newcomer, listener = Rig("bitwise"), socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=offer_too_much, args=(listener,), daemon=True).start()
    sync = Sync(0, listener.getsockname())
    newcomer.member.wake = lambda: None
    obey(newcomer.member, sync)
    assert newcomer.member._copying._following.arrived.wait(120)
    newcomer.link.commands.put(LogTo(""))
    with pytest.raises(OutOfMemory, match=r"it copied the state: .*can't allocate memory"):
        newcomer.member.wait_for_generation()
    assert newcomer.link.sent == []
    newcomer.loader.close()


@pytest.mark.parametrize(
    ("error", "is_shortage"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("the size of tensor a must match"), False),
    ],
)
def test_only_a_shortage_of_memory_is_a_loss(error, is_shortage):
    with pytest.raises(OutOfMemory if is_shortage else type(error)), told_as_loss("it slept"):
        raise error
