"""The groups of those who hold the same blocks."""

from collections.abc import Sequence

from workers.distributed.process_group import AnyGroup


class BlockGroups:
    """Of a generation: the groups of those who hold the same blocks, formed when first asked for.
    All ranks ask in the same order."""

    def __init__(self, group: AnyGroup, timeout_s: float) -> None:
        """timeout_s: for the ranks to meet."""
        self.group, self._timeout_s = group, timeout_s
        self._formed: dict[tuple[int, ...], AnyGroup] = {}

    def of(self, ranks: Sequence[int]) -> AnyGroup:
        """A collective among them. Raises PeerLost."""
        key = tuple(ranks)
        if key not in self._formed:
            name = f"ranks{'-'.join(map(str, key))}"
            self._formed[key] = self.group.part(name, ranks, self._timeout_s)
        return self._formed[key]
