"""Secrets among a run's settings: nothing of them is written anywhere but a hash to compare.

Which names and URIs hold some is said in elastic/store/remote.py.
"""

import hashlib
import json
import re
import secrets
from typing import Any, cast

from elastic.store.remote import HIDDEN, is_secret, shown_uri

SCRYPT = {"n": 2**14, "r": 8, "p": 1}
"""Some 50 ms for each guess."""
URI = re.compile(r"(?<![\w+.-])[\w+.-]+://(?:(?!,[\w+.-]+://)\S)*")
"""In a text, to the next space or to the next of a list with commas."""
HIDDEN_IN_URI = (f"://{HIDDEN}@", f"={HIDDEN}")


def salt_of(config: dict[str, Any]) -> str:
    """What the secrets of the run are hashed with whose config.json it is; if it has none, what a
    new one's are to be: the same secret looks different in every run."""
    salt: object = config.get("secrets_salt")
    if isinstance(salt, str) and salt:
        return salt
    return f"elastic:{config.get('target')}" if config.get("secrets") else secrets.token_hex(16)


def redacted(config: dict[str, Any], salt: str | None = None) -> dict[str, Any]:
    """The content of config.json without its secrets; under `secrets` a hash of each argument that
    was one or had some in its URIs. What is redacted already stays as it is.

    salt: of the run that it may belong to.
    """
    found = dict(config)
    if isinstance(found.get("storage"), str):
        found["storage"] = shown_uri(found["storage"])
    hidden: dict[str, list[Any]] = {}
    if isinstance(found.get("arguments"), dict):
        found["arguments"] = _without_secrets(found["arguments"], "", hidden)
    if hidden:
        found["secrets_salt"] = salt = salt or salt_of(found)
        hashes = {path: _hash(values, f"{salt}:{path}") for path, values in hidden.items()}
        found["secrets"] = {**found.get("secrets", {}), **hashes}
    return found


def _without_secrets(value: Any, path: str, hidden: dict[str, list[Any]]) -> Any:
    """value: JSON. hidden: gets each secret under its path; those in URIs all under the argument's,
    as a hash for each of thousands of files would take minutes."""
    if isinstance(value, str):
        shown = shown_text(value)
        if shown != value:
            hidden.setdefault(path.partition(".")[0], []).append(value)
        return shown
    if isinstance(value, list):
        items = enumerate(cast("list[Any]", value))
        return [_without_secrets(item, f"{path}.{i}", hidden) for i, item in items]
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for name, item in cast("dict[str, Any]", value).items():
        place = f"{path}.{name}" if path else name
        if not is_secret(name):
            found[name] = _without_secrets(item, place, hidden)
            continue
        found[name] = _masked(item)
        if found[name] != item:
            hidden.setdefault(place, []).append(item)
    return found


def _masked(value: Any) -> Any:
    """A secret's value: whether there is one may be known, and how many."""
    if isinstance(value, list):
        return [_masked(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _masked(item) for name, item in cast("dict[str, Any]", value).items()}
    return value if value is None or isinstance(value, bool) else HIDDEN


def _hash(values: list[Any], salt: str) -> str:
    is_text = len(values) == 1 and isinstance(values[0], str)
    text = values[0] if is_text else json.dumps(values, sort_keys=True)
    encoded = text.encode(errors="surrogatepass")
    return hashlib.scrypt(encoded, salt=salt.encode(), **SCRYPT).hex()


def shown_text(text: str) -> str:
    """A text whose URIs are without passwords and keys."""
    return URI.sub(lambda found: shown_uri(found[0]), text) if "://" in text else text


def hidden_in(arguments: dict[str, Any]) -> list[str]:
    """Arguments whose values are not on record, or not all of them."""
    return sorted(name for name, value in arguments.items() if _has_hidden(value))


def other_secrets(config: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    """Secrets among `arguments` (JSON) that are not those of the run whose config.json it is."""
    new = redacted({"arguments": arguments}, salt_of(config)).get("secrets", {})
    return changed_secrets(config.get("secrets"), new)


def changed_secrets(past: Any, new: dict[str, str]) -> list[str]:
    """past: what config.json has under `secrets`, if anything."""
    if not isinstance(past, dict):
        return []
    known = cast("dict[str, Any]", past)
    return sorted(name for name in new if name in known and known[name] != new[name])


def _has_hidden(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_hidden(item) for item in cast("list[Any]", value))
    if isinstance(value, dict):
        return any(_has_hidden(item) for item in cast("dict[str, Any]", value).values())
    if not isinstance(value, str):
        return False
    return value == HIDDEN or ("://" in value and any(word in value for word in HIDDEN_IN_URI))
