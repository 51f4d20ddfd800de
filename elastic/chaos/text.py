"""Files that a person wrote, as text, and their values in a few words: whatever is in them.

What a scenario or a trace means is scenario.py's and traces.py's.
"""

import os
import reprlib
from pathlib import Path

from elastic.protocol.errors import WrongInput

MAX_BYTES = 1 << 17
"""Of a file: about 2,000 faults, and read in seconds."""


def read_text(path: Path) -> str:
    """WrongInput if the file cannot be read, or is no text of a reasonable size."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"{path} cannot be read: {error}") from error
    if len(content) > MAX_BYTES:
        raise WrongInput(f"{path} is larger than {MAX_BYTES} bytes")
    return text


def is_file(path: Path) -> bool:
    """Path.is_file raises for a name that is too long."""
    return os.path.isfile(path)


def shown(value: object) -> str:
    """The value in one short line, whatever its depth and size."""
    words = reprlib.Repr()
    words.maxlevel, words.maxstring, words.maxother = 2, 80, 80
    try:
        return words.repr(value)
    except ValueError:  # a number of more digits than Python prints
        return f"a huge {type(value).__name__}"


def one_line(text: str) -> str:
    """What somebody else says of the file may quote it."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
