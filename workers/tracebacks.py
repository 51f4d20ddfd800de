"""Tracebacks as a user reads them: they begin in the user's own code, not in what has called it."""

import os
import re
from pathlib import Path
from typing import TypeVar

Raised = TypeVar("Raised", bound=BaseException)
ROOT = re.escape(str(Path(__file__).resolve().parents[1]) + os.sep)
OURS = rf"{ROOT}(elastic|workers)/|.*/site-packages/(elastic|workers|ray)/"
CALLERS = re.compile(rf"{OURS}|<frozen |.*/(contextlib|runpy)\.py")
"""Files of what calls a user's code."""


def begun_outside(error: Raised) -> Raised:
    """The same exception, without the frames before the first one that is the user's."""
    trace = error.__traceback__
    while trace is not None and CALLERS.match(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)
