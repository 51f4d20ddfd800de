"""One window of an epoch, read, transformed and shuffled: what a Ray task does for the feed.

A function of (plan, epoch, window): whoever reads it again gets the same rows in the same order.
"""

import random
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

from elastic.data.packing import TOKENS
from elastic.data.permutation import permutation
from elastic.data.plan import MAX_TOLD, Plan, Unit
from elastic.data.units import Unreachable, crashing_units, read_unit
from elastic.protocol.errors import BadData

arrow: Any = pa  # has no type stubs
UNIT_SHIFT = 32
"""Where transforms may change the number of rows, an id is unit << 32 | place in its output."""
DOCUMENT_SHIFT = 20
"""The id of a token is its document's id << 20, plus its place in it; of a row of packed tokens,
its first token's. They are for records only: ids of very long documents, or of many units, may
coincide. Those of documents (`WindowRows.ids`) never do."""


@dataclass(frozen=True, slots=True)
class WindowRows:
    """A window's share of the stream."""

    table: Any
    """pyarrow.Table, each column in one chunk."""
    ids: np.ndarray
    """int64, which row of the data each element is; for tokens, each document."""
    starts: np.ndarray | None
    """For tokens: the element at which each document starts; else None."""
    checksums: Mapping[int, int] = field(default_factory=dict[int, int])
    """Unit -> of its bytes in the file, of those that were read from a disk."""

    @property
    def count(self) -> int:
        """Elements of the stream."""
        return int(self.table.num_rows)

    @property
    def size_bytes(self) -> int:
        starts = 0 if self.starts is None else self.starts.nbytes
        return int(self.table.nbytes) + self.ids.nbytes + starts

    def ids_of(self, elements: np.ndarray) -> np.ndarray:
        """int64, the row ids of some elements; of a token, see DOCUMENT_SHIFT."""
        if self.starts is None:
            return self.ids[elements]
        document = np.searchsorted(self.starts, elements, side="right") - 1
        return (self.ids[document] << DOCUMENT_SHIFT) + elements - self.starts[document]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A unit that could not be read and was left out, as the source wants it."""

    unit: int
    problem: str


def read_window(
    plan: Plan,
    epoch: int,
    window: int,
    left_out: Collection[int] = (),
    checksums: Mapping[int, int] | None = None,
    *,
    is_wary: bool = False,
) -> tuple[WindowRows, list[Skipped]]:
    """The window's rows, and what was skipped in it.

    left_out: units that were skipped when the window was read first; they stay so. checksums: of
    units that were read before. is_wary: a process that read this window has died: another one
    shows first whether a unit is the reason.
    BadData names the file and row group that cannot be read, or where the transform raised.
    """
    tables: list[Any] = []
    ids: list[np.ndarray] = []
    skipped: list[Skipped] = []
    found: dict[int, int] = {}
    known = checksums or {}
    units = plan.windows(epoch)[window]
    crashing = crashing_units(plan, units) if is_wary else {}
    for unit in units:
        if unit.index in left_out:
            skipped.append(Skipped(unit.index, ""))
            continue
        try:
            if unit.index in crashing:
                what = f"cannot be read: the process that reads it ends with {crashing[unit.index]}"
                raise BadData(str(unit), what)
            table, checksum = _read_patiently(plan, unit, known.get(unit.index))
        except BadData as error:
            if plan.source.on_bad_file == "raise" or isinstance(error, Unreachable):
                raise
            skipped.append(Skipped(unit.index, str(error)))
            continue
        table = _transformed(plan, epoch, unit, table)
        tables.append(table)
        ids.append(_ids(plan, unit, table.num_rows))
        if checksum is not None:
            found[unit.index] = checksum
    return replace(_joined(plan, epoch, window, tables, ids), checksums=found), skipped


def _joined(
    plan: Plan, epoch: int, window: int, tables: Sequence[Any], ids: Sequence[np.ndarray]
) -> WindowRows:
    if not tables:
        return WindowRows(arrow.table({}), np.zeros(0, np.int64), None)
    rows = np.concatenate(ids)
    try:
        table = arrow.concat_tables(tables)
    except arrow.ArrowInvalid as error:
        raise BadData(
            f"epoch {epoch}, window {window}",
            "the transform gives differing columns: " + " ".join(str(error).split()),
        ) from error
    try:
        if plan.source.shuffle:
            order = permutation(len(rows), "rows", plan.seed, epoch, window)
            table, rows = table.take(arrow.array(order)), rows[order]
        if plan.source.packing is None:
            return WindowRows(table.combine_chunks(), rows, None)
    except arrow.ArrowException as error:
        raise BadData(
            units_text(plan.windows(epoch)[window]),
            f"cannot be joined: {' '.join(str(error).split())}; with more than 2 GiB of text "
            "take a smaller window_bytes or smaller row groups, or cast to large_string",
        ) from error
    packing = plan.source.packing
    where = partial(_row_text, plan, plan.windows(epoch)[window], rows)
    call = partial(packing.tokens_of, table, where)
    tokens, starts = _seeded(call, plan.seed, epoch, f"window {window}")
    return WindowRows(arrow.table({TOKENS: tokens}), rows, starts)


def units_text(units: Sequence[Unit]) -> str:
    """For an error that any of them may have caused."""
    more = f" and {len(units) - MAX_TOLD} more" if len(units) > MAX_TOLD else ""
    return "; ".join(str(unit) for unit in units[:MAX_TOLD]) + more


def _row_text(plan: Plan, units: Sequence[Unit], rows: np.ndarray, row: int) -> str:
    """Which row of the data a window's row is, by its id."""
    if row >= len(rows):
        return units_text(units)
    if _keeps_rows(plan):
        unit = next(u for u in units if 0 <= rows[row] - u.first_row < u.num_rows)
        return f"{unit}, row {rows[row] - unit.first_row}"
    index, place = divmod(int(rows[row]), 1 << UNIT_SHIFT)
    return f"{plan.units[index]}, row {place} of what the transform gives"


