"""What the members of a new generation say of themselves, and whether the script goes on in place.

Pure: every member judges the same words alike. What follows is course.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from elastic.data.portions import MAX_GROWTH, Loss

UNIT, EXCHANGE, BARRIER, COMMIT = "unit", "exchange", "barrier", "commit"
"""Operations that members who are left can do again without the lost."""
COLLECTIVE = "collective"
"""One of the script's own: what the lost had in it is nowhere else."""
SEND, SUM = "broadcast", "sum of the survivors"
"""Of the script's own, too: done again without the lost, if who sends is left, and where the script
says that a sum is one of the survivors."""
OF_THE_SCRIPT = (COLLECTIVE, SEND, SUM)


@dataclass(frozen=True, slots=True)
class InPass:
    """Where a member is in the passes over one loader."""

    loader: int
    """Its number, in the order in which the script has begun them; a member may know it no more."""
    number: int
    """Of the pass: 1 is the first."""
    drawn: int
    """The last iteration that it has drawn; -1: none."""
    counted: int
    """The last iteration that has counted."""


@dataclass(frozen=True, slots=True)
class CallState:
    """Of a member in the middle of a call of the script."""

    call: str
    """The same on all members of the call."""
    member: int
    members: tuple[int, ...]
    """Those that it has dealt with until now."""
    num_losses: int
    """How often the members have regrouped, as far as it has followed."""
    num_done: int
    """Operations that have ended here; all members do the same ones in the same order."""
    doing: str
    """The operation that it is in; empty: none."""
    source: int
    """The member who sends in it; -1: nobody in particular."""
    result: Any
    """Of the operation that has ended last, for who has missed it."""
    passes: tuple[InPass, ...]
    """One for each loader."""
    refusal: str
    """Why this member cannot go on in place; empty: it can."""
    keeps_rank: bool = False
    """The script has asked for its rank before it has trained, and not since."""
    gathers: bool = False
    """It trains on what it gathers from the ranks."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "CallState":
        passes = tuple(InPass(**of_loader) for of_loader in fields["passes"])
        members = tuple(fields["members"])
        return cls(**{**fields, "members": members, "passes": passes})


@dataclass(frozen=True, slots=True)
class GoOn:
    """Who is left goes on."""

    members: tuple[int, ...]
    num_done: int
    """Of the furthest: who has done less has missed an operation that counts."""
    result: Any
    """Of that operation."""
    losses: tuple[tuple[int, int, Loss], ...]
    """For each loader: its number, the pass in which it happened, and what."""


@dataclass(frozen=True, slots=True)
class CallAgain:
    """The script is called again on all of them."""

    why: str


Verdict: TypeAlias = GoOn | CallAgain


def judge(num_ranks: int, states: Sequence[CallState | None]) -> Verdict:
    """num_ranks: when the call began. states: of the new generation's, by rank; None: of one
    that begins the call."""
    said = [state for state in states if state is not None]
    if len(said) < len(states) or len({s.call for s in said}) > 1:
        return CallAgain("a newcomer begins with the others")
    if refusals := [s.refusal for s in said if s.refusal]:
        return CallAgain(refusals[0])
    if len({(s.members, s.num_losses) for s in said}) > 1:
        return CallAgain("ranks know of different losses")
    if len(said) * MAX_GROWTH < num_ranks:
        return CallAgain(f"{len(said)} of {num_ranks} ranks are left: batches would grow too large")
    if why := what_renumbering_hinders(said):
        return CallAgain(why)
    furthest = max(s.num_done for s in said)
    result = next(s.result for s in said if s.num_done == furthest)
    if any(s.num_done < furthest - 1 for s in said):
        return CallAgain("ranks were more than one operation apart")
    if why := what_hinders(said, furthest, result):
        return CallAgain(why)
    members = tuple(s.member for s in said)
    return GoOn(members, furthest, result, losses_of(said))


def what_renumbering_hinders(said: Sequence[CallState]) -> str:
    """Why ranks cannot be numbered anew behind the back of a script that has kept its own."""
    if not any(s.keeps_rank for s in said):
        return ""
    if all(s.member for s in said):
        return "rank 0, which may be who saves, was lost, and no script asks again who that is"
    before = said[0].members
    has_moved = any(place(before, s.member) != rank for rank, s in enumerate(said))
    if has_moved and any(s.gathers for s in said):
        return "ranks have other numbers now, and the script gathers by those that it has kept"
    return ""


def what_hinders(said: Sequence[CallState], furthest: int, result: Any) -> str:
    """Why the operation at hand cannot be done again by who is left; empty: it can."""
    if any(not takes_result(s, result) for s in said if s.num_done < furthest):
        return "a rank has missed the result of a collective of the script's own"
    at_hand = [s for s in said if s.num_done == furthest and s.doing]
    doing = {s.doing for s in at_hand}
    if COLLECTIVE in doing:
        return "the lost rank was in a collective of the script's own"
    before, after = said[0].members, tuple(s.member for s in said)
    if any(place(before, s.source) != place(after, s.source) for s in at_hand):
        return "who sends in a broadcast of the script's own was lost, or has another rank"
    if len(doing) > 1:
        return f"ranks were in different operations: {', '.join(sorted(doing))}"
    return ""


def takes_result(behind: CallState, result: Any) -> bool:
    """Whether who has missed the end of its operation can take the result from who has seen it."""
    if behind.doing in OF_THE_SCRIPT:
        return result is not None
    return behind.doing in (UNIT, EXCHANGE, BARRIER)


def place(members: Sequence[int], member: int) -> int:
    """Its rank; -1: it has none."""
    return members.index(member) if member in members else -1


def losses_of(said: Sequence[CallState]) -> tuple[tuple[int, int, Loss], ...]:
    """By loader, of the pass in which the furthest member is."""
    before, after = said[0].members, tuple(s.member for s in said)
    found: list[tuple[int, int, Loss]] = []
    for loader in sorted({p.loader for s in said for p in s.passes}):
        of_loader = [p for s in said for p in s.passes if p.loader == loader]
        newest = max(p.number for p in of_loader)
        there = [p for p in of_loader if p.number == newest]
        drawn, counted = max(p.drawn for p in there), max(p.counted for p in there)
        found.append((loader, newest, Loss(before, after, drawn, counted)))
    return tuple(found)
