# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Ray Data's blocks, Arrow tables and data frames: taken apart, put together, and as a user wants
them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.data.block import BlockAccessor

from elastic.data.passes import Piece


class RayBlocks:
    """The `Cut` of elastic/data/dealt.py."""

    def slice(self, block: Any, first: int, stop: int) -> Any:
        return BlockAccessor.for_block(block).slice(first, stop, copy=False)

    def take(self, block: Any, rows: NDArray[np.int64]) -> Any:
        return BlockAccessor.for_block(block).take(rows.tolist())

    def join(self, blocks: Sequence[Any]) -> Any:
        from ray.data._internal.delegating_block_builder import DelegatingBlockBuilder

        builder = DelegatingBlockBuilder()
        for block in blocks:
            builder.add_block(block)
        return builder.build()


def pieces_of(dataset: Any) -> Iterator[Piece]:
    """What Ray Data gives when it executes this, in order; references stand for blocks."""
    for bundle in dataset.iter_internal_ref_bundles():
        for entry, cut in zip(bundle.blocks, bundle.slices, strict=True):
            size_bytes: int = entry.metadata.size_bytes or 0
            if cut is None:
                yield Piece(entry.ref, 0, entry.metadata.num_rows, size_bytes)
            else:
                yield Piece(entry.ref, cut.start_offset, cut.num_rows, size_bytes)


def in_format(
    block: Any,
    batch_format: str | None,
    collate: Callable[[Any], Any] | None,
    finalize: Callable[[Any], Any] | None,
) -> tuple[Any, Callable[[], None] | None]:
    """A batch as Ray Data's iterators make it of a block; and what is to be called before it is
    given to the user, None: nothing."""
    batch = BlockAccessor.for_block(block).to_batch_format(batch_format)
    collated = batch if collate is None else collate(batch)
    if finalize is None:
        return collated, None
    finalized = finalize(collated)
    return finalized.data, finalized.on_consume
