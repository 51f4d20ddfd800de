""" "ddp": every rank holds the whole state; gradients meet in all-reduces or in the tree."""

from collections.abc import Mapping

from torch import nn

from elastic.protocol.mesh import Mesh
from elastic.protocol.seams import WorkerSpec
from workers.groups import AnyGroup
from workers.reducers import BitwiseReducer, FastReducer, Reducer
from workers.replica import Replica


def new_reducer(
    spec: WorkerSpec,
    replica: Replica,
    parameters: Mapping[str, nn.Parameter],
    group: AnyGroup,
    mesh: Mesh,
) -> Reducer:
    """The reducer of a generation whose group has formed; of the sharded strategies, too."""
    if replica.sharded is not None:
        return replica.sharded.reducer(parameters, mesh, group)
    buffers = replica.buffers.floating
    if spec.reduction == "fast":
        return FastReducer(parameters, buffers, group)
    ids = mesh.ids(spec.num_microbatches, group.rank)
    return BitwiseReducer(parameters, buffers, group, ids, spec.num_microbatches)
