"""What a backend raises: of its connections, or of the call itself."""

import pytest
import torch

from elastic.protocol.errors import CollectiveRefused, NoAnswer, OutOfDeviceMemory, PeerLost
from tests.workers.ranks import Ranks, run_ranks
from workers.distributed.nccl import kind_of
from workers.distributed.pending import failure_of
from workers.membership.events import PeersLost

CUDA_CALL = "NCCL error in: x.cpp:80\nncclUnhandledCudaError: Call to CUDA function failed.\nLast "


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("pair.cc:612] Application timeout caused pair closure", PeerLost),
        ("unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation", PeerLost),
        ("NCCL error ... ncclRemoteError: A call failed possibly due to a network error", PeerLost),
        ("NCCL error ... ncclSystemError: System call (e.g. socket, malloc) failed", PeerLost),
        ("NCCL error ... ncclInvalidUsage: This usually reflects invalid usage", CollectiveRefused),
        ("NCCL error ... ncclInvalidArgument: Invalid value for an argument", CollectiveRefused),
        ("NCCL error ... ncclInternalError: Internal check failed.", PeerLost),
        (f"{CUDA_CALL}error:\nCuda failure 'unhandled cuda error'", PeerLost),
        (f"{CUDA_CALL}error:\nCuda failure 2 'out of memory'", OutOfDeviceMemory),
        (f"{CUDA_CALL}error:\nFailed to CUDA calloc async 40 bytes", OutOfDeviceMemory),
    ],
)
def test_a_failure_is_of_the_connections_unless_it_names_a_wrong_call(said: str, kind: type):
    assert type(kind_of(failure_of(RuntimeError(said)))) is kind


@pytest.mark.parametrize(
    ("last_words", "host"),
    [
        (
            "NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0, len 0, "
            "vendor err 129 (Recv)",
            "10.2.0.5",
        ),
        (
            "NET/IB: Got completion from peer fd00::5<33092> with status=12 opcode=129 len=0 "
            "vendor err 129 (Recv) localGid ::ffff:10.6.0.35 remoteGids::ffff:10.5.0.34",
            "fd00::5",
        ),
        ("NET/IB : Got completion from peer 10.5.0.34<33956> with error 5, opcode 0", ""),
        ("socketProgress: Connection closed by remote peer host-b<41232>", ""),
    ],
)
def test_a_host_that_the_card_sends_to_in_vain_is_named_and_one_that_hangs_up_is_not(
    last_words: str, host: str
):
    said = f"NCCL error: remote process exited\nncclRemoteError: A call\nLast error:\n{last_words}"
    lost = kind_of(PeerLost(said))
    assert (lost.host if isinstance(lost, NoAnswer) else "") == host
    assert PeersLost.of(lost).unanswered == host


def test_an_error_of_this_device_is_none_of_the_group():
    with pytest.raises(torch.AcceleratorError):
        failure_of(torch.AcceleratorError("uncorrectable ECC error encountered"))


LIMIT_S = 1.0
"""The backend's own, for one collective of the second generation."""


def failures(ranks: Ranks) -> list[str]:
    """Of a wrong call, and of one for which a peer is late: it comes when the other has failed."""
    group = ranks.form(1, [0, 1])
    group.all_reduce(torch.ones(4)).wait()
    kinds: list[str] = []
    try:
        group.all_gather_flat(torch.ones(7), torch.ones(3)).wait()
    except PeerLost as error:
        kinds.append(type(error).__name__)
    group = ranks.form(2, [0, 1], operation_timeout_s=LIMIT_S)
    if ranks.index == 1:
        ranks.meet([0])
    try:
        group.all_reduce(torch.ones(4)).wait()
    except PeerLost as error:
        kinds.append(type(error).__name__)
    ranks.meet([])  # for the other one
    return kinds


def test_gloo_refuses_a_wrong_call_and_loses_a_peer_that_is_too_late():
    assert run_ranks(2, failures) == [["CollectiveRefused", "PeerLost"]] * 2
