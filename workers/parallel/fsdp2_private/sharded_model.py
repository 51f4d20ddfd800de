"""A model under FSDP2's `fully_shard`, and how it changes its mesh without changing its identity.

`fully_shard` is applied once; a new generation gives every parameter another shard in place, so
that the model, its parameters and whoever refers to them stay valid. The values come from
elsewhere (workers/resharding/transfer.py); what is communicated is parallel/collectives.py's.
tests/workers/test_fsdp.py compares with plain training.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from elastic.protocol.errors import WrongInput
from workers.distributed.device_mesh import Unconnected, shard_mesh
from workers.distributed.process_group import Alone, Group
from workers.parallel.collectives import Collectives
from workers.parallel.fsdp2_private.hooks import ParameterGather
from workers.parallel.fsdp2_private.parameters import ParameterGroup, ShardedParameter
from workers.parallel.fsdp2_private.stream_waits import tell_waits
from workers.step.precision import keeps_precision
from workers.tensors.strides import is_channels_last
from workers.torch_private.version import check_version
from workers.train_state.blocks import blocks_of


class ShardedModel:
    """The parameter groups of a model: each block's, and the root's for what is in no block."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        keeps_parameters: bool,
        is_offloaded: bool = False,
    ) -> None:
        """dtype: of what is gathered; None: that of the parameters. keeps_parameters: they stay
        whole from forward to backward (ZeRO-2). is_offloaded: shards live in host memory.

        Each rank holds everything until the first `reshard`. Raises WrongInput.
        """
        check_version("a sharded strategy")
        _check(model)
        self.model, self.device, self.keeps_parameters = model, device, keeps_parameters
        self._placeholder: Group = Alone("model")
        mesh = self._mesh_of(self._placeholder)
        scalars = {p for p in model.parameters() if not p.dim()}  # they stay replicated
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": scalars}
        self.host = torch.device("cpu") if is_offloaded else device
        """Where shards are, and their gradients between steps."""
        if is_offloaded:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        half = _policy(dtype)
        for block, is_half in _wrapped(model, is_half=dtype is not None):
            fully_shard(
                block,
                reshard_after_forward=not keeps_parameters,
                mp_policy=half if is_half else _policy(None),
                **options,
            )
        fully_shard(model, reshard_after_forward=False, mp_policy=half, **options)
        self.shard: int | None = 0
        self.num_shards = 1
        self._groups: list[Any] = []
        for module in self.modules():
            module.set_gradient_divide_factor(1.0)  # sums: the step's divisor divides, once
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)  # or ranks would exchange other sizes
            self._groups += cast(Any, module._get_fsdp_state())._fsdp_param_groups

        self.groups = [ParameterGroup(group) for group in self._groups]
        self.parameters = [ShardedParameter(param) for param in self._params()]
        """Each once."""

    def modules(self) -> Iterator[FSDPModule]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                yield module

    def _params(self) -> Iterator[Any]:
        """FSDP2's own records of the parameters, each once."""
        for group in self._groups:
            yield from group.fsdp_params

    def connect(self, collectives: Collectives, shards: Group, others: Iterable[Tensor]) -> None:
        """Communicate over this generation's shard axis from now on.

        shards: its group, for torch's own code. others: what is sharded as the parameters are.
        """
        assert (collectives.rank, collectives.world_size) == (self.shard, self.num_shards)
        mesh = FSDPMeshInfo(self._mesh_of(shards), shard_mesh_dim=0)
        for param in self._params():
            param.mesh_info = mesh
            if param.post_forward_mesh_info is not None:
                param.post_forward_mesh_info = mesh
            param._spmd_mesh = mesh.mesh
            _move(param.sharded_param, mesh.mesh)
            param._sharding_spec = param.sharded_param._spec
        for tensor in others:
            _move(tensor, mesh.mesh)
        self._take(mesh)
        self._placeholder.forget()
        gather = ParameterGather(collectives)
        for module in self.modules():
            module.set_custom_all_gather(gather)
        if self.device.type != "cpu":
            for group in self._groups:
                tell_waits(group, collectives.stream_waits)

    def reset(self) -> None:
        """After an exception in a forward or backward: as if it had not begun."""
        root = cast(Any, self.model)
        if root._get_fsdp_state()._is_root:
            self._order_streams()
            root.reset_iter_state()
        for param in self._params():
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
            param.unsharded_accumulated_grad = None
            param.sharded_param.grad = None

    def _order_streams(self) -> None:
        """What comes now, as memory that is used again, is behind all that FSDP2's streams have to
        do: it waits for what it has noted itself, and not for the last of a pass that broke off."""
        if self.device.type == "cpu":
            return
        streams = cast(Any, self.model)._get_fsdp_state()._comm_ctx
        current = torch.accelerator.current_stream(self.device)
        current.wait_stream(streams.all_gather_copy_in_stream)
        current.wait_stream(streams.all_gather_stream)
        current.wait_stream(streams.reduce_scatter_stream)

    def end_backward(self) -> None:
        """What FSDP2 does behind a backward; no group has anything left to send."""
        for group in self._groups:
            group._training_state = TrainingState.POST_BACKWARD
        cast(Any, self.model)._get_fsdp_state()._root_post_backward_final_callback()

    def release(self) -> None:
        """Between steps the model has its sharded parameters only."""
        for group in self._groups:
            group._to_sharded()

    @torch.no_grad()
    def vacate(self) -> None:
        """Give up the memory of the shards, until `reshard`; what refers to it keeps it."""
        self.reset()
        for param in self._params():
            empty = param.sharded_param._local_tensor.new_empty(0)
            param.sharded_param._local_tensor = param._sharded_param_data = empty

    @torch.no_grad()
    def reshard(
        self, shard: int | None, num_shards: int, rows: dict[str, Tensor] | None = None
    ) -> None:
        """Every parameter gets memory for the rows of this shard, zero-filled. None: for none; then
        the model cannot run.

        rows: by parameter name, instead of zeros; their memory becomes the shards', and where it
        cannot, they are replaced.
        """
        self.reset()
        names = {id(p): n for n, p in self.model.named_parameters()} if rows else {}
        self._placeholder.forget()
        self._placeholder = Unconnected(shard or 0, num_shards)
        mesh = FSDPMeshInfo(self._mesh_of(self._placeholder), shard_mesh_dim=0)
        self._take(mesh)
        for param in self._params():
            name = names.get(id(param.sharded_param))
            given = None if rows is None or name is None else rows.pop(name)
            _reshard(param, mesh, self.host, given, is_empty=shard is None)
            if rows is not None and name is not None:
                rows[name] = param.sharded_param._local_tensor
        self.shard, self.num_shards = shard, num_shards

    def _take(self, mesh: FSDPMeshInfo) -> None:
        for group in self._groups:
            group.mesh_info = mesh
            if group.post_forward_mesh_info is not None:
                group.post_forward_mesh_info = mesh

    def _mesh_of(self, shards: Group) -> DeviceMesh:
        return shard_mesh(self.device, shards)


