"""The command line `elastic`: its commands, and what goes wrong as exit statuses.

0 succeeded; 1 failed or stopped; 2 wrong input, with one line. What the commands do is in files of
their own, which commands.py lists.
"""

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from elastic.cli import script
from elastic.cli.commands import LoadedOnDemand
from elastic.cli.job_file import expanded
from elastic.cli.outcome import WRONG_INPUT, refuse
from elastic.protocol.errors import ControllerLost, WrongInput

NAME = "elastic"
"""However it was started: `python -m elastic` is the same."""
FAILED = 1
TYPERS_INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt in a command."""

app = typer.Typer(
    name=NAME,
    cls=LoadedOnDemand,
    help="Train PyTorch on a Ray cluster whose machines come and go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"elastic {importlib.metadata.version('elastic-ray-trainer')}")
        raise typer.Exit


@app.callback()
def take_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Those that stand before a command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script: like `app`, but every wrong input is one line and exit status 2."""
    if sys.platform != "linux":
        return refuse(f"elastic runs on Linux only, this is {sys.platform}")
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        if (found := script.script_in(given)) is not None:
            return script.run_script(*found)
        words = expanded(given)
        status: object = app(args=words, prog_name=NAME, standalone_mode=False)
    except TyperException as error:
        message = error.format_message().rstrip(".")
        return refuse(f"{message}; see `{command_of(error)} --help`") if message else WRONG_INPUT
    except WrongInput as error:
        return refuse(str(error))
    except (ControllerLost, OSError) as error:  # OSError: a store that is away, a full disk
        return refuse(str(error), status=FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return refuse("interrupted", status=FAILED)
    if status == TYPERS_INTERRUPTED:
        return refuse("interrupted", status=FAILED)
    return status if isinstance(status, int) else 0


def command_of(error: TyperException) -> str:
    """Whose help tells more."""
    context: typer.Context | None = getattr(error, "ctx", None)
    path = context.command_path if context else ""
    return " ".join(["elastic", *path.split()[1:]])
