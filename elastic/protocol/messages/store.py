"""Between the members of a generation and its store, where they learn how to reach each other."""

from dataclasses import dataclass
from typing import TypeAlias, get_args

from elastic.protocol.messages.direction import Direction


@dataclass(frozen=True, slots=True)
class Set:
    """Not answered."""

    key: str
    payload: bytes = b""
    """The value."""


@dataclass(frozen=True, slots=True)
class Get:
    """Answered once the key is set: with everything that was set after the first `seen`, a `Value`
    each."""

    key: str
    seen: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Who has said the secret is let in."""


@dataclass(frozen=True, slots=True)
class Value:
    key: str
    is_last: bool
    """Of this answer."""
    payload: bytes = b""


ToStore: TypeAlias = Set | Get
FromStore: TypeAlias = Welcome | Value

TO_STORE: Direction[ToStore] = Direction(*get_args(ToStore))
FROM_STORE: Direction[FromStore] = Direction(*get_args(FromStore))
