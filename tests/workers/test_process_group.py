"""A generation's process group over a backend that the test answers for."""

from typing import Any, cast

import torch

from workers.distributed.process_group import Group


class Works:
    """A backend whose operations end when they are told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_ended = 0
        self.num_launched = 0

    def allreduce(self, tensors: list[torch.Tensor]) -> "Work":
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


def test_a_launch_asks_for_the_oldest_operation_in_flight_only() -> None:
    backend = Works()
    group = Group(cast(Any, backend), "nccl", 0, 2)
    for _ in range(100):
        group.all_reduce(torch.zeros(1))
    assert backend.num_asked == 99, "each launch but the first asked once"
    backend.num_ended = 60
    group.all_reduce(torch.zeros(1))
    assert backend.num_asked == 99 + 61
    assert not group.is_settled
    backend.num_ended = 101
    assert group.is_settled