def _keeps_rows(plan: Plan) -> bool:
    return plan.source.keeps_rows or not plan.source.transforms


def _ids(plan: Plan, unit: Unit, count: int) -> np.ndarray:
    if not _keeps_rows(plan):
        return (unit.index << UNIT_SHIFT) + np.arange(count, dtype=np.int64)
    if count != unit.num_rows:
        raise BadData(
            str(unit),
            f"the transform gives {count} rows for {unit.num_rows}, although keeps_rows=True",
        )
    return unit.first_row + np.arange(count, dtype=np.int64)


def _read_patiently(plan: Plan, unit: Unit, checksum: int | None) -> tuple[Any, int | None]:
    """Once more before it is left out: what passes is no damage."""
    try:
        return read_unit(plan, unit, checksum)
    except Unreachable:
        raise
    except BadData:
        return read_unit(plan, unit, checksum)


def _transformed(plan: Plan, epoch: int, unit: Unit, table: Any) -> Any:
    for transform in plan.source.transforms:
        call = partial(transform, table)
        try:
            table = _seeded(call, plan.seed, epoch, unit.index)
            if isinstance(table, dict):
                table = _tabled(cast("dict[str, Any]", table))
        except BadData:
            raise
        except Exception as error:
            raise BadData(
                str(unit),
                f"the transform raised {type(error).__name__}: {error}",
                traceback.format_exc(),
            ) from None
        if not isinstance(table, arrow.Table):
            raise BadData(
                str(unit),
                f"the transform returned a {type(table).__name__}; return a pyarrow.Table or a "
                "dict of column name to array",
            )
    return table


def _tabled(columns: dict[str, Any]) -> Any:
    """A table of arrays; those of torch and those with more dims, too."""
    arrays = {n: v.numpy() if hasattr(v, "numpy") else v for n, v in columns.items()}
    return arrow.table(
        {n: _tensors(v) if getattr(v, "ndim", 1) > 1 else v for n, v in arrays.items()}
    )


def _tensors(values: Any) -> Any:
    return arrow.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))


def _seeded(call: Callable[[], Any], seed: int, epoch: int, unit: int | str) -> Any:
    """Called again where it has just loaded torch, whose generator could not be seeded before."""
    had_torch = "torch" in sys.modules
    seed_transform(seed, epoch, unit)
    found = call()
    if had_torch or "torch" not in sys.modules:
        return found
    seed_transform(seed, epoch, unit)
    return call()


def seed_transform(seed: int, epoch: int, unit: int | str) -> None:
    """What a transform draws depends on the unit, not on the process or on who reads it."""
    digest = blake2b(
        f"{seed}:{epoch}:{unit}".encode(), digest_size=24, person=b"transform"
    ).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    torch = sys.modules.get("torch")  # only where the transform's module has it loaded
    if torch is not None:
        torch.manual_seed(int.from_bytes(digest[12:20], "little"))
