"""What a DataLoader keeps of its iterator."""

from typing import Any


def hand_batches(loader: Any, batch_sampler: Any, instead_of: type) -> None:
    """The iterator that a loader with persistent workers keeps is to draw from this, if it draws
    from something of the class `instead_of` now."""
    kept: Any = getattr(loader, "_iterator", None)
    if isinstance(getattr(kept, "_index_sampler", None), instead_of):
        kept._index_sampler = batch_sampler
