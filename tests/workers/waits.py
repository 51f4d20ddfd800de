"""Timeouts of tests: those of a run, but for some that a test would wait too long for."""

from dataclasses import fields

from elastic.protocol.timeouts import Timeouts, timeouts_of

NAMES = tuple(field.name for field in fields(Timeouts))
OF_A_RUN = timeouts_of(3.0)


def waits(**changes: float) -> Timeouts:
    """Out of order perhaps, which those of a run never are."""
    made = object.__new__(Timeouts)
    for name in NAMES:
        object.__setattr__(made, name, changes.get(name, getattr(OF_A_RUN, name)))
    return made
