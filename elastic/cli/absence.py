"""A run whose controller is away, seen from its run directory: a successor is awaited, or nobody.

What counts as away, and for how long a successor may come, is elastic/driver/resume.py's.
"""

from collections.abc import Callable

from elastic.driver.resume import PastRun, controller_of

NO_FOLDER = "there is no such folder"
NO_STATUS = "the run has no status yet; look again in a moment"
ONLY_BEGUN = "the run has only begun; try again in a moment"
NOT_BEGUN = (NO_FOLDER, NO_STATUS, ONLY_BEGUN)
"""Is in what is said of a run directory whose run may be about to begin."""


class Absence:
    """Tells once of each absence of a run's controller."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._is_told = False

    def look(self, past: PastRun) -> None:
        if past.is_away and not self._is_told and not past.is_over:
            self._tell(said_of(past))
        self._is_told = past.is_away


def said_of(past: PastRun) -> str:
    """Of a run without a result whose controller is not heard."""
    whose = f"the run's controller (pid {controller_of(past.status).get('pid')})"
    if past.is_over:
        return (
            f"no word of {whose} for {past.heard_s:.0f} s, and no successor has come; start the "
            "same run again to resume it"
        )
    if not past.is_away:
        return f"the run was started again {past.heard_s:.0f} s ago"
    left = f"a successor is awaited for {past.successor_left_s:.0f} s more"
    if past.is_controller_gone:
        return f"{whose} is gone; {left}"
    return f"no word of {whose} for {past.heard_s:.0f} s; it or {left}"
