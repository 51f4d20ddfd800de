"""Whether the blocks of a model are a chain that can be cut: found by one micro-batch on absent
tensors, which costs no memory and hardly any time.

Blocks are the members of module lists and sequences, as for FSDP2, or what the workload names. What
a stage does with a chain is stage.py's, how it is cut elastic/protocol/pipeline.py's.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn

from elastic.protocol.errors import WrongInput
from workers.parallel.pipeline.absent import (
    Absent,
    EmptyIsAbsent,
    NotHere,
    NumbersTaken,
    Watch,
    absent_parameter,
    refuse_draw_by_values,
    users_line,
    watched_by,
)
from workers.parallel.pipeline.costs import cost_of
from workers.parallel.pipeline.trees import tensors_in
from workers.torch_private.dispatch import tree_flatten
from workers.torch_private.modules import list_weights_anew, own_parameters
from workers.torch_private.tensors import base_of, version_of
from workers.train_state.blocks import blocks_of


@dataclass(frozen=True, slots=True)
class Argument:
    """One that a block takes of what is computed before it."""

    position: int
    """Among its flat arguments."""
    needs_gradient: bool
    is_modified: bool
    """The block writes into it."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks of a model, each of which takes what the one before it returns."""

    names: tuple[str, ...]
    """Of the blocks, as `model.get_submodule` takes them."""
    costs: tuple[float, ...]
    """Of a forward of each, in floating-point operations; what is before the first block is the
    first's, what is behind a block is its."""
    arguments: tuple[tuple[Argument, ...], ...]
    """That each block takes of what is computed before it; the first: none."""
    uses: Mapping[str, tuple[int, ...]]
    """By parameter (`model.named_parameters()`) the blocks with or behind which it is used."""
    buffers: Mapping[str, int]
    """By buffer the block that it is of, or behind which it is written: others are read only."""
    readers: tuple[int, ...] | None = None
    """Blocks that take something of the batch otherwise than by what the one before them returns;
    None: all may."""

    def parameters_of(self, blocks: Collection[int]) -> list[str]:
        """That a stage of these blocks needs."""
        return [name for name, used in self.uses.items() if any(b in blocks for b in used)]

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several blocks use."""
        return {name: used for name, used in self.uses.items() if len(used) > 1}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "Chain":
        return cls(
            tuple(said["names"]),
            tuple(said["costs"]),
            tuple(tuple(Argument(**each) for each in taken) for taken in said["arguments"]),
            {name: tuple(used) for name, used in said["uses"].items()},
            said["buffers"],
            None if said["readers"] is None else tuple(said["readers"]),
        )


def block_names(model: nn.Module, workload: Any) -> tuple[str, ...]:
    """The workload's `pipeline_blocks(model)`, else the members of the outermost module lists and
    sequences. WrongInput if there is none, or one of them is no module of the model."""
    if hasattr(workload, "pipeline_blocks"):
        names = tuple(workload.pipeline_blocks(model))
        known = dict(model.named_modules())
        for name in names:
            if name not in known or not name:
                raise WrongInput(
                    f"pipeline_blocks() names {name!r}, and the model has no such part"
                )
        for name in names:
            inside = [other for other in names if other.startswith(f"{name}.")]
            if inside or names.count(name) > 1:
                other = inside[0] if inside else name
                raise WrongInput(
                    f"pipeline_blocks() names {other!r}, which is named by {name!r} too"
                )
    else:
        known = {id(m): name for name, m in model.named_modules()}
        names = tuple(known[id(block)] for block in blocks_of(model))
    if not names:
        raise WrongInput(
            "the model has no nn.ModuleList or nn.Sequential with parameters; name its parts in "
            "pipeline_blocks()"
        )
    return names


def find_chain(
    model: nn.Module,
    workload: Any,
    compute: Callable[[], Any],
    names: Sequence[str] = (),
    device: torch.device | None = None,
) -> Chain:
    """compute: the loss of one micro-batch with `model`, as the workload returns it. names: of the
    blocks; by default `block_names`. device: of the micro-batch, if not that of the parameters.

    Parameters and buffers are as before afterwards. Raises WrongInput with what to do.
    """
    names = tuple(names) or block_names(model, workload)
    probe = Probe(model, names, device)
    with probe.in_place():
        try:
            loss = compute()
        except NotHere as error:
            raise WrongInput(f"loss() {error}; a stage has only a part of the model") from error
    probe.check_calls()
    total = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(total, Absent):
        raise WrongInput("loss() returned what does not depend on the model's parameters")
    costs = _costs(model, workload, names, probe.costs)
    return Chain(
        names, costs, probe.check_arguments(), probe.find_uses(total), probe.find_buffers()
    )


def _costs(
    model: nn.Module, workload: Any, names: tuple[str, ...], counted: list[float]
) -> tuple[float, ...]:
    if not hasattr(workload, "pipeline_costs"):
        return tuple(counted)
    costs = tuple(float(cost) for cost in workload.pipeline_costs(model))
    if len(costs) != len(names) or any(not 0 < cost < float("inf") for cost in costs):
        raise WrongInput(
            f"pipeline_costs() must give a number above 0 for each of {len(names)} blocks, got "
            f"{list(costs)}"
        )
    return costs


Node = Any
"""Of autograd's graph."""


