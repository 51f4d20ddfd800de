"""The options of `elastic run`: to a RunConfig, and to the words of a command line again.

Which options there are is said by `run` in app.py; what their values mean by elastic/config.py.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

from elastic.config import FaultPolicy, RunConfig
from elastic.driver.target import parse_arguments
from elastic.protocol.errors import WrongInput

NO_SETTINGS = frozenset(("target", "settings", "detach", "as_json"))
"""Parameters of `run` that are no field of RunConfig."""


def configure(options: Mapping[str, Any]) -> RunConfig:
    """A RunConfig of what `run` was given; its warnings are lines on stderr, its errors
    WrongInput."""
    values = {name: value for name, value in options.items() if name not in NO_SETTINGS}
    values["workers"] = parse_workers(values["workers"])
    values["detect_s"] = parse_detect(values["detect_s"])
    values["keep"] = parse_keep(values["keep"])
    faults = parse_arguments(values["faults"] or (), "--faults")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = RunConfig(**{**values, "faults": FaultPolicy.of(faults)})
    except ValueError as error:
        raise WrongInput(str(error)) from error
    for warning in caught:
        print(f"elastic: warning: {warning.message}", file=sys.stderr)
    return config


def parse_workers(text: str, name: str = "--workers") -> int | tuple[int, int]:
    """`3` or `2..4`."""
    low, dots, high = text.partition("..")
    try:
        return (int(low), int(high)) if dots else int(low)
    except ValueError as error:
        raise WrongInput(f"{name} {text!r}: give a number or MIN..MAX, such as 2..4") from error


def parse_detect(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError as error:
        raise WrongInput(f"--detect-s {text!r}: give seconds, or none") from error


def parse_keep(text: str) -> tuple[int, int | None]:
    """`2`, or `2,1000`."""
    last, comma, every = text.partition(",")
    try:
        return int(last), int(every) if comma else None
    except ValueError as error:
        raise WrongInput(f"--keep {text!r}: give a number or LAST,EVERY, such as 2,1000") from error


def words_of(command: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """What gives `command` these options on a command line; nothing for those of its defaults."""
    words: list[str] = []
    for parameter in inspect.signature(command).parameters.values():
        value = options.get(parameter.name)
        if parameter.name == "target" or value is None or value == parameter.default:
            continue
        name = spelled(parameter)
        if isinstance(value, bool):
            words.append(name)
        elif isinstance(value, list):
            words += [word for item in cast("list[object]", value) for word in (name, str(item))]
        else:
            words += [name, str(value)]
    return words


def spelled(parameter: inspect.Parameter) -> str:
    """The option of a parameter. In an annotation typer keeps its first name as the default."""
    (option,) = parameter.annotation.__metadata__
    names = [n for n in (option.default, *(option.param_decls or ())) if isinstance(n, str)]
    return names[0] if names else f"--{parameter.name.replace('_', '-')}"
