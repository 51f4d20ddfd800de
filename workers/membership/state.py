"""Where a worker stands: a state and its phases, plain values, and what must always hold.

What changes them is machine.py's. Nothing else decides what a worker does next, or what it says of
itself.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from elastic.protocol.messages.to_worker import Finish, Form, Recall
from workers.membership.events import Loop


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a generation; generation 0: in none yet."""

    generation: int = 0
    rank: int = 0
    world_size: int = 0


def seat_in(command: Form | Finish | Recall) -> Seat:
    return Seat(command.generation, command.rank, command.world_size)


@dataclass(frozen=True, slots=True)
class Word:
    """What has come from the controller, obeyed or not."""

    told: Seat = Seat()
    """The newest seat."""
    is_finishing: bool = False
    """That seat is for writing the final state."""
    given_up: int = 0
    """Generations up to this one are."""
    pause_asked: int = 0
    """In this generation."""
    save_asked: tuple[int, int] = (0, 0)
    """In this generation, and for which step."""


class Holding(Enum):
    NOTHING = "nothing"
    PROMISED = "promised"
    """It is to get its part from the members, and counts as one of them."""
    STATE = "state"


class Source(Enum):
    """Whom the worker follows."""

    NONE = "none"
    COPYING = "copying"
    LEVEL = "level"
    """Somebody, at most a step behind; of a state in parts: the members."""


# --- phases: what the main thread is at ---------------------------------------------
@dataclass(frozen=True, slots=True)
class InPool:
    """No member: waits for commands, and may follow a source."""


@dataclass(frozen=True, slots=True)
class Forming:
    """Obeys a Form."""

    form: Form


@dataclass(frozen=True, slots=True)
class Entering:
    """Has joined, and waits for those that get their state late."""

    should_pause: bool


@dataclass(frozen=True, slots=True)
class Working:
    """The user's loop runs in a generation that has formed."""

    should_pause: bool
    """At the next boundary, all have agreed."""


@dataclass(frozen=True, slots=True)
class Paused:
    """At a boundary, agreed by vote."""


@dataclass(frozen=True, slots=True)
class Done:
    """The loop has returned."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The generation cannot go on here, which the controller knows: it will give it up."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """The generation was given up, and this worker has said where it stands."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Told to write the final state."""


Phase: TypeAlias = (
    InPool | Forming | Entering | Working | Paused | Done | Broken | Suspended | Ended
)
JOINED = (Entering, Working, Paused, Done)
"""Phases whose generation has formed here."""
BUSY = (Forming, Entering)
"""Phases in which the main thread obeys nothing."""


@dataclass(frozen=True, slots=True)
class State:
    """Of one worker."""

    is_whole: bool = True
    """Every member holds the whole state, else a part, and newcomers follow nobody."""
    phase: Phase = InPool()
    word: Word = Word()
    seat: Seat = Seat()
    """The newest that was obeyed."""
    formed: int = 0
    """The newest generation that has formed here; 0: this worker was never a member."""
    loop: Loop = Loop.OUTSIDE
    began_at: int = 0
    """Committed steps when the loop began the step that it is in."""
    holding: Holding = Holding.NOTHING
    source: Source = Source.NONE
    step: int = 0
    """Committed steps of the state."""
    origin: int = 0
    """The generation that computed `step`: another one's state of it is another state."""
    prepared_by: int = 0
    """The generation whose reduced gradients of the next step are here; 0: none are."""
    is_copied: bool = False
    """The state is another one's, and the loop has come to no boundary with it."""

    @property
    def is_prepared(self) -> bool:
        return self.prepared_by > 0

    @property
    def is_given_up(self) -> bool:
        """The generation of its seat is."""
        return self.word.given_up >= self.seat.generation

    @property
    def is_at_work(self) -> bool:
        """The user's loop may go on."""
        return isinstance(self.phase, Working) and not self.is_given_up

    @property
    def is_cancelled(self) -> bool:
        """There is no group to do anything with."""
        return self.is_given_up or not isinstance(self.phase, (*JOINED, Ended))

    @property
    def is_between_steps(self) -> bool:
        """Something may be left to do that only who has made the last step does: an evaluation is
        not over, or the loop does not know yet that its step was rolled forward."""
        is_ahead = self.loop is Loop.STEP and self.step > self.began_at
        return is_ahead or self.loop in (Loop.EVALUATION, Loop.RETURNED)

    @property
    def wants_pause(self) -> bool:
        return self.word.pause_asked == self.seat.generation

    @property
    def kind(self) -> str:
        """For a controller that it has not met before, one of elastic.control.standing.KINDS."""
        is_forming = self.word.told.generation > self.formed
        if self.word.is_finishing:
            return "ended"
        if self.source is not Source.NONE and not is_forming:
            return "synced" if self.source is Source.LEVEL else "syncing"
        if self.holding is Holding.NOTHING:
            return "standby"
        return "working" if self.is_at_work and not is_forming else "stopped"


# --- invariants -----------------------------------------------------------------------
class BrokenInvariant(Exception):
    """A state that no sequence of events may lead to."""


def validate(state: State) -> None:
    """Raises BrokenInvariant, with what does not hold."""
    for what, holds in invariants(state):
        if not holds:
            raise BrokenInvariant(f"{what}: {state}")


def invariants(state: State) -> tuple[tuple[str, bool], ...]:
    seat, word, phase = state.seat, state.word, state.phase
    is_joined, holds = isinstance(phase, JOINED), state.holding is Holding.STATE
    follows, is_new = state.source is not Source.NONE, seat.generation == 0
    return (
        ("who has joined holds the state", not is_joined or holds),
        ("who has joined follows nobody", not is_joined or not follows),
        ("who has joined has formed", not is_joined or state.formed == seat.generation),
        ("nothing formed is newer than what was obeyed", state.formed <= seat.generation),
        ("nothing obeyed is newer than what was heard", seat.generation <= word.told.generation),
        ("a rank is one of its generation", is_new or 0 <= seat.rank < seat.world_size),
        ("who forms obeys the newest Form", not isinstance(phase, Forming) or is_form_of(state)),
        ("gradients are of no later generation", state.prepared_by <= seat.generation),
        ("gradients are of a state that is held", not state.is_prepared or holds),
        ("who ends follows nobody", not isinstance(phase, Ended) or not follows),
        ("who is level holds what it follows", is_level_with_state(state)),
        ("only parts are promised", state.holding is not Holding.PROMISED or not state.is_whole),
        ("steps are counted from 0", state.step >= 0),
    )


def is_form_of(state: State) -> bool:
    return isinstance(state.phase, Forming) and seat_in(state.phase.form) == state.seat


def is_level_with_state(state: State) -> bool:
    needs = state.is_whole and state.source is Source.LEVEL
    return not needs or state.holding is Holding.STATE
