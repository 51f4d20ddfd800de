"""What a loader process recognises in `dataset()`: sources that are fed from elsewhere."""

import traceback
from importlib.util import find_spec
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


def is_rays_own(error: BaseException) -> bool:
    """`dataset()` called Ray, which a forked process cannot use. A user's own folder may be named
    `ray`, too."""
    spec = find_spec("ray")  # imports nothing
    places = [Path(p) for p in (spec and spec.submodule_search_locations) or ()]
    called = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return any(file.is_relative_to(place) for file in called for place in places)
