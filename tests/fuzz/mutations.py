"""Damage by chance, the same for a seed: bytes of any file, and values of JSON."""

import json
import random
from copy import deepcopy
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**40, 2**63, 2**64, 10**30, 0.5, 1e308, -1e-308, float("nan")),
    *("", "\0", "[/b]", "\x1b[2J", "../x", "x" * 300, "\ud800", "type", "step"),
    *([], {}, [[]], [0, 2**40], {"type": "NumberSet", "ranges": [[0, 2**40]]}, {"tensor": "x"}),
)


def damaged_bytes(dice: random.Random, content: bytes) -> bytes:
    """With one to three pieces flipped, zeroed, replaced, cut out, repeated or put in."""
    found = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        at = dice.randrange(len(found) + 1)
        size = dice.choice((1, 1, 2, 4, 8, 40, 400))
        match dice.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << dice.randrange(8)
            case 1:
                found[at : at + size] = bytes(len(found[at : at + size]))
            case 2:
                found[at : at + size] = dice.randbytes(len(found[at : at + size]))
            case 3:
                del found[at : at + size]
            case 4:
                found[at:at] = found[at : at + size]
            case 5:
                found[at:at] = dice.randbytes(size)
            case _:
                del found[at:]
    return bytes(found)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                waiting.append(node[key])
    return found


def damaged_value(dice: random.Random, value: Any) -> Any:
    """A copy of a JSON value in which something is gone, foreign, elsewhere or nested deeply."""
    found = json.loads(json.dumps(value))
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        there = places(found)
        if not there:
            return deepcopy(dice.choice(HOSTILE))
        node, key = dice.choice(there)
        match dice.randrange(5):
            case 0:
                del node[key]
            case 1 | 2:
                node[key] = deepcopy(dice.choice(HOSTILE))
            case 3:
                other, place = dice.choice(there)
                if not isinstance(other, list) or place < len(other):
                    node[key] = json.loads(
                        json.dumps(other.get(place) if isinstance(other, dict) else other[place])
                    )
            case _:
                node[key] = nested(node[key], dice.choice((1, 3, 200)))
    return found


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def damaged_json(dice: random.Random, content: bytes) -> bytes:
    """A JSON file that is still one, mostly."""
    if dice.random() < 0.3:
        return damaged_bytes(dice, content)
    return json.dumps(damaged_value(dice, json.loads(content))).encode()


def damaged_lines(dice: random.Random, content: bytes) -> bytes:
    """A file of JSON lines: one line altered, gone, repeated, or its bytes damaged."""
    if dice.random() < 0.3:
        return damaged_bytes(dice, content)
    lines = content.splitlines(keepends=True)
    at = dice.randrange(len(lines))
    match dice.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(dice.randrange(len(lines) + 1), lines[at])
        case _:
            lines[at] = json.dumps(damaged_value(dice, json.loads(lines[at]))).encode() + b"\n"
    return b"".join(lines)
