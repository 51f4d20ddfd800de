"""Which parameters got a gradient in a step: FSDP2 fills the others with zeros on their way."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.train_state.tensors import is_shard


class Usage:
    """One generation's. `watch` before every backward; `keep` what it used."""

    def __init__(self, model: ShardedModel, parameters: Sequence[nn.Parameter]) -> None:
        self._model = model
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._hooks: dict[int, RemovableHandle] = {}
        self._in_pass: set[int] = set()
        self.used = [False] * len(parameters)
        for index, parameter in enumerate(parameters):
            if not is_shard(parameter):
                self._hooks[index] = self._hook(index, parameter)

    def begin(self) -> None:
        self.used = [False] * len(self.used)
        self._in_pass.clear()

    def watch(self) -> None:
        """The whole parameters exist once a forward has gathered them."""
        for param in self._model.parameters:
            index, whole = self._index.get(id(param.parameter)), param.gathered
            if index is not None and whole is not None and index not in self._hooks:
                self._hooks[index] = self._hook(index, whole)

    def _hook(self, index: int, whole: nn.Parameter) -> RemovableHandle:
        def on_gradient(_: Tensor) -> None:
            self._in_pass.add(index)

        return whole.register_post_accumulate_grad_hook(on_gradient)

    def keep(self) -> None:
        for index in self._in_pass:
            self.used[index] = True
        self._in_pass.clear()

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
