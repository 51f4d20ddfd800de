"""Which reducer a generation takes: one small function per strategy."""

from collections.abc import Mapping

from torch import nn

from elastic.protocol.mesh import Mesh
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.process_group import AnyGroup
from workers.parallel.ddp import ddp_reducer
from workers.reduction.reducers import Reducer
from workers.train_state.train_state import Replica


def new_reducer(
    spec: WorkerSpec,
    replica: Replica,
    parameters: Mapping[str, nn.Parameter],
    group: AnyGroup,
    mesh: Mesh,
) -> Reducer:
    """For a generation whose group has formed."""
    if replica.sharded is not None:
        return replica.sharded.reducer(parameters, mesh, group)
    return ddp_reducer(spec, parameters, replica.buffers.floating, group, mesh)