def _move(tensor: Any, mesh: DeviceMesh) -> None:
    """The shard is of an equal mesh of another generation from now on."""
    spec = tensor._spec
    tensor._spec = DTensorSpec(mesh, spec.placements, tensor_meta=spec.tensor_meta)


def _reshard(
    param: Any, mesh: FSDPMeshInfo, host: torch.device, given: Tensor | None, *, is_empty: bool
) -> None:
    kept = param.sharded_param
    whole = nn.Parameter(
        torch.empty(param._orig_size, dtype=kept.dtype, device="meta"),
        requires_grad=kept.requires_grad,
    )
    param._init_sharded_param(whole, host, None, mesh)
    if is_empty:
        param.sharded_size = torch.Size((0, *param.sharded_size[1:]))
        param.padded_sharded_param_size = param.sharded_size
        param.contiguous_sharded_stride = whole.stride()
    if param.post_forward_mesh_info is not None:
        param.post_forward_mesh_info = mesh
        param._init_sharded_post_forward_param_metadata(whole)
    padded = _padded(param, given, kept.dtype, host)
    rows = padded.narrow(0, 0, param.sharded_size[0])
    if kept.is_meta:  # a DTensor keeps the device that it was made with
        made = nn.Parameter(param.to_sharded_dtensor(rows), requires_grad=kept.requires_grad)
        torch.utils.swap_tensors(kept, made)
    else:
        kept._spec, kept._local_tensor = param.sharded_param._spec, rows
    param._sharded_param_data = padded.view(-1)
    param.sharded_param = kept
    param._setattr_on_modules(kept)
    param.all_gather_outputs = []
    if hasattr(param, "_unsharded_param"):
        del param._unsharded_param


def _padded(param: Any, given: Tensor | None, dtype: torch.dtype, host: torch.device) -> Tensor:
    """Memory for a shard, with these rows in it."""
    size = param.padded_sharded_param_size
    if given is not None and given.device == host and not param.pin_memory:
        if given.shape == size:
            return given
        if given.untyped_storage().nbytes() == size.numel() * dtype.itemsize:  # host_memory.py
            padded = given.as_strided(size, given.stride())
            padded[given.shape[0] :].zero_()
            return padded
    padded = torch.zeros(size, dtype=dtype, device=host)
    if given is not None:
        padded[: given.shape[0]].copy_(given)
    return padded.pin_memory() if param.pin_memory else padded


def _policy(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Inputs and outputs are cast by workers/step/precision.py, the same for every strategy."""
    reduce_dtype = None if dtype is None else torch.float32
    return MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False)


def _wrapped(model: nn.Module, *, is_half: bool) -> list[tuple[nn.Module, bool]]:
    """What gets parameter groups of its own, inner modules first, and whether they are cast."""
    blocks = [(block, is_half) for block in blocks_of(model)]
    if not is_half:
        return blocks
    own = {id(m): m for m in model.modules() if keeps_precision(m) and list(m.parameters())}
    inner = [(m, False) for m in own.values() if m is not model]
    return inner + [(b, is_half) for b, is_half in blocks if id(b) not in own]


def _check(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous() or is_channels_last(parameter):
            raise WrongInput(
                f"parameter {name!r} has strides {parameter.stride()}, and rows can be sharded "
                "only if they lie one behind the other: leave out memory_format=channels_last, or "
                "a transposition, or use parallel='ddp'"
            )
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise WrongInput("build_model() returned a container without forward(), not a model")
    kinds = sorted({str(p.dtype) for p in model.parameters() if p.requires_grad})
    if len(kinds) > 1:
        raise WrongInput(f"the parameters are of {' and '.join(kinds)}; sharding takes one dtype")
