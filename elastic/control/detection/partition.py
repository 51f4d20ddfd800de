"""Hosts that cannot reach each other although the controller reaches both: whose members must go.

Pure functions of values. A host that is silent for the controller too is hang.py's.
"""

from collections.abc import Iterable, Iterator, Mapping, Set

from elastic.control.detection.hang import Watch

Pair = tuple[str, str]
"""Two hosts, in order."""


def disputed(
    watches: Iterable[Watch], hosts: Mapping[int, str], now: float, detect_s: float
) -> dict[int, set[str]]:
    """Per generation, the hosts at the ends of paths that may be cut: somebody waits there who has
    not been answered by a peer's host for `detect_s`. What is true of them, a dial tells.

    hosts: of each worker, as its connections name it.
    """
    members: dict[int, list[Watch]] = {}
    for w in watches:
        members.setdefault(w.heartbeat.generation, []).append(w)
    found: dict[int, set[str]] = {}
    for generation, of_it in members.items():
        silent = {hosts[w.heartbeat.worker] for w in of_it if now - w.heard_at > detect_s / 2}
        heard = {hosts[w.heartbeat.worker] for w in of_it} - silent
        for w in of_it:
            beat, here = w.heartbeat, hosts[w.heartbeat.worker]
            timeouts = here in heard and beat.waits_for_peers and beat.phase_s > detect_s
            for there, seconds in beat.unanswered if timeouts else ():
                if seconds > detect_s and there in heard and there != here:
                    found.setdefault(generation, set()).update((here, there))
    return found


def parted(
    hosts: Mapping[int, str], unreached: Mapping[int, Set[str]], newcomers: Set[int]
) -> Iterator[tuple[int, str]]:
    """Every worker that goes because of cut paths, and why: as few hosts as explain them, chosen
    greedily; of two the one with newcomers only, else with fewer members, else with younger ones.

    hosts: of each member. unreached: per member that could be asked, which of its peers' hosts it
    could not reach.
    """
    pairs: dict[Pair, str] = {}
    for worker in sorted(unreached):
        here = hosts[worker]
        for there in sorted(unreached[worker] & (set(hosts.values()) - {here})):
            pair = (min(here, there), max(here, there))
            pairs.setdefault(pair, f"{there} cannot be reached from {here}")
    while pairs:
        ends = {host for pair in pairs for host in pair}
        gone = max(ends, key=lambda host: _preference(host, pairs, hosts, newcomers))
        why = "; ".join(pairs.pop(pair) for pair in sorted(pairs) if gone in pair)
        for worker in sorted(hosts):
            if hosts[worker] == gone:
                yield worker, f"{why}, and both are heard: a network path is cut"


def _preference(
    host: str, pairs: Mapping[Pair, str], hosts: Mapping[int, str], newcomers: Set[int]
) -> tuple[int, bool, int, int]:
    here = {worker for worker, its in hosts.items() if its == host}
    return sum(host in pair for pair in pairs), here <= newcomers, -len(here), max(here)
