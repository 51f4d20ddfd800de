"""What a loader process recognises in `dataset()`: sources that are fed from elsewhere."""

import traceback
from pathlib import Path
from typing import Any

import cloudpickle

from elastic.data.source import ParquetSource


def fed_source(dataset: Any) -> bytes | None:
    """A Parquet source, pickled; empty for a Ray data set, which this process cannot pass on;
    None for what is loaded here."""
    if isinstance(dataset, ParquetSource):
        return cloudpickle.dumps(dataset)
    is_ray_data = any(c.__module__.startswith("ray.data.") for c in type(dataset).__mro__)
    return b"" if is_ray_data else None


def is_rays_own(error: Exception) -> bool:
    """`dataset()` called Ray, which a forked process cannot use."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("ray" in Path(frame.filename).parts for frame in frames)
