"""A generation's process group over a backend that the test answers for."""

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elastic.protocol.errors import PeerLost
from workers.distributed.nccl import NcclGroup, formed
from workers.distributed.process_group import GroupSpec

CPU = torch.device("cpu")
ONE = torch.zeros(1)


class Works:
    """A backend whose operations end when they are told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_ended = 0
        self.num_launched = 0
        self.failed: int | None = None

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.num_launched += 1
        return Work(self, self.num_launched)

    def abort(self) -> None:
        return


class Work:
    def __init__(self, backend: Works, number: int) -> None:
        self._backend, self._number = backend, number

    def is_completed(self) -> bool:
        self._backend.num_asked += 1
        return self._number <= self._backend.num_ended

    def wait(self) -> None:
        assert self._number <= self._backend.num_ended, "it would block the host"
        if self._number == self._backend.failed:
            raise RuntimeError("ncclRemoteError")


def test_a_launch_asks_for_the_oldest_operation_in_flight_only() -> None:
    backend = Works()
    group = NcclGroup(cast(Any, backend), 0, 2)
    for _ in range(100):
        group.all_reduce(torch.zeros(1))
    assert backend.num_asked == 99, "each launch but the first asked once"
    backend.num_ended = 60
    group.all_reduce(torch.zeros(1))
    assert backend.num_asked == 99 + 61
    assert not group.is_settled
    backend.num_ended = 101
    assert group.is_settled


@pytest.mark.parametrize("asks", [NcclGroup.device_waits_in, lambda g: g.all_reduce(ONE)])
def test_a_peer_whose_loss_nccl_notices_first_is_lost(asks: Any) -> None:
    backend = Works()
    group = NcclGroup(cast(Any, backend), 0, 2)
    for _ in range(3):
        group.all_reduce(ONE)
    backend.num_ended, backend.failed = 3, 2
    with pytest.raises(PeerLost, match="ncclRemoteError"):
        asks(group)


class SlowAbort(Works):
    """Its abort ends when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def abort(self) -> None:
        assert self.may_end.wait(60.0)


def test_who_abandons_does_not_wait_for_the_device_and_the_group_is_kept_meanwhile() -> None:
    backend = SlowAbort()
    group = NcclGroup(cast(Any, backend), 0, 2)
    group.abandon()
    group.abandon()
    with pytest.raises(PeerLost):
        group.all_reduce(torch.zeros(1))
    assert not group.is_settled
    backend.may_end.set()
    assert group._aborting is not None
    group._aborting.join(60.0)
    assert group.is_settled


def test_an_abort_that_hangs_is_told_of_in_time() -> None:
    told: queue.Queue[str] = queue.Queue()
    backend = SlowAbort()
    group = NcclGroup(cast(Any, backend), 0, 2)
    group.abort_s, group.on_stuck = 0.05, told.put
    group.abandon()
    assert "NCCL's abort of group unnamed hangs" in told.get(timeout=60.0)
    backend.may_end.set()


class InTime(Works):
    """Its members are here by and by: a launch waits for them, and an abort for the launch."""

    def __init__(self) -> None:
        super().__init__()
        self.is_connected, self.is_aborted = threading.Event(), threading.Event()

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        if not self.is_connected.wait(60.0):
            raise RuntimeError("NCCL timeout")
        return SimpleNamespace(block_current_stream=lambda: None)

    def abort(self) -> None:
        self.is_connected.wait(60.0)
        self.is_aborted.set()


def spec_of(given_up: threading.Event) -> GroupSpec:
    return GroupSpec(cast(Any, None), "r/1", 1, 2, 7.0, 60.0, given_up)


def test_a_group_is_formed_once_its_communicator_has_connected() -> None:
    backend = InTime()
    threading.Timer(0.1, backend.is_connected.set).start()
    group = formed(backend, CPU, spec_of(threading.Event()))
    assert backend.is_connected.is_set()
    assert (group.rank(), group.name_of_group, group.abort_s) == (1, "r/1", 7.0)
    assert not backend.is_aborted.is_set()


def test_who_gives_up_forming_does_not_wait_and_the_communicator_is_aborted_later() -> None:
    backend, given_up = InTime(), threading.Event()
    threading.Timer(0.1, given_up.set).start()
    with pytest.raises(PeerLost, match="given up"):
        formed(backend, CPU, spec_of(given_up))
    assert not backend.is_aborted.is_set()
    backend.is_connected.set()
    assert backend.is_aborted.wait(60.0)


def test_a_communicator_that_cannot_connect_is_aborted_and_its_error_is_told() -> None:
    backend = InTime()
    backend.allreduce = cast(Any, refuse)
    backend.is_connected.set()
    with pytest.raises(RuntimeError, match="remote process exited"):
        formed(backend, CPU, spec_of(threading.Event()))
    assert backend.is_aborted.is_set()


def refuse(*_: Any) -> None:
    raise RuntimeError("remote process exited")
