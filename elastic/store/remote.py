"""Object stores through pyarrow: how long one may stay silent, and what it cannot do at once.

Folders and files are files.py's.
"""

import errno
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

CONNECT_S = 3.0
SILENCE_S = 10.0
"""No byte for this long in the middle of a request: it has failed."""
ATTEMPTS = 4
"""Of one request. pyarrow's own rule is 30, however long each takes: minutes if a store hangs."""
GCS_PATIENCE = "retry_limit_seconds=60"
LARGEST_COPY_BYTES = 5 * 2**30
"""S3 copies no larger object in one request."""
READS = 100
REFUSALS = (
    "ACCESS_DENIED",
    "NO_SUCH_BUCKET",
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "Unable to load lib",
    "' not found",
)
"""Words of errors that no waiting mends; the others are of a store that is away."""
AWAY = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
)
"""What a mount says whose server is away."""
AWAY_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Half a minute: nothing trains meanwhile, and what follows is the end of the run."""

UNRESOLVED = re.compile(r"[Rr]esolve host: ([\w.-]+)")
"""What curl says, whichever library uses it."""

HIDDEN = "***"
QUALIFIERS = (
    "access|account|api|auth|aws|azure|bearer|client|encryption|gcp|github|gitlab|hf|hub|"
    "huggingface|openai|private|refresh|sas|secret|security|service|session|shared|signing|ssh|"
    "storage|wandb"
)
"""What makes a key or a token a secret among other words: there are sort keys and pad tokens."""
IS_SECRET = re.compile(
    r"(secret|password|passwd|passphrase|credential)s? | sig "
    rf"| ({QUALIFIERS}) ?(key|token)s? "
)
"""In a name's words, with a space around each."""
SLASH_IN_SECRET = re.compile(r"(?!\[)[^/@:]*:(?!\d*/)[^@/]*/.*@")
"""Begins what follows `://`, where else a port would be."""

T = TypeVar("T")
COPY_BLOCK_BYTES = 16 * 2**20


class StoreAway(OSError):
    """The storage did not take or give something for as long as everybody waits."""


def is_secret(name: str) -> bool:
    """By its words: `api_key`, `accessKeys`, `HF_TOKEN`; but not `sort_key`, `max_tokens`."""
    words = [word.lower() for word in re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return words in (["key"], ["token"]) or IS_SECRET.search(f" {' '.join(words)} ") is not None


def shown_uri(place: str) -> str:
    """A path or URI for people, logs and records: without passwords and keys."""
    if "://" not in place:
        return place
    scheme, _, rest = place.partition("://")
    path, mark, query = rest.partition("?")
    if SLASH_IN_SECRET.match(path):  # as many keys of AWS have one; no store takes such a URI
        path = f"{HIDDEN}@{path.rpartition('@')[2]}"
    authority, slash, inside = path.partition("/")
    if "@" in authority:
        authority = f"{HIDDEN}@{authority.rpartition('@')[2]}"
    parts = (part.partition("=") for part in query.split("&"))
    shown = [f"{n}{eq}{HIDDEN if is_secret(n) else value}" for n, eq, value in parts]
    return f"{scheme}://{authority}{slash}{inside}{mark}{'&'.join(shown)}"


def from_uri(place: str) -> tuple[Any, str]:
    """The filesystem and the path in it. A request that is not answered raises OSError within
    about a minute. Raises OSError and ValueError, too, for a URI that says nothing."""
    import pyarrow.fs  # pyright: ignore[reportMissingTypeStubs]

    arrow_fs: Any = pyarrow.fs  # has no type stubs
    if place.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in place:
        place += ("&" if "?" in place else "?") + GCS_PATIENCE
    filesystem, path = arrow_fs.FileSystem.from_uri(place)
    if not path and filesystem.type_name in ("s3", "gcs"):
        raise ValueError("it names no bucket")
    if filesystem.type_name == "s3":
        settings = filesystem.__reduce__()[1][0]  # what the URI said, as pickling keeps it
        limits = {
            "connect_timeout": CONNECT_S,
            "request_timeout": SILENCE_S,
            "retry_strategy": arrow_fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        }
        filesystem = arrow_fs.S3FileSystem(**{**settings, **limits})
    return filesystem, path


def is_refused(error: OSError) -> bool:
    """Whether it is no outage."""
    text = str(error)
    is_own = isinstance(error, PermissionError) or error.errno == errno.ENAMETOOLONG
    return is_own or any(words in text for words in REFUSALS)


def unknown_host(error: OSError) -> str:
    """The host of a store that has no address, if that is why it does not answer; else empty. A
    name server that does not answer either may know it later."""
    found = UNRESOLVED.search(str(error))
    if found is None:
        return ""
    try:
        socket.getaddrinfo(found[1], None)
    except socket.gaierror as refusal:
        return "" if refusal.errno == socket.EAI_AGAIN else found[1]
    return ""


def patiently(
    read: Callable[[], T],
    rest: Callable[[float], None] = time.sleep,
    pauses_s: Sequence[float] = AWAY_PAUSES_S,
    tell: Callable[[OSError, float], None] | None = None,
) -> T:
    """`read()`, once more after each pause while the storage does not answer; then its OSError.

    rest: makes a pause of so many seconds. tell: told of each error, and of the pause after it.
    """
    for pause_s in pauses_s:
        try:
            return read()
        except OSError as error:
            (tell or tell_away)(error, pause_s)
            rest(pause_s)
    return read()


def tell_away(error: OSError, pause_s: float) -> None:
    said = f'storage is away pause_s={pause_s} reason="{error}"'
    print(said, file=sys.stderr, flush=True)


def read_whole(filesystem: Any, path: str) -> bytes:
    """One version of a file that may be replaced or deleted meanwhile: pyarrow asks for its size
    first, and reads no more than that of a longer version that came in between. Of a file that was
    deleted it says no such thing: the store's answer is longer than the room for the file."""
    for _ in range(READS):
        with filesystem.open_input_file(path) as file:
            size: int = file.size()
            try:
                content: bytes = file.read_at(size, 0)
            except OSError:
                if filesystem.get_file_info(path).size == size:
                    raise
                continue
        if filesystem.get_file_info(path).size == len(content):
            return content
    raise OSError(f"{path} was replaced {READS} times while it was read")


def copy_file(filesystem: Any, source: str, size_bytes: int, target: str) -> None:
    """size_bytes: of the source. The store copies by itself where it can."""
    if size_bytes <= LARGEST_COPY_BYTES:
        filesystem.copy_file(source, target)
        return
    with (
        filesystem.open_input_stream(source) as old,
        filesystem.open_output_stream(target) as new,
    ):
        while block := old.read(COPY_BLOCK_BYTES):
            new.write(block)
