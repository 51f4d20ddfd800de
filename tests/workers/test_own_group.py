"""What is left of a group that a member has left."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elastic.protocol.errors import PeerLost
from workers.distributed import gloo, process_group
from workers.distributed.backends import with_control
from workers.distributed.gloo import GlooGroup
from workers.distributed.group_spec import GroupSpec
from workers.distributed.process_group import Alone, Connect, Formation, Group, leave
from workers.distributed.rendezvous import Rendezvous

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_left_behind", [])


class Backend:
    """Whose operations are under way until they are told to end."""

    def __init__(self) -> None:
        self.is_over = False

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return SimpleNamespace(is_completed=lambda: self.is_over)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.may_arrive = threading.Event()
        return SimpleNamespace(wait=self.may_arrive.wait)


def group() -> tuple[Group, Backend]:
    backend = Backend()
    return GlooGroup(cast(Any, backend), 0, 2), backend


def test_a_left_group_is_freed_once_nothing_is_under_way_in_it_or_its_parts() -> None:
    (whole, own), (part, of_part) = group(), group()
    whole.adopt(part)
    part.all_reduce(torch.zeros(1))
    leave(whole)
    assert (whole.backend, part.backend) == (own, of_part)
    of_part.is_over = True
    leave(Alone())
    assert (whole.backend, part.backend) == (None, None)
    assert process_group._left_behind == []
    with pytest.raises(PeerLost):
        whole.all_reduce(torch.zeros(1))


def test_a_left_group_is_freed_once_what_was_posted_has_arrived_whoever_waits() -> None:
    whole, own = group()
    whole.post(torch.zeros(1), 1, 0)
    leave(whole)
    assert (whole.backend, whole.is_settled) == (own, False)
    own.may_arrive.set()
    deadline = time.monotonic() + 60.0
    while not whole.is_settled:
        assert time.monotonic() < deadline
        time.sleep(0.001)  # polling, bounded by the deadline
    leave(Alone())
    assert whole.backend is None


def test_a_group_that_has_formed_too_late_is_freed() -> None:
    late, _ = group()
    may_form = threading.Event()

    def form(_: threading.Event) -> Group:
        assert may_form.wait(60.0)
        return late

    formation = Formation(form)
    leave(formation)
    with pytest.raises(PeerLost):
        formation.wait(60.0)
    leave(Alone())
    assert late.backend is not None
    may_form.set()
    end_forming()
    leave(Alone())
    assert (late.is_abandoned, late.backend) == (True, None)


def end_forming() -> None:
    for thread in threading.enumerate():
        if thread.name == "form":
            thread.join(60.0)
            assert not thread.is_alive()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


both_controls = threading.Barrier(2)


def refuse(spec: GroupSpec) -> Group:
    """A peer that still connects would wait for this one."""
    both_controls.wait(60.0)
    raise RuntimeError("no GPU")


CONTROL = partial(gloo.connect, HOST)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("connect", "ranks"), [(CONTROL, [0]), (with_control(refuse, CONTROL), [0, 1])]
)
def test_nothing_is_left_of_formings_that_have_failed(connect: Connect, ranks: list[int]) -> None:
    """With an absent peer, given up; or where the second of two groups is refused."""
    rendezvous, early = Rendezvous(HOST), 0
    for generation in range(1, 13):
        begin = partial(
            process_group.form, store_address=rendezvous.open(generation), prefix=f"{generation}",
            world_size=2, connect=connect, join_timeout_s=60.0, operation_timeout_s=60.0,
        )  # fmt: skip
        formations = [begin(rank=rank) for rank in ranks]
        if len(ranks) == 1:
            threading.Timer(0.1, formations[0].abandon).start()
        for formation in formations:
            with pytest.raises(PeerLost):
                formation.wait(60.0)
            leave(formation)
        end_forming()
        if generation == 2:
            early = files_and_threads()
    assert files_and_threads() <= early + 4, early
    rendezvous.forget()


def files_and_threads() -> int:
    return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))
