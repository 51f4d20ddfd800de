"""Secrets among a run's settings: nothing of them is written anywhere but a hash to compare.

Which URIs hold some is `shown_uri` of elastic/store/remote.py.
"""

import hashlib
from collections.abc import Callable
from typing import Any, cast

from elastic.store.remote import HIDDEN, is_secret, shown_uri

SCRYPT = {"n": 2**14, "r": 8, "p": 1}
"""Some 50 ms for each guess."""


def redacted(config: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json without its secrets; under `secrets` a hash of each argument that
    was one. What is redacted already stays as it is."""
    found = dict(config)
    if isinstance(found.get("storage"), str):
        found["storage"] = shown_uri(found["storage"])
    hashes: dict[str, str] = {}
    salt = f"elastic:{found.get('target')}"

    def hide(path: str, value: str) -> str:
        if value != HIDDEN:
            hashes[path] = hashlib.scrypt(
                value.encode(errors="surrogatepass"), salt=f"{salt}:{path}".encode(), **SCRYPT
            ).hex()
        return HIDDEN

    if isinstance(found.get("arguments"), dict):
        found["arguments"] = _without_secrets(found["arguments"], "", hide)
    if hashes:
        found["secrets"] = {**found.get("secrets", {}), **hashes}
    return found


def _without_secrets(value: Any, path: str, hide: Callable[[str, str], str]) -> Any:
    """value: JSON. hide: is given each secret and its path, and gives what stands for it."""
    if isinstance(value, list):
        items = enumerate(cast("list[Any]", value))
        return [_without_secrets(item, f"{path}.{i}", hide) for i, item in items]
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for name, item in cast("dict[str, Any]", value).items():
        place = f"{path}.{name}" if path else name
        if isinstance(item, str) and is_secret(name):
            found[name] = hide(place, item)
        else:
            found[name] = _without_secrets(item, place, hide)
    return found


def hidden_in(arguments: dict[str, Any]) -> list[str]:
    """Arguments whose values are not on record."""
    return sorted(name for name, value in arguments.items() if value == HIDDEN)
