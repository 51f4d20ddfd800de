"""Headers of a state that others have written: what must be in them before it is used.

What they mean is state.py's.
"""

from collections.abc import Collection
from typing import Any, TypeVar, cast

from elastic.protocol.errors import WrongInput

T = TypeVar("T")
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What it raises to read a value that is not as it was written."""


def entry(header: object, name: str, kind: type[T]) -> T:
    """A field of a header. WrongInput if there is none of this kind."""
    fields = cast("dict[str, Any]", header) if isinstance(header, dict) else {}
    if name not in fields or not isinstance(fields[name], kind):
        raise WrongInput(f"the state's header is damaged: it has no {kind.__name__} {name!r}")
    return fields[name]


def names_in(header: object, name: str) -> list[str]:
    """A field that is a list of texts; before it was sent it may have been a tuple."""
    found = entry(header, name, object)
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise WrongInput(f"the state's header is damaged: {name!r} is no list of names")
    return list(cast("list[str]", found))


def weights_of(header: object, stored: Collection[str]) -> dict[str, str]:
    """Name in the state dict -> name of the stored tensor."""
    found = entry(header, "weights", dict)
    for name, tensor in found.items():
        if not isinstance(tensor, str) or tensor not in stored:
            raise WrongInput(f"the state's header is damaged: there is no tensor for {name!r}")
    return cast("dict[str, str]", found)
