"""`pack_tokens`: documents become one endless row of tokens, cut into rows of a fixed length.

A row may span documents, windows and epochs; the cutting is the stream's (a row is `length`
consecutive tokens), what happens here is one window's documents to tokens.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

from elastic.protocol.errors import BadData

arrow: Any = pa  # has no type stubs
TOKENS, STARTS = "tokens", "starts"
COLUMN = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPacking:
    """Made by `pack_tokens`, which explains the fields."""

    length: int
    column: str
    encode: Callable[[Any], Any] | None
    separator: int | None

    def to_json(self) -> list[Any]:
        """For the plan's record, which names the column if it is not the usual one."""
        found: list[Any] = [self.length, self.separator]
        return found if self.column == COLUMN else [*found, self.column]

    def tokens_of(self, table: Any, where: Callable[[int], str]) -> tuple[np.ndarray, np.ndarray]:
        """All tokens of the documents in order, and where each document starts (int64).

        where: from a document's row in the table to words, for BadData.
        """
        if self.column not in table.column_names:
            what = f"there is no column {self.column!r} in {table.column_names}"
            raise BadData(f"{where(0)}: pack_tokens", what)
        parts: list[np.ndarray] = []
        for row, document in enumerate(table.column(self.column)):
            try:
                parts.append(self._document(document))
            except BadData as error:
                place = f"{where(row)}: {error.place}"
                raise BadData(place, error.what, error.traceback_text) from None
        sizes = np.array([len(part) for part in parts], np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[: len(parts)]
        whole = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        return whole, starts

    def _document(self, scalar: Any) -> np.ndarray:
        if self.encode is not None:
            tokens = self._encoded(scalar.as_py())
        elif isinstance(scalar, arrow.StringScalar | arrow.LargeStringScalar):
            tokens = np.frombuffer(scalar.as_buffer() or b"", np.uint8)
        else:
            tokens = np.asarray(self._ids(scalar) if scalar.is_valid else np.zeros(0, np.int64))
        tokens = cast("np.ndarray", tokens)
        if self.separator is None:
            return tokens
        return np.concatenate(
            [tokens, np.array([self.separator], _fitting(tokens, self.separator))]
        )

    def _encoded(self, document: Any) -> np.ndarray:
        assert self.encode is not None
        try:
            tokens = np.asarray(self.encode(document))
        except Exception as error:
            what = f"encode raised {type(error).__name__}: {error}"
            raise BadData("pack_tokens", what, traceback.format_exc()) from None
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise BadData(
                "pack_tokens",
                f"encode gave {tokens.dtype} of shape {tokens.shape}; return a list of token ids",
            )
        return tokens if len(tokens) else np.zeros(0, np.uint8)

    def _ids(self, scalar: Any) -> Any:
        values = getattr(scalar, "values", None)
        if values is None or not arrow.types.is_integer(values.type) or values.null_count:
            raise BadData(
                f"column {self.column!r}",
                f"has type {scalar.type}, and pack_tokens takes text or lists of token ids; "
                "give it an encode=...",
            )
        return values


def _fitting(tokens: np.ndarray, separator: int) -> Any:
    """The tokens' own type where it holds the separator: a text's bytes stay bytes."""
    limits = np.iinfo(tokens.dtype) if tokens.dtype.kind in "iu" else np.iinfo(np.int64)
    return tokens.dtype if limits.min <= separator <= limits.max else np.int64


def pack_tokens(
    *,
    length: int,
    column: str = COLUMN,
    encode: Callable[[Any], Any] | None = None,
    separator: int | None = None,
) -> TokenPacking:
    """As the last `transform` of `parquet(...)`: documents become rows of `length` tokens.

    A batch is {"tokens": int64 (micro_batch, length)}. For next-token prediction take length =
    context + 1. No token is dropped or padded: a row may begin in one document, row group or
    epoch and end in the next.

    length: the tokens of a row.
    column: the documents: text, or lists of token ids.
    encode: a document to its token ids (torch, numpy and `random` are seeded by (seed, epoch,
        window) before the first). None: the ids in a list column, the UTF-8 bytes of a text.
    separator: a token id put after each document; None for none.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    return TokenPacking(length=length, column=column, encode=encode, separator=separator)
