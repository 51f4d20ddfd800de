"""A part of a generation's group says with whom it waits."""

from typing import Any, cast

import torch

from workers.distributed.gloo import GlooGroup
from workers.distributed.process_group import Formation, Group


class Work:
    """Not done before it is waited for."""

    is_waited_for = False

    def wait(self, limit: Any = None) -> None:
        self.is_waited_for = True

    def is_completed(self) -> bool:
        return self.is_waited_for


class Backend:
    def allreduce(self, tensors) -> Work:
        return Work()

    def abort(self) -> None:
        return


def group(rank: int, size: int) -> Group:
    return GlooGroup(cast(Any, Backend()), rank, size)


def test_a_wait_in_a_part_is_told_with_the_part_s_name():
    whole, told = group(1, 4), []
    whole.form_part = lambda name, rank, size: Formation(lambda _: group(rank, size))
    whole.on_wait = lambda *what: told.append(what)
    part = whole.part("replica0", [0, 1], 5.0)
    whole.all_reduce(torch.zeros(3)).wait()
    part.all_reduce(torch.zeros(2)).wait()
    part.all_reduce(torch.zeros(2)).wait()
    assert told == [
        (1, "all_reduce", 3, ""),
        (1, "all_reduce", 2, "replica0"),
        (2, "all_reduce", 2, "replica0"),
    ]
