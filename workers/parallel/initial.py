"""The state before the first step, whenever a sharded worker needs its shard of it.

A workload with `init_weights` is built on the meta device and initialised module by module, so
that nobody ever holds the whole model; else it is whole in host memory, and only shards are kept.
"""

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elastic.protocol.layout import Position, TensorLayout
from workers.step.randomness import seed_module
from workers.tensors.local import local, part_of
from workers.torch_private.modules import move_what_is_made, own_buffers, own_parameters
from workers.train_state.train_state import TrainState

MAPPED_BYTES = 2**18
"""Of a parameter while it is initialised: from this size on it has a mapping of its own."""


class Initial:
    """What `build` made, but for the parameters, which are made again when they are needed."""

    def __init__(
        self,
        train_state: TrainState,
        build_model: Callable[[], nn.Module],
        initialise: Callable[[nn.Module, str], None] | None,
        seed: int,
        whole: dict[str, Tensor] | None = None,
    ) -> None:
        """To be made before anything has changed the state. whole: the parameters by name, where
        the model has stands on the meta device instead of them."""
        self._build_model, self._initialise, self._seed = build_model, initialise, seed
        parameters = {f"model/{name}" for name, _ in train_state.model.named_parameters()}
        self.is_deferred = any(p.is_meta for p in train_state.model.parameters())
        self._is_initialised_here = self.is_deferred and whole is None
        self.whole = whole
        """For whoever takes it first: it need not be built again."""
        named = train_state.model.named_parameters(remove_duplicate=False)
        self._shapes = {name: p.shape for name, p in named}
        self._header, tensors = train_state.header_and_tensors()
        self._others = {n: t.clone() for n, t in tensors.items() if n not in parameters}

    def fill(
        self,
        train_state: TrainState,
        at: Position,
        layout: Callable[[str, Tensor], TensorLayout],
        values: Mapping[str, Tensor] | None,
        begin_piece: Callable[[], None],
    ) -> None:
        """Make `train_state`, whose shards are those of `at`, the state of step 0.

        layout: of a parameter, by its name. values: the whole ones by name, if at hand.
        begin_piece: called before each piece of it; what it raises ends it.
        """
        targets = {name: p for name, p in train_state.model.named_parameters()}

        def put(name: str, whole: Tensor) -> None:
            target = targets[name].detach()
            local(target).copy_(part_of(whole, layout(name, target).box(at)))

        others = dict(self._others)
        if self._is_initialised_here:
            assert self._initialise is not None
            initialise_modules(
                train_state.model, self._initialise, self._seed, put, begin_piece, self._shapes
            )
            others |= {f"model/{n}": b.clone() for n, b in train_state.model.named_buffers()}
        else:
            begin_piece()
            made = self._build_model().named_parameters() if values is None else values.items()
            for name, whole in made:
                begin_piece()
                put(name, whole.detach())
        current = {n: t for n, t in train_state.tensors().items() if n.startswith("model/")}
        tensors = current | {n: t.clone() for n, t in others.items()}
        train_state.restore(dict(self._header), tensors)


@torch.no_grad()
def initialise_modules(
    model: nn.Module,
    initialise: Callable[[nn.Module, str], None],
    seed: int,
    put: Callable[[str, Tensor], None],
    begin_piece: Callable[[], None] = lambda: None,
    shapes: Mapping[str, torch.Size] | None = None,
) -> None:
    """Give `put` every parameter of a model whose own may be on the meta device or sharded.

    shapes: of the whole ones by name, where the model's own may have others.
    One module at a time has whole parameters: zeros, then `reset_parameters()` where there is one,
    then `initialise(module, name)`; RNG from (seed, name). A shared parameter belongs to the first
    module that holds it. Buffers are on a real device and are changed in place.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not own_buffers(module) and not any(
            p is not None for p in own_parameters(module).values()
        ):
            continue
        begin_piece()
        # Nothing of one module is left when the next one gets its parameters.
        _initialise_module(module, name, initialise, seed, put, shapes=shapes, seen=seen)


def _initialise_module(
    module: nn.Module,
    name: str,
    initialise: Callable[[nn.Module, str], None],
    seed: int,
    put: Callable[[str, Tensor], None],
    *,
    shapes: Mapping[str, torch.Size] | None,
    seen: set[int],
) -> None:
    """As `initialise_modules` says. seen: parameters that were given to `put`, by id."""
    own = {key: p for key, p in own_parameters(module).items() if p is not None}
    names = {key: f"{name}.{key}" if name else key for key in own}
    try:
        for key, p in own.items():
            shape = p.shape if shapes is None else shapes[names[key]]
            whole = _zeros(shape, p.dtype)
            own_parameters(module)[key] = nn.Parameter(whole, requires_grad=p.requires_grad)
        seed_module(seed, name)
        reset: Any = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        initialise(module, name)
        made = {key: own_parameters(module)[key] for key in own}
    finally:
        own_parameters(module).update(own)
    for key, p in own.items():
        value = made[key]
        assert value is not None
        if id(p) not in seen:
            seen.add(id(p))
            put(names[key], value.detach())


def _zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """On the host; a large one has a mapping of its own, which goes back to the system with it. Of
    the C library's memory the heap would keep several between what lives longer."""
    size_bytes = shape.numel() * dtype.itemsize
    if size_bytes < MAPPED_BYTES:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=dtype).view(shape)


def leave_on_host(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The whole parameters of a model that was built in host memory, by name; it has stands on the
    meta device instead of them, so that `device` never holds them all. Buffers and scalar
    parameters go there."""
    whole = {name: p.detach() for name, p in model.named_parameters() if p.dim()}
    stands: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, p in own_parameters(module).items():
            if p is not None and p.dim():
                if p not in stands:
                    stand = torch.empty_like(p, device="meta")
                    stands[p] = nn.Parameter(stand, requires_grad=p.requires_grad)
                own_parameters(module)[key] = stands[p]
    move_what_is_made(model, device)
    return whole


def settle_small(model: nn.Module, device: torch.device) -> None:
    """Memory, zero-filled, for what was built on the meta device and is never sharded: buffers and
    scalar parameters."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, p in own_parameters(module).items():
            if p is not None and p.is_meta and not p.dim():
                if p not in made:
                    zero = torch.zeros((), dtype=p.dtype, device=device)
                    made[p] = nn.Parameter(zero, requires_grad=p.requires_grad)
                own_parameters(module)[key] = made[p]
        buffers = own_buffers(module)
        for key, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:
                buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
