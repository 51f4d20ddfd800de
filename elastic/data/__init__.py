"""Data that the run reads itself: `elastic.data.parquet(...)` and what goes with it."""

from elastic.data.packing import TokenPacking, pack_tokens
from elastic.data.source import ParquetSource, parquet

__all__ = ["ParquetSource", "TokenPacking", "pack_tokens", "parquet"]
