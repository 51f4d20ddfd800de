"""How often a script was told that its call is over. Whoever does not hear it is ended.

What raises it is in default_group.py and in workers/script_loop.py.
"""

from collections.abc import Callable
from typing import NoReturn

EXIT_NOT_UNWOUND = 76
SWALLOWED = 2
"""So often a script may catch what unwinds it, and go on."""


class Unwinding:
    """Of one call of the script."""

    def __init__(self, end: Callable[[int, str], NoReturn]) -> None:
        """end: end this process with a status, for a reason."""
        self._end, self._num_told = end, 0

    def tell(self) -> None:
        """It is about to be raised. Does not return to a script that has swallowed it twice."""
        self._num_told += 1
        if self._num_told > SWALLOWED:
            self._end(
                EXIT_NOT_UNWOUND,
                f"the script has caught the end of its call {SWALLOWED} times and gone on; let "
                "`except` clauses around collectives and reports name what they mean",
            )
