"""What a script gives, as JSON has it: the metrics of its reports, and what it returns."""

import json
from typing import Any

from elastic.protocol.errors import in_words


def returned(value: Any) -> bytes:
    """JSON, which is read without running code; what is none is told, and null."""
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        what = f"{type(value).__name__} ({in_words(error)})"
        print(f"elastic: the function returned no JSON but {what}: return_value is None")
        return b"null"


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: numbers of numpy and torch become Python's, what is none becomes text."""

    def number_in(value: Any) -> Any:
        try:
            return value.item() if hasattr(value, "item") else str(value)
        except (ValueError, RuntimeError):  # of several elements
            return str(value)

    return json.loads(json.dumps(metrics, default=number_in))
