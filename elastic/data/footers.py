"""From a source to its plan: lists the files and reads their footers, a few bytes of each file."""

import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.fs as pa_fs  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pa_parquet  # pyright: ignore[reportMissingTypeStubs]

from elastic.data.crashing import crashes
from elastic.data.plan import Plan, PlannedFile
from elastic.data.source import ParquetSource, is_uri
from elastic.protocol.errors import BadData, WrongInput
from elastic.store.remote import from_uri

arrow: Any = pa  # has no type stubs
parquet: Any = pa_parquet
arrow_fs: Any = pa_fs
SUFFIXES = (".parquet", ".pq", ".parq")
WIDTHS = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}
MAX_FOOTERS = 16
"""Footers that are read at the same time."""


def make_plan(source: ParquetSource, seed: int, *, is_wary: bool = False) -> Plan:
    """WrongInput if there is no row, a footer cannot be read, or the files' columns differ.

    is_wary: a process that made this plan has died: another one shows first whether a file is the
    reason.
    """
    roots = range(len(source.paths))
    listed = {found.path: found for root in roots for found in list_files(source, root)}
    _refuse_twins(source, listed.values())
    where = " and ".join(shown(source.place(path)) for path in source.paths)
    if not listed:
        raise WrongInput(f"{where}: no Parquet file there ({SUFFIXES})")
    ordered = [listed[path] for path in sorted(listed)]
    crashing = _crashing(source, ordered) if is_wary else {}
    with ThreadPoolExecutor(MAX_FOOTERS) as pool:
        read = list(pool.map(partial(_footer, source, crashing), ordered))
    files = tuple(file for file, _ in read)
    types = _common_types(source, read)
    plan = Plan(source, seed, files, columns_text(types), tuple(types))
    if not plan.num_rows:
        raise WrongInput(f"{where}: the Parquet files hold no row")
    return plan


def _refuse_twins(source: ParquetSource, files: Collection[PlannedFile]) -> None:
    """WrongInput if a file is named as a local path and as a URI: its rows would be used twice."""
    found: dict[str, str] = {}
    for file in files:
        if is_uri(file.path) and not file.path.startswith("file://"):
            continue
        twin = found.setdefault(source.place(file.inside), file.path)
        if twin != file.path:
            raise WrongInput(f"{file.path} and {twin} are one file; name it once")


@lru_cache(maxsize=16)
def open_filesystem(path: str) -> tuple[Any, str]:
    """The pyarrow filesystem of a path or URI, and the path in it; WrongInput if unusable. One per
    process: it keeps its connections."""
    if "://" not in path:
        return arrow_fs.LocalFileSystem(), path
    try:
        return from_uri(path)
    except (OSError, ValueError) as error:
        raise WrongInput(f"data path {shown(path)!r} cannot be used: {_line(error)}") from error


def shown(path: str) -> str:
    """A path or URI for people: without credentials and parameters."""
    if "://" not in path:
        return path
    return re.sub("://[^/@]*@", "://", path.partition("?")[0])


def list_files(source: ParquetSource, root: int) -> list[PlannedFile]:
    """The Parquet files of one of the source's paths. WrongInput if there is nothing."""
    path = source.paths[root]
    place = source.place(path)
    filesystem, inside = open_filesystem(place)
    try:
        found = filesystem.get_file_info(inside)
        if found.type == arrow_fs.FileType.File:
            return [_listed(source, root, found, inside)]
        if found.type == arrow_fs.FileType.NotFound:
            raise WrongInput(f"data path {shown(place)!r} does not exist")
        top = inside.rstrip("/")
        infos = filesystem.get_file_info(arrow_fs.FileSelector(top, recursive=True))
    except OSError as error:
        raise WrongInput(f"data path {shown(place)!r} cannot be listed: {_line(error)}") from error
    return [
        _listed(source, root, info, top)
        for info in infos
        if info.type == arrow_fs.FileType.File
        and info.base_name.endswith(SUFFIXES)
        and not any(p.startswith((".", "_")) for p in info.path[len(top) :].split("/"))
    ]


def _listed(source: ParquetSource, root: int, info: Any, top: str) -> PlannedFile:
    """A file in `top`, which is the root in its filesystem."""
    path = source.paths[root]
    if is_uri(path):
        scheme = path.partition("://")[0] + "://"
        return PlannedFile(scheme + info.path, info.path, root, info.size, ())
    name = str(Path(path, info.path[len(top) :].lstrip("/")))
    return PlannedFile(name, name, root, info.size, ())


def find(source: ParquetSource, file: PlannedFile) -> tuple[Any, str]:
    """The filesystem that holds a file, and the file's path in it."""
    root = source.paths[file.root]
    filesystem, _ = open_filesystem(source.place(root))
    return filesystem, file.inside if is_uri(root) else source.place(file.inside)


def is_there(source: ParquetSource, file: PlannedFile) -> bool:
    """Whether what holds a file answers: what cannot be read in it is missing or damaged then. On
    a node that lacks a mount, a local path is not there, or is an empty directory."""
    _, top = open_filesystem(source.place(source.paths[file.root]))
    filesystem, inside = find(source, file)
    try:
        filesystem.get_file_info(inside)
        if filesystem.type_name != "local":
            return True
        folder = Path(top).parent if inside == top else Path(top)
        return any(folder.iterdir())
    except OSError:
        return False


