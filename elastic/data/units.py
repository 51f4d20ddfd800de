"""One row group of a Parquet file, read and verified.

What becomes of its rows is reading.py's; footers of whole data sets are footers.py's.
"""

from collections.abc import Sequence
from socket import gethostname
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pa_parquet  # pyright: ignore[reportMissingTypeStubs]

from elastic.data.crashing import crashes
from elastic.data.footers import columns_text, find, is_of, is_there, open_filesystem
from elastic.data.plan import Plan, Unit
from elastic.protocol.errors import BadData
from elastic.store.block_format import crc32

arrow: Any = pa  # has no type stubs
parquet: Any = pa_parquet
PIECE_BYTES = 4 * 2**20
FOOTER_END_BYTES = 8
"""The footer's length and the format's mark."""


class Unreachable(BadData):
    """The store does not answer, or memory is short: this says nothing about the file, which is not
    left out."""


def read_unit(plan: Plan, unit: Unit, checksum: int | None = None) -> tuple[Any, int | None]:
    """Its table and the checksum of its bytes, None in an object store, which checks them itself.

    checksum: of what was read before; pages need not have one. BadData names the unit.
    """
    filesystem, inside = find(plan.source, unit.file)
    found: int | None = None
    try:
        with filesystem.open_input_file(inside) as opened:
            if opened.size() != unit.file.size_bytes:
                raise _changed(unit, f"{unit.file.size_bytes} bytes", f"{opened.size()}")
            file = _opened(opened, filesystem)
            if (count := file.metadata.num_row_groups) <= unit.row_group:
                raise _changed(unit, f"row group {unit.row_group}", f"{count} of them")
            if filesystem.type_name == "local":
                found = _checksum(opened, file.metadata, unit, plan.source.columns)
            table = _row_group(file, unit.row_group, plan.source.columns)
    except MemoryError as error:
        raise Unreachable(str(unit), f"no memory to read it: {error}") from error
    except (OSError, arrow.ArrowException, ValueError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        if is_there(plan.source, unit.file):
            raise BadData(str(unit), f"cannot be read: {line}") from error
        raise Unreachable(str(unit), f"cannot be read: {line}; on {gethostname()}") from error
    if checksum is not None and found != checksum:
        what = "its bytes are not those that were read in an earlier epoch; restore the file"
        raise BadData(str(unit), what)
    if table.num_rows != unit.num_rows:
        raise _changed(unit, f"{unit.num_rows} rows", f"{table.num_rows}")
    columns = columns_text({field.name: str(field.type) for field in table.schema})
    if columns != plan.schema:
        raise _changed(unit, f"columns {plan.schema}", columns)
    return _uniform(plan, table), found


def _opened(opened: Any, filesystem: Any) -> Any:
    is_local = filesystem.type_name == "local"
    return parquet.ParquetFile(opened, page_checksum_verification=True, pre_buffer=not is_local)


def _row_group(file: Any, row_group: int, columns: tuple[str, ...] | None) -> Any:
    names = None if columns is None else list(columns)
    return file.read_row_group(row_group, columns=names, use_threads=False)


def _changed(unit: Unit, before: str, now: str) -> BadData:
    what = f"the file changed since the plan was made: {before} before, {now} now"
    return BadData(str(unit), what)


def _checksum(opened: Any, metadata: Any, unit: Unit, columns: tuple[str, ...] | None) -> int:
    """CRC-32 of the footer and of what the row group's columns have in the file."""
    end = unit.file.size_bytes - FOOTER_END_BYTES
    length = int.from_bytes(opened.read_at(FOOTER_END_BYTES, end)[:4], "little")
    ranges = [(end - length, unit.file.size_bytes), *_ranges(metadata, unit.row_group, columns)]
    found = 0
    for at, stop in ranges:
        while at < min(stop, unit.file.size_bytes):
            piece = opened.read_at(min(PIECE_BYTES, stop - at), at)
            found, at = crc32(memoryview(piece), found), at + len(piece)
    return found


def _ranges(
    metadata: Any, row_group: int, columns: tuple[str, ...] | None
) -> list[tuple[int, int]]:
    """Where the columns of a row group are in the file."""
    found: list[tuple[int, int]] = []
    group = metadata.row_group(row_group)
    for chunk in (group.column(i) for i in range(group.num_columns)):
        if columns is None or is_of(chunk.path_in_schema, columns):
            has_dictionary = chunk.has_dictionary_page and chunk.dictionary_page_offset
            first = chunk.dictionary_page_offset if has_dictionary else chunk.data_page_offset
            found.append((first, first + chunk.total_compressed_size))
    return found


def _uniform(plan: Plan, table: Any) -> Any:
    """The columns in the plan's order, any of them nullable: neither depends on the file."""
    fields = [table.schema.field(name).with_nullable(True) for name in plan.columns]
    schema = arrow.schema(fields, metadata=table.schema.metadata)
    return arrow.Table.from_arrays([table.column(name) for name in plan.columns], schema=schema)


def crashing_units(plan: Plan, units: Sequence[Unit]) -> dict[int, str]:
    """Units that end the process that reads them -> with which signal."""
    source, columns = plan.source, plan.source.columns
    roots = [source.place(path) for path in source.paths]
    calls = [[roots[u.file.root], find(source, u.file)[1], u.row_group, columns] for u in units]
    found = crashes((__name__, "decode"), calls)
    return {units[place].index: signal for place, signal in found.items()}


def decode(root: str, inside: str, row_group: int, columns: list[str] | None) -> None:
    """As `read_unit` reads."""
    filesystem, _ = open_filesystem(root)
    names = None if columns is None else tuple(columns)
    with filesystem.open_input_file(inside) as opened:
        file = _opened(opened, filesystem)
        _ranges(file.metadata, row_group, names)
        _row_group(file, row_group, names)
