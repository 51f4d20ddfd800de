"""Who holds a training state, as what copies and saves it sees: `Member`."""

from typing import Protocol

from torch import Tensor

from elastic.protocol.layout import Position, TensorLayout


class StateOwner(Protocol):
    """A place in a generation, and the part of the state that belongs to it."""

    @property
    def generation(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def position(self) -> Position:
        """Whose boxes of the state it holds."""
        ...

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        """How the ranks share a tensor of the state."""
        ...