def _crashing(source: ParquetSource, files: Sequence[PlannedFile]) -> dict[str, str]:
    """Files whose footer ends the process that reads it -> with which signal."""
    roots = [source.place(path) for path in source.paths]
    calls = [[roots[file.root], find(source, file)[1], source.columns] for file in files]
    found = crashes((__name__, "read_footer"), calls, at_once=MAX_FOOTERS)
    return {files[place].path: signal for place, signal in found.items()}


def _footer(
    source: ParquetSource, crashing: Mapping[str, str], file: PlannedFile
) -> tuple[PlannedFile, Any]:
    try:
        if file.path in crashing:
            what = f"the process that reads it ends with {crashing[file.path]}"
            raise BadData(file.path, f"the footer cannot be read: {what}")
        return _read_footer(source, file)
    except MemoryError as error:
        raise WrongInput(f"{file.path}: no memory to read the footer: {_line(error)}") from error
    except BadData as error:
        if not is_there(source, file):
            raise WrongInput(str(error)) from error
        if source.on_bad_file == "raise":
            what = f'{error}; repair or remove it, or use parquet(..., on_bad_file="skip")'
            raise WrongInput(what) from error
        if file.path in crashing:
            return replace(file, problem=str(error)), None
    try:  # once more: what passes is no damage
        return _read_footer(source, file)
    except BadData as error:
        return replace(file, problem=str(error)), None


def _read_footer(source: ParquetSource, file: PlannedFile) -> tuple[PlannedFile, Any]:
    root = source.place(source.paths[file.root])
    try:
        groups, schema = read_footer(root, find(source, file)[1], source.columns)
    except MemoryError:
        raise
    except (OSError, arrow.ArrowException, ValueError) as error:
        raise BadData(file.path, f"the footer cannot be read: {_line(error)}") from error
    return replace(file, row_groups=groups), schema


def read_footer(
    root: str, inside: str, columns: Sequence[str] | None
) -> tuple[tuple[tuple[int, int], ...], Any]:
    """(rows, bytes) of each row group, and the schema; what pyarrow raises passes through."""
    filesystem, _ = open_filesystem(root)
    with filesystem.open_input_file(inside) as opened:
        found = parquet.ParquetFile(opened)
        metadata, schema = found.metadata, found.schema_arrow
    groups = tuple(
        (metadata.row_group(g).num_rows, _size_of(metadata.row_group(g), columns))
        for g in range(metadata.num_row_groups)
    )
    return groups, schema


def _size_of(row_group: Any, columns: Sequence[str] | None) -> int:
    chunks = [row_group.column(i) for i in range(row_group.num_columns)]
    wanted = [c for c in chunks if columns is None or is_of(c.path_in_schema, columns)]
    return sum(max(c.total_uncompressed_size, _decoded_bytes(c)) for c in wanted)


def is_of(path: str, columns: Sequence[str]) -> bool:
    """Whether a leaf is of one of these columns; their names may have dots, too."""
    return any(path == name or path.startswith(name + ".") for name in columns)


def _decoded_bytes(chunk: Any) -> int:
    """At least what the values take in memory: encodings can make a file's pages much smaller."""
    if chunk.physical_type == "BOOLEAN":
        return chunk.num_values // 8
    width = WIDTHS.get(chunk.physical_type)
    if width is None:  # texts: an offset each, and the shorter of those that the footer has
        found = chunk.statistics if chunk.has_dictionary_page else None
        ends = [found.min_raw, found.max_raw] if found and found.has_min_max else []
        width = 4 + min((len(end) for end in ends), default=0)
    return chunk.num_values * width


def _common_types(source: ParquetSource, read: Sequence[tuple[PlannedFile, Any]]) -> dict[str, str]:
    """Types of the columns, which all files must share; their order and whether they may be null
    need not agree."""
    first: tuple[str, dict[str, str]] | None = None
    for file, schema in read:
        if schema is None or not file.num_rows:  # writers give empty files whatever types
            continue
        types = {field.name: str(field.type) for field in schema}
        if len(types) < len(schema):
            raise WrongInput(f"{file.path} has two columns of one name: {schema.names}")
        for name in source.columns or ():
            if name not in types:
                raise WrongInput(f"{file.path} has no column {name!r}; it has {sorted(types)}")
        types = {name: types[name] for name in source.columns or types}
        if first is None:
            first = (file.path, types)
        elif types != first[1]:
            raise WrongInput(_drift(first[0], first[1], file.path, types))
    return first[1] if first else {}


def columns_text(types: Mapping[str, str]) -> str:
    """Names and types as a plan has them."""
    return ", ".join(f"{name}: {kind}" for name, kind in sorted(types.items()))


def _drift(path: str, expected: dict[str, str], other: str, found: dict[str, str]) -> str:
    names = sorted(expected.keys() | found.keys())
    name = next(n for n in names if expected.get(n) != found.get(n))
    before, now = expected.get(name, "absent"), found.get(name, "absent")
    return (
        f"column {name!r} is {before} in {path} and {now} in {other}; make the files "
        "agree, or leave the column out with columns=[...]"
    )


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
