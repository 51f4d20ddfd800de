"""Rows of fed windows as a micro-batch: a dict of column name to tensor, strings as lists.

Tensors are copies: a window's memory is shared with other processes and may not be written to.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from elastic.data.packing import TOKENS
from elastic.protocol.errors import BadData


def columns_of(
    pieces: Sequence[Any], row_length: int, *, is_packed: bool | None = None
) -> dict[str, Any]:
    """pieces: consecutive parts of the stream, pyarrow tables. is_packed: they are tokens; None: if
    a row is more than one element. BadData names a column that cannot
    be a tensor, or that only some parts have."""
    if row_length > 1 if is_packed is None else is_packed:
        tokens = np.concatenate([p.column(TOKENS).to_numpy() for p in pieces]).astype(np.int64)
        return {TOKENS: torch.from_numpy(tokens.reshape(-1, row_length))}
    if any(p.column_names != pieces[0].column_names for p in pieces):
        raise BadData("the transform", f"gives differing columns: {[p.schema for p in pieces]}")
    return {
        name: joined(name, [_column(name, p.column(name)) for p in pieces])
        for name in pieces[0].column_names
    }


def samples_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The batch as single samples, for a workload's own `collate`."""
    count = len(next(iter(batch.values())))
    return [{name: values[i] for name, values in batch.items()} for i in range(count)]


def joined(name: str, parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    try:
        return torch.from_numpy(np.concatenate(parts))  # always a copy of our own, aligned
    except (ValueError, TypeError) as error:
        raise BadData(f"column {name!r}", f"cannot be one tensor: {error}") from error


def _column(name: str, column: Any) -> Any:
    """A numpy array or a list."""
    kind = column.type
    if column.null_count:
        raise BadData(f"column {name!r}", "has nulls; fill or drop them in a transform")
    if pa.types.is_dictionary(kind):
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        decoded = [c.dictionary_decode() for c in chunks]
        return _column(name, pa.chunked_array(decoded, kind.value_type))
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(column, pa.ChunkedArray):  # of no chunk
        column = pa.concat_arrays(column.chunks) if column.chunks else pa.array([], kind)
    if isinstance(column, pa.ExtensionArray):
        values = _column(name, column.storage)
        shape = getattr(kind, "shape", None)  # of tensors, Arrow's own and Ray Data's
        return values if shape is None else values.reshape(len(column), *shape)
    if _is_text(kind):
        return column.to_pylist()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists(name, column)
    if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False)
    raise BadData(
        f"column {name!r}",
        f"has type {kind}, which is no tensor; convert it in a transform or leave it out with "
        "columns=[...]",
    )


def _is_text(kind: Any) -> bool:
    types = pa.types
    is_string = types.is_string(kind) or types.is_large_string(kind)
    return is_string or types.is_binary(kind) or types.is_large_binary(kind)


def _lists(name: str, column: Any) -> Any:
    """Lists of one length are one array with one more dim."""
    inner = _column(name, column.flatten())
    lengths = set(column.value_lengths().to_pylist())
    if len(lengths) > 1:
        raise BadData(
            f"column {name!r}",
            f"holds lists of {min(lengths)} to {max(lengths)} values; pad or cut them in a "
            "transform, or use pack_tokens",
        )
    if isinstance(inner, list):
        raise BadData(f"column {name!r}", "holds lists of text; convert it in a transform")
    return inner.reshape(len(column), lengths.pop() if lengths else 0, *inner.shape[1:])
