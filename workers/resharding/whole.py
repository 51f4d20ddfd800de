"""A whole tensor of a sharded state, one at a time: for hashes, where nobody may hold them all."""

import torch
from torch import Tensor

from elastic.protocol.mesh import Mesh
from workers.distributed.process_group import AnyGroup
from workers.train_state.tensors import local


def whole_on_first(tensor: Tensor, mesh: Mesh, group: AnyGroup, device: torch.device) -> Tensor:
    """The whole tensor on rank 0; elsewhere something empty of its shape and dtype's name."""
    mine = local(tensor)
    if mine is tensor or group.size() == 1:
        return mine
    mine = mine.to(device)  # what is offloaded can be sent from there only
    nothing = mine.new_empty(0)
    flat = mine.contiguous().reshape(-1) if mesh.replica(group.rank()) == 0 else nothing
    sent = [flat if rank == 0 else nothing for rank in range(group.size())]
    width = mine.shape[1:].numel()
    received = [
        mine.new_empty(len(mesh.own_rows(tensor.shape[0], r)) * width if group.rank() == 0 else 0)
        for r in range(group.size())
    ]
    group.all_to_all(received, sent).wait()
    if group.rank():
        return nothing
    return torch.cat([received[r] for r in mesh.ranks()]).view(tensor.shape)
