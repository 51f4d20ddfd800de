"""The commands of `elastic` that are loaded when they are asked for: a command line needs one.

All of them together load numpy and the faults of chaos, and take longer than `elastic status`.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

Register = Callable[[typer.Typer], object]
"""Loads a command and adds it."""


def command(module: str, name: str = "") -> Register:
    """A function of a file here, whose name it has unless it has another."""

    def register(app: typer.Typer) -> None:
        app.command()(getattr(import_module(f"elastic.cli.{module}"), name or module))

    return register


def group(module: str) -> Register:
    """The commands of a file here."""

    def register(app: typer.Typer) -> None:
        app.add_typer(import_module(f"elastic.cli.{module}").app, name=module)

    return register


def checkpoint(app: typer.Typer) -> None:
    from elastic.cli import checkpoint, checkpoint_compare, checkpoint_exchange

    parts = (checkpoint_exchange.app, checkpoint_compare.app)
    whole = typer.Typer(no_args_is_help=True, help=checkpoint.app.info.help)
    for each in (checkpoint.app, *parts):
        whole.registered_commands += each.registered_commands
    app.add_typer(whole, name="checkpoint")


def submit(app: typer.Typer) -> None:
    from elastic.cli.run import run
    from elastic.cli.submit import command_like

    app.command()(command_like(run))


def torchrun(app: typer.Typer) -> None:
    from elastic.cli import torchrun

    app.command(context_settings=torchrun.SETTINGS)(torchrun.torchrun)


COMMANDS: dict[str, Register] = {
    "init": command("init"),
    "run": command("run"),
    "status": command("status"),
    "watch": command("status", "watch"),
    "submit": submit,
    "torchrun": torchrun,
    "stop": command("stop"),
    "scale": command("scale"),
    "logs": command("logs"),
    "ls": command("runs", "ls"),
    "report": command("report"),
    "serve": command("serve"),
    "profile": command("profile"),
    "track": command("track"),
    "replay": command("journal", "replay"),
    "story": command("journal", "story"),
    "experiment": command("experiment"),
    "checkpoint": checkpoint,
    "data": group("data"),
    "chaos": group("chaos"),
    "cluster": group("cluster"),
}
"""In the order of `elastic --help`."""


class Commands(Mapping[str, Any]):
    """By name, as typer has them."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            holder = typer.Typer()
            COMMANDS[name](holder)
            self._found[name] = get_group(holder).commands[name]
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LoadedOnDemand(TyperGroup):
    """The whole command line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)