@dataclass(slots=True)
class _Call:
    """A block's forward."""

    block: int
    taken: list[Any]
    """Its flat arguments."""
    taken_nodes: list[Node]
    """Of `taken`, as they were: None for what is no tensor or has none."""
    versions: list[int]
    returned: list[Tensor] = field(default_factory=list[Tensor])
    returned_nodes: list[Node] = field(default_factory=list[Node])
    modified: list[bool] = field(default_factory=list[bool])


class Probe(Watch):
    """Sees which blocks run, what they take, and where parameters and buffers are used."""

    def __init__(
        self, model: nn.Module, names: tuple[str, ...], device: torch.device | None
    ) -> None:
        self.model, self.names, self._device = model, names, device
        self.blocks = [model.get_submodule(name) for name in names]
        self.costs = [1.0] * len(names)
        self.calls: list[_Call] = []
        self._inside: list[int] = []
        self._touched: dict[str, dict[int, str]] = {}
        """Parameters that an operation took: where, and the user's line."""
        self._written: dict[int, int] = {}
        """Buffers that an operation wrote an absent value into."""
        self._stands: dict[str, nn.Parameter] = {}
        known = {id(p): name for name, p in model.named_parameters()}
        self._owners: dict[str, set[int]] = {}
        """Blocks that a parameter is in."""
        for number, block in enumerate(self.blocks):
            for parameter in block.parameters():
                self._owners.setdefault(known[id(parameter)], set()).add(number)

    # --- while it runs ---------------------------------------------------------------------
    @contextmanager
    def in_place(self) -> Iterator[None]:
        """All parameters are absent, and the blocks are seen; all is as before at the end."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        restored = [_swap_parameters(self.model, self._stands, self._device)]
        for number, block in enumerate(self.blocks):
            restored.append(wrap_forward(block, self._seen(number, block.forward)))
        try:
            with watched_by(self), NumbersTaken():
                yield
        finally:
            for restore in reversed(restored):
                restore()
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])

    def _seen(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            flat = tree_flatten((args, kwargs))[0]
            self.on_call(number, flat)
            nodes = [t.grad_fn if isinstance(t, Tensor) else None for t in flat]
            versions = [_version(t) for t in flat]
            call = _Call(number, flat, nodes, versions)
            self.calls.append(call)
            self._inside.append(number)
            with EmptyIsAbsent():
                result = forward(*args, **kwargs)
            self._inside.pop()
            call.modified = [_version(t) != v for t, v in zip(flat, versions, strict=True)]
            call.returned = tensors_in(result)
            call.returned_nodes = _nodes_of(call.returned, _nodes(nodes))
            return result

        return run

    def on_call(self, number: int, taken: list[Any]) -> None:
        """A block begins to run. taken: its flat arguments."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not find_chain.__code__:
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                raise WrongInput(
                    f"{self.names[number]} is called by torch.utils.checkpoint, which would run it "
                    "again without what its stage has received; call that inside of the block, or "
                    "use activation_checkpointing=True"
                )
            frame = frame.f_back

    @property
    def place(self) -> int:
        """The block that runs, or behind which code runs."""
        if self._inside:
            return self._inside[-1]
        return self.calls[-1].block if self.calls else 0

    def on_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.costs[self.place] += cost_of(func, args, kwargs, result)
        for value in tree_flatten((args, kwargs))[0]:
            name = value.name if isinstance(value, Absent) else ""
            if name and self.place not in self._touched.setdefault(name, {}):
                self._touched[name][self.place] = users_line()

    def on_write(self, real: list[Tensor]) -> None:
        buffers = {id(b) for b in self.model.buffers()}
        if any(id(tensor) not in buffers for tensor in real):
            super().on_write(real)
        for tensor in real:
            self._written.setdefault(id(tensor), self.place)

    def on_draw(self, func: Any, args: Any, kwargs: Any) -> None:
        if self.place < len(self.names) - 1:  # no stage does again what the last block draws
            refuse_draw_by_values(func, args, kwargs)

    # --- what it has seen ---------------------------------------------------------------------
    def check_calls(self) -> None:
        ran = [call.block for call in self.calls]
        for number, name in enumerate(self.names):
            if ran.count(number) > 1:
                raise WrongInput(
                    f"{name} runs {ran.count(number)} times in one micro-batch; a pipeline runs "
                    "each block once"
                )
            if number not in ran:
                raise WrongInput(
                    f"{name} does not run in a micro-batch; a pipeline runs each block once (name "
                    "its parts in pipeline_blocks())"
                )
        if ran != sorted(ran):
            names = [self.names[number] for number in ran]
            raise WrongInput(
                f"the blocks run in the order {', '.join(names)}; name them so in pipeline_blocks()"
            )

    def check_arguments(self) -> tuple[tuple[Argument, ...], ...]:
        """Each block takes of the others only what the one before it returns, or what is made of
        that."""
        found: list[tuple[Argument, ...]] = [()]
        first = self.calls[0]
        earlier = _reach(first.taken_nodes, set()).nodes
        for before, call in pairwise(self.calls):
            name, name_before = self.names[call.block], self.names[before.block]
            given, stop = {id(t) for t in before.returned}, _nodes(before.returned_nodes)
            earlier |= _reach(before.returned_nodes, _nodes(before.taken_nodes)).nodes
            arguments: list[Argument] = []
            for position, tensor in enumerate(call.taken):
                if not isinstance(tensor, Absent):
                    continue
                node = call.taken_nodes[position]
                is_theirs = id(tensor) in given
                reached = _reach([node], stop)
                if node is not None:
                    is_theirs = (is_theirs or reached.has_met) and not reached.nodes & earlier
                if not is_theirs:
                    raise WrongInput(
                        f"{name} takes a tensor of shape {list(tensor.shape)} that depends on "
                        f"parameters but is not what {name_before} returns (a skip connection); "
                        f"return it from {name_before} too, or use parallel='fsdp'"
                    )
                arguments.append(Argument(position, tensor.requires_grad, call.modified[position]))
            if not arguments:
                raise WrongInput(
                    f"{name} takes nothing that {name_before} returns; a pipeline's blocks are a "
                    "chain: name the parts that are one in pipeline_blocks()"
                )
            found.append(tuple(arguments))
            earlier |= _reach(call.taken_nodes, stop).nodes
        return tuple(found)

    def find_uses(self, loss: Tensor) -> dict[str, tuple[int, ...]]:
        """WrongInput if a block's parameters are used elsewhere than in it."""
        uses: dict[str, set[int]] = {name: set() for name in self._stands}
        for name, owners in self._owners.items():
            uses[name] |= owners
        last, earlier = self.calls[-1], dict[Node, str]()
        for number, call in enumerate(self.calls):
            before = self.calls[number - 1] if number else None
            stop = _nodes(before.returned_nodes) if before else set[Node]()
            place = before.block if before else call.block
            between = _reach(call.taken_nodes, stop, call.taken)
            self._note(uses, between.leaves, place, "")
            name = self.names[call.block]
            whose = f"{self.names[place]} has computed" if before else f"is computed before {name}"
            earlier |= dict.fromkeys(between.nodes - earlier.keys(), whose)
            inside = _reach(call.returned_nodes, _nodes(call.taken_nodes), call.returned)
            self._note(uses, inside.leaves, call.block, name)
            self._refuse_skip(name, inside.nodes, earlier, "what it takes")
            earlier |= dict.fromkeys(inside.nodes, f"{name} has computed")
        behind = _reach([loss.grad_fn], _nodes(last.returned_nodes))
        way = f"what {self.names[last.block]} returns"
        self._refuse_skip("loss()", behind.nodes, earlier, way)
        self._note(uses, behind.leaves, last.block, "loss()")
        for name, places in self._touched.items():
            if not uses[name]:  # frozen: autograd does not know of it
                uses[name] |= places.keys()
        return {name: tuple(sorted(used)) or (0,) for name, used in uses.items()}

    def _note(self, uses: dict[str, set[int]], leaves: set[int], place: int, by: str) -> None:
        """by: "loss()", or the name of a block; empty: code between blocks."""
        for name in self._names(leaves):
            owners = self._owners.get(name)
            if owners and place not in owners:
                touched = self._touched.get(name, {})
                line = next((touched[p] for p in touched if p not in owners), "")
                where = f" ({line})" if line else ""
                if by == "loss()":
                    raise WrongInput(
                        f"loss() depends on parameters of other stages ({name}){where}: a penalty "
                        "on weights belongs into the optimizer (weight_decay)"
                    )
                block = self.names[min(owners)]
                raise WrongInput(
                    f"{by or 'code between blocks'} depends on {name} of {block} otherwise than by "
                    f"what {block} returns{where}; return it from {block}, or use parallel='fsdp'"
                )
            uses[name].add(place)

    @staticmethod
    def _refuse_skip(who: str, nodes: set[Node], earlier: dict[Node, str], way: str) -> None:
        """earlier: by node what it is of, in the order in which it ran."""
        if shared := [of for node, of in earlier.items() if node in nodes]:
            raise WrongInput(
                f"{who} depends on what {shared[-1]} otherwise than by {way} (a skip connection); "
                "return it from every block in between, or use parallel='fsdp'"
            )

    def _names(self, leaves: set[int]) -> list[str]:
        return [name for name, stand in self._stands.items() if id(stand) in leaves]

    def find_buffers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for number, block in enumerate(self.blocks):
            inside = {id(b) for b in block.buffers()}
            found |= {n: number for n, b in self.model.named_buffers() if id(b) in inside}
        for name, buffer in self.model.named_buffers():
            if id(buffer) in self._written:
                found.setdefault(name, self._written[id(buffer)])
        return found


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0


