"""From a source to its plan: lists the files and reads their footers, a few bytes of each file."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.fs as pa_fs  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pa_parquet  # pyright: ignore[reportMissingTypeStubs]

from elastic.data.plan import Plan, PlannedFile
from elastic.data.source import ParquetSource
from elastic.protocol.errors import WrongInput

arrow: Any = pa  # has no type stubs
parquet: Any = pa_parquet
arrow_fs: Any = pa_fs
SUFFIXES = (".parquet", ".pq", ".parq")
MAX_FOOTERS = 16
"""Footers that are read at the same time."""


def make_plan(source: ParquetSource, seed: int) -> Plan:
    """WrongInput if there is no row, a footer cannot be read, or the files' columns differ."""
    listed = sorted({entry for path in source.paths for entry in list_files(path)})
    if not listed:
        raise WrongInput(f"{' and '.join(source.paths)}: no Parquet file there ({SUFFIXES})")
    paths, sizes = [path for path, _ in listed], [size_bytes for _, size_bytes in listed]
    with ThreadPoolExecutor(MAX_FOOTERS) as pool:
        read = list(pool.map(partial(_footer, source), paths, sizes))
    files = tuple(file for file, _ in read)
    schema = _common_schema(source, read)
    plan = Plan(source, seed, files, schema)
    if not plan.num_rows:
        raise WrongInput(f"{' and '.join(source.paths)}: the Parquet files hold no row")
    return plan


def open_filesystem(path: str) -> tuple[Any, str]:
    """The pyarrow filesystem of a path or URI, and the path in it; WrongInput if unusable."""
    if "://" not in path:
        return arrow_fs.LocalFileSystem(), path
    try:
        return arrow_fs.FileSystem.from_uri(path)
    except (OSError, ValueError) as error:
        raise WrongInput(f"data path {path!r} cannot be used: {_line(error)}") from error


def list_files(path: str) -> list[tuple[str, int]]:
    """(path or URI, bytes) of the Parquet files there. WrongInput if there is nothing."""
    filesystem, inside = open_filesystem(path)
    prefix = path[: len(path) - len(inside)] if "://" in path else ""
    try:
        found = filesystem.get_file_info(inside)
        if found.type == arrow_fs.FileType.File:
            return [(path, found.size)]
        if found.type == arrow_fs.FileType.NotFound:
            raise WrongInput(f"data path {path!r} does not exist")
        root = inside.rstrip("/")
        infos = filesystem.get_file_info(arrow_fs.FileSelector(root, recursive=True))
    except OSError as error:
        raise WrongInput(f"data path {path!r} cannot be listed: {_line(error)}") from error
    return [
        (prefix + info.path, info.size)
        for info in infos
        if info.type == arrow_fs.FileType.File
        and info.base_name.endswith(SUFFIXES)
        and not any(p.startswith((".", "_")) for p in info.path[len(root) :].split("/"))
    ]


def _footer(source: ParquetSource, path: str, size_bytes: int) -> tuple[PlannedFile, Any]:
    filesystem, inside = open_filesystem(path)
    try:
        with filesystem.open_input_file(inside) as opened:
            file = parquet.ParquetFile(opened)
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, arrow.ArrowInvalid) as error:
        problem = f"{path}: the footer cannot be read: {_line(error)}"
        if source.on_bad_file == "skip":
            return PlannedFile(path, size_bytes, (), problem), None
        raise WrongInput(f'{problem}; repair or remove it, or use on_bad_file="skip"') from error
    groups = tuple(
        (metadata.row_group(g).num_rows, _size_of(metadata.row_group(g), source.columns))
        for g in range(metadata.num_row_groups)
    )
    return PlannedFile(path, size_bytes, groups), schema


def _size_of(row_group: Any, columns: Sequence[str] | None) -> int:
    chunks = [row_group.column(i) for i in range(row_group.num_columns)]
    wanted = [c for c in chunks if columns is None or c.path_in_schema.split(".")[0] in columns]
    return sum(c.total_uncompressed_size for c in wanted)


def _common_schema(source: ParquetSource, read: Sequence[tuple[PlannedFile, Any]]) -> str:
    """Names and types of the columns, which all files must share."""
    first: tuple[str, dict[str, str]] | None = None
    for file, schema in read:
        if schema is None or not file.num_rows:  # writers give empty files whatever types
            continue
        types = {field.name: str(field.type) for field in schema}
        for name in source.columns or ():
            if name not in types:
                raise WrongInput(f"{file.path} has no column {name!r}; it has {sorted(types)}")
        types = {name: types[name] for name in source.columns or types}
        if first is None:
            first = (file.path, types)
        elif types != first[1]:
            raise WrongInput(_drift(first[0], first[1], file.path, types))
    return ", ".join(f"{name}: {kind}" for name, kind in sorted(first[1].items())) if first else ""


def _drift(path: str, expected: dict[str, str], other: str, found: dict[str, str]) -> str:
    for name in sorted(expected.keys() | found.keys()):
        before, now = expected.get(name, "absent"), found.get(name, "absent")
        if before != now:
            return (
                f"column {name!r} is {before} in {path} and {now} in {other}; make the files "
                "agree, or leave the column out with columns=[...]"
            )
    return f"{other} has its columns in another order than {path}; name them with columns=[...]"


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
