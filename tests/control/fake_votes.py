"""Votes of a simulated step: they say which gradients they are on, and nothing else."""

import numpy as np

from workers.reduction.reducers import Reduced
from workers.step.timing import Pace
from workers.step.vote import CompletedVote, Names, Prepared, Vote, VoteLayout

LAYOUT = VoteLayout(1, 1, 1, Names((), ()), (), ())
NOTHING_REDUCED = Reduced({}, {})
VOTE = Vote(
    should_pause=False,
    is_saving=False,
    should_save=False,
    is_finite=True,
    has_unknown_names=False,
    untracked=frozenset(),
    used=frozenset(),
    loss=1.0,
    divisor=1.0,
    squares=1.0,
    rows=np.zeros(1, np.int64),
    user={},
    pace=Pace(0.0, 0.0, 0.0, wants_row=False),
)


def prepared_by(generation: int) -> Prepared:
    return Prepared(NOTHING_REDUCED, LAYOUT, 0.1, generation)


def vector_of(weights: int) -> np.ndarray:
    """A vote on the gradients that make these weights: it says no more than which they are."""
    return np.array([weights], np.int64)


def weights_in(vote: CompletedVote) -> int:
    return int(vote.vector()[0])
