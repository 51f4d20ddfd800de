""" "ddp": every rank holds the whole state; gradients meet in all-reduces or in the tree."""

from collections.abc import Mapping

from torch import Tensor, nn

from elastic.protocol.mesh import Mesh
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.process_group import AnyGroup
from workers.reduction.reducers import BitwiseReducer, FastReducer, Reducer


def ddp_reducer(
    spec: WorkerSpec,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    group: AnyGroup,
    mesh: Mesh,
) -> Reducer:
    if spec.reduction == "fast":
        return FastReducer(parameters, buffers, group)
    ids = mesh.ids(spec.num_microbatches, group.rank())
    return BitwiseReducer(parameters, buffers, group, ids, spec.num_microbatches)
