"""One row group of a Parquet file, read and verified.

What becomes of its rows is reading.py's; footers of whole data sets are footers.py's.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from socket import gethostname
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pa_parquet  # pyright: ignore[reportMissingTypeStubs]

from elastic.data.footers import columns_text, find, is_of, is_there, open_filesystem
from elastic.data.plan import Plan, Unit
from elastic.protocol.errors import BadData
from elastic.store.checkpoint_files import crc32

arrow: Any = pa  # has no type stubs
parquet: Any = pa_parquet
PIECE_BYTES = 4 * 2**20
FOOTER_END_BYTES = 8
"""The footer's length and the format's mark."""
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that a process gives itself; who is short of memory is killed by another one."""
TRIAL_S = 600.0
TRIAL = """
import json, sys
asked = json.load(sys.stdin)
sys.path[:] = asked["sys_path"]
from elastic.data.units import decode_all
decode_all(asked["order"])
"""


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
    ranges = [(end - length, unit.file.size_bytes)]
    group = metadata.row_group(unit.row_group)
    for chunk in (group.column(i) for i in range(group.num_columns)):
        if columns is None or is_of(chunk.path_in_schema, columns):
            has_dictionary = chunk.has_dictionary_page and chunk.dictionary_page_offset
            first = chunk.dictionary_page_offset if has_dictionary else chunk.data_page_offset
            ranges.append((first, first + chunk.total_compressed_size))
    found = 0
    for at, stop in ranges:
        while at < min(stop, unit.file.size_bytes):
            piece = opened.read_at(min(PIECE_BYTES, stop - at), at)
            found, at = crc32(memoryview(piece), found), at + len(piece)
    return found


def _uniform(plan: Plan, table: Any) -> Any:
    """The columns in the plan's order, any of them nullable: neither depends on the file."""
    fields = [table.schema.field(name).with_nullable(True) for name in plan.columns]
    schema = arrow.schema(fields, metadata=table.schema.metadata)
    return arrow.Table.from_arrays([table.column(name) for name in plan.columns], schema=schema)


# --- files that end the process that reads them ---------------------------------------
def crashes(plan: Plan, units: Sequence[Unit]) -> dict[int, str]:
    """Units that end a process of their own when it reads them -> with which signal."""
    found: dict[int, str] = {}
    left = list(units)
    while left:
        try:
            done = subprocess.run(
                [sys.executable, "-c", TRIAL],
                input=json.dumps({"order": _order(plan, left), "sys_path": sys.path}).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=TRIAL_S,
            )
        except subprocess.TimeoutExpired:
            break
        begun = done.stdout.count(b"\n")
        if -done.returncode not in CRASHES or not begun:
            break
        found[left[begun - 1].index] = signal.Signals(-done.returncode).name
        left = left[begun:]
    return found


def _order(plan: Plan, units: Sequence[Unit]) -> list[Any]:
    source, columns = plan.source, plan.source.columns
    roots = [source.place(path) for path in source.paths]
    return [[roots[u.file.root], find(source, u.file)[1], u.row_group, columns] for u in units]


def decode_all(order: list[Any]) -> None:
    """As `read_unit` reads them, with a line on stdout before each: whoever counts them knows which
    one has ended this process."""
    for root, inside, row_group, columns in order:
        print(flush=True)
        filesystem, _ = open_filesystem(root)
        names = None if columns is None else tuple(columns)
        passing = suppress(OSError, MemoryError, ValueError, arrow.ArrowException)
        with passing, filesystem.open_input_file(inside) as opened:
            _row_group(_opened(opened, filesystem), row_group, names)