def _nodes(nodes: Iterable[Node]) -> set[Node]:
    return {node for node in nodes if node is not None}


def _nodes_of(tensors: Sequence[Tensor], stop: set[Node]) -> list[Node]:
    """Of what a block returns: of a view also what it is a view of, if the block has made that: an
    operation in place, behind the block, gives the view another node. stop: of what it took."""
    nodes: list[Node] = [t.grad_fn for t in tensors]
    inside = _reach(nodes, stop).nodes
    bases = [base.grad_fn for t in tensors if (base := base_of(t)) is not None]
    return nodes + [node for node in bases if node in inside]


@dataclass(slots=True)
class _Reached:
    leaves: set[int]
    """By id."""
    nodes: set[Node]
    """Of operations."""
    has_met: bool
    """A way leads to where the search was to stop."""


def _reach(starts: Iterable[Node], stop: set[Node], tensors: Iterable[Any] = ()) -> _Reached:
    """What backward from these nodes leads to, not beyond `stop`. tensors: of which those that are
    leaves count, too."""
    leaves = {id(t) for t in tensors if isinstance(t, Tensor) and t.is_leaf and t.requires_grad}
    nodes, todo, has_met = set[Node](), [n for n in starts if n is not None], False
    while todo:
        node = todo.pop()
        if node in stop:
            has_met = True
        elif hasattr(node, "variable"):
            leaves.add(id(node.variable))
        elif node not in nodes:
            nodes.add(node)
            todo += [after for after, _ in node.next_functions if after is not None]
    return _Reached(leaves, nodes, has_met)


