"""Which parameters got a gradient in a step: FSDP2 fills the others with zeros on their way."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.tensors.local import is_shard


class Usage:
    """One generation's. `watch` before every backward; `keep` what it used."""

    def __init__(self, model: ShardedModel, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._names = {id(p): name for name, p in parameters.items()}
        self._hooks: dict[str, RemovableHandle] = {}
        self._in_pass: set[str] = set()
        self.used: set[str] = set()
        for name, parameter in parameters.items():
            if not is_shard(parameter):
                self._hooks[name] = self._hook(name, parameter)

    def begin(self) -> None:
        self.used = set()
        self._in_pass.clear()

    def watch(self) -> None:
        """The whole parameters exist once a forward has gathered them."""
        for param in self._model.parameters:
            name, whole = self._names.get(id(param.parameter)), param.gathered
            if name is not None and whole is not None and name not in self._hooks:
                self._hooks[name] = self._hook(name, whole)

    def _hook(self, name: str, whole: nn.Parameter) -> RemovableHandle:
        def on_gradient(_: Tensor) -> None:
            self._in_pass.add(name)

        return whole.register_post_accumulate_grad_hook(on_gradient)

    def keep(self) -> None:
        self.used |= self._in_pass
        self._in_pass.clear()

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
