"""Which reducer a generation takes: one small function per strategy."""

from collections.abc import Mapping

from torch import nn

from elastic.protocol.mesh import Mesh
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.process_group import AnyGroup
from workers.parallel.ddp import ddp_reducer
from workers.reduction.reducers import Reducer
from workers.train_state.train_state import TrainState


def new_reducer(
    spec: WorkerSpec,
    train_state: TrainState,
    parameters: Mapping[str, nn.Parameter],
    group: AnyGroup,
    mesh: Mesh,
) -> Reducer:
    """For a generation whose group has formed."""
    if train_state.sharded is not None:
        return train_state.sharded.reducer(parameters, mesh, group)
    return ddp_reducer(spec, parameters, train_state.buffers.floating, group, mesh)
