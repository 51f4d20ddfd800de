"""A group that counts what its rank sends to others; the parts that it forms count as well."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from workers.distributed.pending import Pending
from workers.distributed.process_group import AnyGroup


class CountingGroup:
    """By the name of the part; the group itself is "". An all-reduce counts as the best there is,
    which sends everything but a rank's own share twice."""

    def __init__(
        self, group: AnyGroup, name: str = "", sent: dict[str, float] | None = None
    ) -> None:
        self._group, self._name = group, name
        self._size = group.size()
        self.sent: dict[str, float] = {} if sent is None else sent
        """Bytes by part."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    @property
    def control(self) -> AnyGroup:
        return cast(AnyGroup, CountingGroup(self._group.control, self._name, self.sent))

    def part(self, name: str, ranks: Sequence[int], timeout_s: float) -> AnyGroup:
        part = self._group.part(name, ranks, timeout_s)
        return cast(AnyGroup, CountingGroup(part, name, self.sent))

    def all_reduce(self, tensor: Tensor) -> Pending:
        self._count(2 * tensor.nbytes / self._size)
        return cast(Pending, self._group.all_reduce(tensor))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Pending:
        self._count(tensor.nbytes)
        return cast(Pending, self._group.all_gather(outputs, tensor))

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Pending:
        others = (t.nbytes for r, t in enumerate(inputs) if r != self._group.rank())
        self._count(sum(others) / max(self._size - 1, 1))
        return cast(Pending, self._group.all_to_all(outputs, inputs))

    def all_gather_flat(self, output: Tensor, tensor: Tensor) -> Pending:
        self._count(tensor.nbytes)
        return cast(Pending, self._group.all_gather_flat(output, tensor))

    def all_to_all_flat(self, output: Tensor, tensor: Tensor, *sizes: Sequence[int]) -> Pending:
        self._count(tensor.nbytes / self._size)
        return cast(Pending, self._group.all_to_all_flat(output, tensor, *sizes))

    def _count(self, to_each: float) -> None:
        total = self.sent.get(self._name, 0.0) + to_each * (self._size - 1)
        self.sent[self._name] = total
