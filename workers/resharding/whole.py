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
    own = [layout.own(Position(mesh, rank)) for rank in range(group.size())]
    flat = mine.new_empty(0) if own[group.rank()] is None else mine.contiguous().reshape(-1)
    is_first = group.rank() == 0
    sizes = [box.size if box and is_first else 0 for box in own]
    received = flat.new_empty(sum(sizes))
    to_first = [flat.numel(), *(0 for _ in own[1:])]
    group.all_to_all_flat(received, flat, sizes, to_first).wait()
    if not is_first:
        return mine.new_empty(0)
    whole = mine.new_empty(layout.shape)
    for box, part in zip(own, received.split(sizes), strict=True):
        if box is not None:
            part_of(whole, box).copy_(part.view(box.shape))
    return group.read(whole)