# --- swapping parts of a model, and back ---------------------------------------------------------
def wrap_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let this module's forward be another one; gives what makes it as it was."""
    had = module.__dict__.get("forward")
    module.forward = forward

    def restore() -> None:
        if had is None:
            del module.__dict__["forward"]
        else:
            module.forward = had

    return restore


def _swap_parameters(
    model: nn.Module, stands: dict[str, nn.Parameter], device: torch.device | None
) -> Callable[[], None]:
    """Every parameter becomes absent; fills `stands` by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for key, parameter in own_parameters(module).items():
            if parameter is not None:
                places.append((module, key, parameter))
    for module, key, parameter in places:
        name = names[id(parameter)]
        if name not in stands:
            stands[name] = absent_parameter(parameter, name, device)
        own_parameters(module)[key] = stands[name]
    recurrent = recurrent_in(model)
    refresh(recurrent)

    def restore() -> None:
        for module, key, parameter in places:
            own_parameters(module)[key] = parameter
        refresh(recurrent)

    return restore


def recurrent_in(model: nn.Module) -> list[nn.RNNBase]:
    """Layers that keep a list of their parameters of their own."""
    return [module for module in model.modules() if isinstance(module, nn.RNNBase)]


def refresh(layers: Iterable[nn.RNNBase]) -> None:
    """Of `recurrent_in`: their lists are as their parameters."""
    for layer in layers:
        list_weights_anew(layer)
