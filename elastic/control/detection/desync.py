"""Who waits in another collective than its peers: a deadlock that the program itself has made; and
a generation whose members all wait, and none gets anywhere.

Pure functions of heartbeats. Who makes no progress otherwise is hang.py's.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from elastic.control.detection.hang import PATIENCE, PATIENCE_UNKNOWN, Watch, place_of
from elastic.protocol.membership import worker_name
from elastic.protocol.messages.pulse import Heartbeat

PATIENCE_WITH_STUCK = 20
"""Times `detect_s` that all members may wait in collectives without one of them coming to the next.
A link that was cut for half of that, the lease, has repeated by then what was on it. And no less
than PATIENCE times what the phase usually takes: a transfer that is slow moves, and was slow before
(or, without a usual time, may yet take as long as the backend itself allows)."""


def strays(watches: Iterable[Watch], detect_s: float) -> Iterator[tuple[int, str]]:
    """Those who wait in another collective than most of their generation wait in as the same one:
    the program has gone another way there, and all would wait for ever.

    Nobody is named before a majority waits together, or everybody waits: who is on its way yet
    may show that the first ones to wait are those who went astray.
    """
    stuck: dict[tuple[int, int], list[Heartbeat]] = {}
    sizes: Counter[int] = Counter()
    for w in watches:
        heartbeat = w.heartbeat
        sizes[heartbeat.generation] += 1
        if heartbeat.waits_for_peers and heartbeat.collective[0] and not heartbeat.part:
            place = (heartbeat.generation, heartbeat.collective[0])
            stuck.setdefault(place, []).append(heartbeat)
    for (generation, _), beats in stuck.items():
        size = sizes[generation]
        counts = Counter(h.collective for h in sorted(beats, key=lambda h: h.worker))
        (common, num_common), *others = counts.most_common()
        is_clear = 2 * num_common > size or len(beats) == size
        for h in beats if others and is_clear else ():
            if h.collective != common and h.phase_s > detect_s:
                yield (
                    h.worker,
                    f"it waits in {words_of(h.collective)} for {h.phase_s:.1f} s, "
                    f"{place_of(h)}, where {num_common} of {size} wait in "
                    f"{words_of(common)}: it has skipped a collective, or made one alone",
                )


def stalled(watches: Iterable[Watch], now: float, detect_s: float) -> Iterator[tuple[int, str]]:
    """Generations in which everybody waits and nobody can be named: one has skipped a collective of
    a part, or a path between two of them is cut and no kernel tells which (partition.py)."""
    members: dict[int, list[Watch]] = {}
    for w in watches:
        members.setdefault(w.heartbeat.generation, []).append(w)
    for generation, of_it in sorted(members.items()):
        if len(of_it) < 2 or not all(is_stuck(w, now, detect_s) for w in of_it):
            continue
        beats = sorted((w.heartbeat for w in of_it), key=lambda h: h.worker)
        shortest_s = min(h.phase_s for h in beats)
        where = ", ".join(f"{worker_name(h.worker)} in {words_of_wait(h)}" for h in beats[:8])
        more = f", and {len(beats) - 8} more" if len(beats) > 8 else ""
        yield (
            generation,
            f"all {len(beats)} members have waited for {shortest_s:.1f} s or more, "
            f"{place_of(beats[0])}, and none gets on: {where}{more}; a network path between two "
            "of them may be cut, or one has skipped a collective",
        )


def is_stuck(watched: Watch, now: float, detect_s: float) -> bool:
    """Whether it has waited for too long where it waits; who forms has a deadline of its own."""
    heartbeat, since = watched.heartbeat, watched.stuck_since
    is_silent = now - watched.heard_at > detect_s
    is_in_one = heartbeat.waits_for_peers and heartbeat.collective[0] > 0
    if since is None or is_silent or not is_in_one or heartbeat.phase == "form":
        return False
    patience_s = PATIENCE_WITH_STUCK * detect_s
    if heartbeat.p95_s is None or heartbeat.is_new_there:  # the next may be much larger
        patience_s = PATIENCE_UNKNOWN * detect_s
    else:
        patience_s = max(patience_s, PATIENCE * heartbeat.p95_s)
    return min(heartbeat.phase_s, watched.heard_at - since) > patience_s


def words_of_wait(heartbeat: Heartbeat) -> str:
    number, name, _ = heartbeat.collective
    return f"{name} {number}" + (f" of {heartbeat.part}" if heartbeat.part else "")


def words_of(collective: tuple[int, str, int]) -> str:
    _, name, size = collective
    return f"{name} of {size}" if size else name
