"""Which ranks of a script have not come to a report or a collective that others wait in. Pure.

Nothing follows from it but a line: a rank that evaluates alone is late, and not hung.
"""

from collections.abc import Mapping, Sequence

from elastic.protocol.membership import counted
from elastic.protocol.messages.to_controller import ScriptMove

PATIENCE_S = 30.0
NAMED = 4
"""So many ranks are named, with where they are."""


def missing(said: Mapping[int, ScriptMove], world_size: int) -> str:
    """Who has not called what others wait in, and where they are; empty if nobody waits for long.

    said: what each rank of this generation has said last, by rank.
    """
    waiting = [move for move in said.values() if move.waits_in]
    first = max(waiting, key=lambda move: move.waited_s, default=None)
    if first is None or first.waited_s < PATIENCE_S:
        return ""
    what = first.waits_in
    here = sorted(move.rank for move in waiting if move.waits_in == what)
    absent = [rank for rank in range(world_size) if rank not in here]
    if not absent:
        return ""
    places = [place for rank in absent[:NAMED] if (place := _place_of(rank, said.get(rank)))]
    where = f" ({', '.join(places)})" if places else ""
    return (
        f"{_ranks(absent)} {'has' if len(absent) == 1 else 'have'} not called {what}, for "
        f"{first.waited_s:.0f} s{where}; {_ranks(here)} {'has' if len(here) == 1 else 'have'}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > NAMED:
        return counted(len(ranks), "rank")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _place_of(rank: int, move: ScriptMove | None) -> str:
    """In words; empty if it has not said any."""
    if move is None or not move.place:
        return ""
    waits = f" in {move.waits_in}" if move.waits_in else ""
    return f"rank {rank} is at {move.place}{waits}"
