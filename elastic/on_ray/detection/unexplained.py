"""Memberships that were given up, and no loss explains why so far: a path may be cut, of TCP or of
another network that NCCL's cards have.
"""

import ipaddress
from collections.abc import Mapping
from contextlib import suppress

from elastic.protocol.membership import Membership

Path = frozenset[str]
"""Its two ends, which are hosts."""


class Unexplained:
    def __init__(self) -> None:
        self._given_up: tuple[Membership, float] | None = None
        self._unanswered: dict[int, tuple[int, str]] = {}
        """By worker, the host that its backend got no answer from, and in which generation."""
        self._before: tuple[int, frozenset[Path]] = (0, frozenset())
        """Such paths of the last one, and its step."""

    def begin(self, membership: Membership, now: float) -> None:
        self._given_up = membership, now

    def take(self, now: float, after_s: float) -> Membership | None:
        """Once, if it was given up so long ago."""
        membership, at = self._given_up or (None, now)
        if membership is None or now - at < after_s:
            return None
        self._given_up = None
        return membership

    def hear_unanswered(self, worker: int, generation: int, host: str) -> None:
        self._unanswered[worker] = generation, plain_host(host)

    def unanswered_again(
        self, generation: int, step: int, hosts: Mapping[int, str]
    ) -> dict[int, set[str]]:
        """Per member, the host that its backend got no answer from, in this generation and in the
        attempt at the same step before, whoever of the two hosts said so.

        hosts: of each member.
        """
        said = {w: host for w, (at, host) in self._unanswered.items() if at == generation}
        paths = {w: Path((hosts[w], host)) for w, host in said.items() if w in hosts}
        (step_before, before), self._before = self._before, (step, frozenset(paths.values()))
        is_again = step == step_before
        return {w: {said[w]} for w, path in paths.items() if is_again and path in before}


def plain_host(address: str) -> str:
    """In the one way to write it; a name stays one."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(address))
    return address
