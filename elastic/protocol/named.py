"""A function by its name, as a user's settings have one: package.module:function."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from elastic.protocol.errors import WrongInput


def function_named(name: str, what: str) -> Callable[..., Any]:
    """what: the setting that names it, and what it should be. WrongInput if it is not there."""
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise WrongInput(f"{what}: {error}") from error
    if not callable(found):
        raise WrongInput(f"{what}: {name} is no function")
    return found
