"""The blocks of a model: what is gathered, cast and recomputed together.

What becomes of them is parallel/fsdp2_private's, workers/step/precision.py's and
workers/step/activation_checkpointing.py's.
"""

from torch import nn

from workers.torch_private.modules import own_parameters


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost module lists and sequences.

    A module that shares a parameter with another part of the model is none: it stays with the root.
    """
    shared = _shared_parameters(model)
    blocks: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            is_member = isinstance(module, nn.ModuleList | nn.Sequential)
            own = list(child.parameters())
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if is_member and own and not is_list and not any(id(p) in shared for p in own):
                blocks.append(child)
            else:
                search(child)

    search(model)
    return blocks


def _shared_parameters(model: nn.Module) -> set[int]:
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in own_parameters(module).values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {key for key, count in owners.items() if count > 1}
