"""The highest level at which a script may run, as it was asked for.

What the levels are is docs/your-script.md's. Nothing heavy is imported here: every command line
is looked at with it.
"""

import os

from elastic.protocol.errors import WrongInput

OPTION = "--script-level"
"""Of `elastic run SCRIPT.py` and `elastic torchrun`, before the script."""
VARIABLE = "ELASTIC_SCRIPT_LEVEL"
"""The same for scripts that are started by themselves; an option counts before it."""


def may_go_on_in_place(option: str | None = None) -> bool:
    """Whether scripts go on in place after a loss, where they can: 1, or 0 if they are to be called
    again. option: as the command line says; None: it says nothing. WrongInput for another level."""
    name, asked = (OPTION, option) if option is not None else (VARIABLE, os.environ.get(VARIABLE))
    if asked not in (None, "0", "1"):
        raise WrongInput(f"{name} must be 0 or 1, got {asked!r}")
    return asked != "0"


def ask(option: str) -> None:
    """Of whatever scripts this process runs, and its trials. WrongInput as above."""
    may_go_on_in_place(option)
    os.environ[VARIABLE] = option
