"""Object stores through pyarrow: how long one may stay silent, and what it cannot do at once.

Folders and files are files.py's.
"""

from typing import Any

import pyarrow.fs  # pyright: ignore[reportMissingTypeStubs]

arrow_fs: Any = pyarrow.fs  # has no type stubs

CONNECT_S = 3.0
SILENCE_S = 10.0
"""No byte for this long in the middle of a request: it has failed."""
ATTEMPTS = 4
"""Of one request. pyarrow's own rule is 30, however long each takes: minutes if a store hangs."""
GCS_PATIENCE = "retry_limit_seconds=60"
LARGEST_COPY_BYTES = 5 * 2**30
"""S3 copies no larger object in one request."""
READS = 100
COPY_BLOCK_BYTES = 16 * 2**20


def from_uri(place: str) -> tuple[Any, str]:
    """The filesystem and the path in it. A request that is not answered raises OSError within
    about a minute. Raises OSError and ValueError, too, for a URI that says nothing."""
    if place.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in place:
        place += ("&" if "?" in place else "?") + GCS_PATIENCE
    filesystem, path = arrow_fs.FileSystem.from_uri(place)
    if filesystem.type_name == "s3":
        settings = filesystem.__reduce__()[1][0]  # what the URI said, as pickling keeps it
        limits = {
            "connect_timeout": CONNECT_S,
            "request_timeout": SILENCE_S,
            "retry_strategy": arrow_fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        }
        filesystem = arrow_fs.S3FileSystem(**{**settings, **limits})
    return filesystem, path


def read_whole(filesystem: Any, path: str) -> bytes:
    """One version of a file that may be replaced meanwhile: pyarrow asks for its size first, and
    reads no more than that of a longer version that came in between."""
    for _ in range(READS):
        with filesystem.open_input_file(path) as file:
            content: bytes = file.read_at(file.size(), 0)
        if filesystem.get_file_info(path).size == len(content):
            return content
    raise OSError(f"{path} was replaced {READS} times while it was read")


def copy_file(filesystem: Any, source: Any, target: str) -> None:
    """source: pyarrow's FileInfo. The store copies by itself where it can."""
    if source.size <= LARGEST_COPY_BYTES:
        filesystem.copy_file(source.path, target)
        return
    with (
        filesystem.open_input_stream(source.path) as old,
        filesystem.open_output_stream(target) as new,
    ):
        while block := old.read(COPY_BLOCK_BYTES):
            new.write(block)
