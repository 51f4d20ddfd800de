"""The state of a model under FSDP2: rows of parameters, and of what the optimizer keeps of them.

See `workers.parallel.shards.SplitModel`.
"""

from collections.abc import Mapping

from torch import Tensor

from elastic.protocol.layout import Position, TensorLayout
from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.tensors.local import is_shard, layout_of, like
from workers.train_state.serialization import parameters_named


class ShardRows:
    """Of one worker."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded, self.model, self.device = sharded, sharded.model, sharded.device
        self._parameters = dict(sharded.model.named_parameters())
        self._layouts: dict[object, TensorLayout] = {}
        """Known ones: a copy of every step asks for all of them."""

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        key = (name, tensor.dtype, tensor.shape, is_shard(tensor))
        layout = self._layouts.get(key)
        if layout is None:
            layout = layout_of(name, tensor)
            if layout.is_cut and pattern_of(name, layout.shape, self._parameters) is None:
                raise ValueError(
                    f"{name} is cut as {layout.cuts}, and no parameter of this name is: state of "
                    "the optimizer must have its parameter's shape (torch.zeros_like(parameter)) "
                    "or be made without it"
                )
            self._layouts[key] = layout
        return layout

    def stored_layout(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorLayout:
        pattern = pattern_of(name, shape, self._parameters)
        cuts = () if pattern is None else layout_of(name, pattern).cuts
        return TensorLayout(name, dtype, shape, cuts)

    def vacate(self) -> None:
        self._sharded.vacate()

    def place(self, at: Position, given: dict[str, Tensor] | None) -> None:
        shard = None if at.mesh.is_inactive(at.rank) else at.mesh.shard(at.rank)
        self._sharded.reshard(shard, at.mesh.num_shards, given)

    def as_live(self, name: str, shard: Tensor, shape: tuple[int, ...]) -> Tensor:
        pattern = pattern_of(name, shape, self._parameters)
        return shard if pattern is None else like(shard, pattern)


def pattern_of(
    name: str, shape: tuple[int, ...], parameters: Mapping[str, Tensor]
) -> Tensor | None:
    """The sharded parameter that the tensor `name` of a state
    (workers/train_state/serialization.py) is sharded as: itself, or the one whose optimizer state
    it is, if that has its shape. None: it is replicated.
    """
    for candidate in parameters_named(name):
        parameter = parameters.get(candidate)
        if parameter is not None and is_shard(parameter) and tuple(parameter.shape) == shape:
            return parameter
    return None
