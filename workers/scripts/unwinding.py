"""A script whose call is over, and that is called again: who does not hear it, and who cannot.

What raises it is in default_group.py and in workers/script_loop.py.
"""

import re
from collections.abc import Callable
from typing import NoReturn

from elastic.protocol.errors import in_words

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


SAYS_SO = re.compile(
    r"already|twice|multiple times|more than once|only once|in use|not been initialized",
    re.IGNORECASE,
)
"""What an exception says of something that is done for the second time, or that a library remembers
to have done."""


class CannotBeCalledAgain(RuntimeError):
    """A later call of the script has failed before it came to anything, as something was there
    already, and an earlier one not."""


def raised(error: Exception, *, has_moved: bool, has_moved_before: bool) -> Exception:
    """What the run ends with. has_moved: this call has come to a collective or a report;
    has_moved_before: an earlier one in this process has."""
    if has_moved or not has_moved_before or not SAYS_SO.search(str(error)):
        return error
    again = CannotBeCalledAgain(
        f"the script cannot be called twice in one process: {in_words(error)}; its first call came "
        "further. What may be done only once in a process must ask first whether it is done"
    )
    again.__cause__ = error
    return again
