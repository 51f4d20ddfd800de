"""A whole tensor of a sharded state, one at a time: for hashes, where nobody may hold them all."""

import torch
from torch import Tensor

from elastic.protocol.layout import Position, TensorLayout
from elastic.protocol.mesh import Mesh
from workers.distributed.process_group import AnyGroup
from workers.tensors.local import local, part_of


def whole_on_first(
    tensor: Tensor, layout: TensorLayout, mesh: Mesh, group: AnyGroup, device: torch.device
) -> Tensor:
    """The whole tensor on rank 0, on the host where several had it; elsewhere something empty of
    its dtype. A collective. Raises PeerLost."""
    mine = local(tensor)
    if not layout.is_cut or group.size() == 1:
        return mine
    mine = mine.to(device)  # what is offloaded can be sent from there only
    nothing = mine.new_empty(0)
    own = [layout.own(Position(mesh, rank)) for rank in range(group.size())]
    flat = nothing if own[group.rank()] is None else mine.contiguous().reshape(-1)
    is_first = group.rank() == 0
    received = [mine.new_empty(box.size if box and is_first else 0) for box in own]
    group.all_to_all(received, [flat, *(nothing for _ in range(group.size() - 1))]).wait()
    if not is_first:
        return nothing
    whole = mine.new_empty(layout.shape)
    for box, part in zip(own, received, strict=True):
        if box is not None:
            part_of(whole, box).copy_(part.view(box.shape))
    return group.read(whole)
