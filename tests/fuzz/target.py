"""`Target`: a real file or frame, how it is damaged, and what reads it then."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from elastic.protocol.errors import BadData, DamagedCheckpoint, WrongInput

REFUSALS = (WrongInput, DamagedCheckpoint, BadData)


@dataclass(frozen=True)
class Target:
    """content: of the real thing. attempt: is given what became of it; raises one of REFUSALS or
    nothing, AssertionError where it took wrong data for right ones."""

    content: bytes
    damage: Callable[[random.Random, bytes], bytes]
    attempt: Callable[[bytes], object]
    crashed: Callable[[bytes], bool] | None = None
    """Where the attempt may end its process: whether a wary reader names this file."""
