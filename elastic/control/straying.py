"""Who waits in another collective than its peers: a deadlock that the program itself has made.

Pure functions of heartbeats. Who makes no progress otherwise is suspicion.py's.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from elastic.control.suspicion import Heartbeat, Watch, place_of


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
        if heartbeat.waits_for_peers and heartbeat.collective[0]:
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


def words_of(collective: tuple[int, str, int]) -> str:
    _, name, size = collective
    return f"{name} of {size}" if size else name
