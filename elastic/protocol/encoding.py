"""Frozen dataclasses as JSON and back, exactly: journal, replay, frames between processes.

Which classes may appear is the reader's choice (`registry`); no class is looked up by name alone.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast

from elastic.protocol.membership import MAX_NUMBER, NumberSet

Registry = Mapping[str, Callable[..., Any]]


class UndecodableValue(ValueError):
    """A value that was not written by `encode`, or of a class the reader does not know."""


def registry(*classes: type) -> Registry:
    """The classes that `decode` may make, by name."""
    return {c.__name__: c for c in classes}


def encode(value: object) -> Any:
    """`value` as JSON types: a dataclass becomes its fields and "type", a tuple a list.

    Only None, bool, int, float, str, tuples and frozen dataclasses of these come back equal; a dict
    does if it is JSON already: it is not looked into.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, NumberSet):
        return {"type": "NumberSet", "ranges": [list(r) for r in ranges(value)]}
    if isinstance(value, dict):
        return {"type": "dict", "of": cast(dict[str, Any], value)}
    if isinstance(value, tuple):
        return [encode(item) for item in cast(tuple[object, ...], value)]
    if is_dataclass(value) and not isinstance(value, type):
        encoded = {"type": type(value).__name__}
        for name in _names_of(type(value)):
            encoded[name] = encode(getattr(value, name))
        return encoded
    raise TypeError(f"{type(value).__name__} has no JSON encoding: {value!r}")


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    """Of a dataclass's fields: a frame may have thousands of one class."""
    return tuple(field.name for field in fields(kind))


def decode(encoded: Any, types: Registry) -> Any:
    """The inverse of `encode`; raises UndecodableValue. What the fields hold is not checked."""
    try:
        return _decode(encoded, types)
    except RecursionError as error:
        raise UndecodableValue("it is nested too deeply") from error


def _decode(encoded: Any, types: Registry) -> Any:
    if isinstance(encoded, list):
        return tuple(_decode(item, types) for item in cast(list[Any], encoded))
    if not isinstance(encoded, dict):
        return encoded
    values = dict(cast(dict[str, Any], encoded))
    name = values.pop("type", None)
    try:
        if name == "dict":
            return values["of"]
        if name == "NumberSet":
            return from_ranges(values["ranges"])
        if name not in types:
            raise UndecodableValue(f"type {name!r} is none of {', '.join(sorted(types))}")
        return types[name](**{key: _decode(item, types) for key, item in values.items()})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UndecodableValue):
            raise
        raise UndecodableValue(f"not a {name}: {encoded!r:.200} ({error})") from error


def dumps(value: object) -> str:
    """One line of JSON."""
    return json.dumps(encode(value), separators=(",", ":"))


def loads(text: str | bytes, types: Registry) -> Any:
    return decode(json.loads(text), types)


def ranges(numbers: NumberSet) -> Iterator[tuple[int, int]]:
    """The runs of consecutive numbers, both ends included: 3 4 5 9 is (3, 5), (9, 9)."""
    first = last = None
    for n in numbers:
        if first is None or last is None:
            first = n
        elif n != last + 1:
            yield first, last
            first = n
        last = n
    if first is not None and last is not None:
        yield first, last


def from_ranges(pairs: list[tuple[int, int]]) -> NumberSet:
    """ValueError for numbers that no set of ours has, TypeError for what are no numbers."""
    at = -1
    for first, last in pairs:
        if not at < first <= last <= MAX_NUMBER:
            raise ValueError(f"a range of numbers from {first} to {last}")
        at = last
    return NumberSet.of(n for first, last in pairs for n in range(first, last + 1))
