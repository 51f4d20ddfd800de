"""What files of checkpoints are made of: safetensors' words for dtypes, and the checksum of blocks.

Who writes such files is checkpoint_files.py; whoever only looks needs no numpy.
"""

from collections.abc import Callable
from typing import cast

from isal import isal_zlib

SAFETENSORS_DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
"""torch's name -> safetensors' name and bytes per element."""
crc32 = cast(Callable[[memoryview, int], int], isal_zlib.crc32)  # pyright: ignore[reportUnknownMemberType]
"""zlib's, at five to nine times its speed."""
