"""The user's forward of the whole model on one stage: the blocks of the others run on absent
tensors, which costs shapes only; what the stage before has sent is put in at the first local block,
what the next one needs is taken at the first block behind the last local one.

Between forwards the model is as the user has built it. When a stage does what is passes.py's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elastic.protocol.errors import UserError
from workers.parallel.pipeline.absent import (
    Absent,
    Drawing,
    absent_like,
    watched_by,
)
from workers.parallel.pipeline.chain import Chain, recurrent_in, refresh, wrap_forward
from workers.parallel.pipeline.remembered import Looks, RememberedBlock
from workers.torch_private.dispatch import tree_flatten, tree_unflatten
from workers.torch_private.modules import own_buffers, own_parameters

Receive = Callable[[Sequence[Tensor]], list[Tensor]]
"""Gives tensors of these shapes and dtypes from the stage before."""
Send = Callable[[Sequence[Tensor]], None]
"""To the stage behind."""


@dataclass(slots=True)
class Crossing:
    """What crossed the borders of this stage in one forward."""

    received: list[Tensor] = field(default_factory=list[Tensor])
    """Those that need a gradient."""
    sent_with_gradient: list[Tensor] = field(default_factory=list[Tensor])
    """Those of the sent that a gradient will come back for."""


class StageModel:
    """A model on the stage of some of its blocks. In a step `begin_step`; then `begin`, a forward,
    `end` as often as there are micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        blocks: range,
        whole: Mapping[str, Tensor] | None = None,
        looks: Looks | None = None,
    ) -> None:
        """whole: by parameter a tensor of its shape and strides, on any device, where the model's
        own may be empty. looks: one for all stages of a rank."""
        self._chain, self.blocks = chain, blocks
        self.buffers = {n for n, block in chain.buffers.items() if block in blocks}
        """That its blocks write."""
        self._blocks = [model.get_submodule(name) for name in chain.names]
        self._stands = _StandIns(model, chain, blocks, whole or {})
        self._looks = looks or Looks()
        self._remembered = {
            number: RememberedBlock(block, self._looks)
            for number, block in enumerate(self._blocks)
            if number not in blocks
        }
        self._forwards = [block.forward for block in self._blocks]
        self._as_here = [
            self._computed(number) if number in blocks else self._skipped(number)
            for number in range(len(self._blocks))
        ]
        """What each block does on this stage, instead of its forward."""
        self._ran: list[int] = []
        self._undo: list[Callable[[], None]] = []
        self._draws = ExitStack()
        """While what other stages draw counts."""
        self._crossing = Crossing()

    @property
    def is_first(self) -> bool:
        return self.blocks.start == 0

    @property
    def is_last(self) -> bool:
        return self.blocks.stop == len(self._blocks)

    def begin_step(self) -> None:
        """The code of other stages' blocks is looked at again in the forwards that follow."""
        self._looks.forget()

    def begin(self, receive: Receive, send: Send) -> None:
        """A forward begins, its randomness has been seeded. send: called as soon as there is what
        the next stage takes: it need not wait for the rest of this forward."""
        self._receive, self._send = receive, send
        self._draws.enter_context(watched_by(Drawing()))
        self._ran, self._crossing = [], Crossing()
        self._stands.place()
        self._forwards = [block.forward for block in self._blocks]
        for block, forward in zip(self._blocks, self._as_here, strict=True):
            self._undo.append(wrap_forward(block, forward))

    def end(self) -> Crossing:
        """Of the forward; the model is as before. Raises as `check_blocks`."""
        self.give_up()
        self.check_blocks()
        return self._crossing

    def check_blocks(self) -> None:
        """Raises UserError if a local block did not run once in the forward."""
        if self._ran != list(self.blocks):
            odd = next((b for b in self.blocks if self._ran.count(b) != 1), self._ran[0])
            name, count = self._chain.names[odd], self._ran.count(odd)
            raise UserError(
                f"{name} runs {count} times on this micro-batch, and once on the one that the "
                "pipeline was found on; let every micro-batch go through every block",
                "",
            )

    def give_up(self) -> None:
        """Where a forward has ended early, too."""
        self._draws.close()
        if self._undo:
            while self._undo:
                self._undo.pop()()
            self._stands.take_away()

    # --- blocks -------------------------------------------------------------------------------
    def _skipped(self, number: int) -> Callable[..., Any]:
        """Of a block of another stage."""
        here, remembered = self.blocks, self._remembered[number]

        def skip(*args: Any, **kwargs: Any) -> Any:
            if number == here.stop:
                self._draws.close()  # nothing on this stage depends on what is drawn from here on
                args, kwargs = self._take(args, kwargs)
            with torch.no_grad():
                return remembered.run(self._forwards[number], args, kwargs)

        return skip

    def _computed(self, number: int) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            self._ran.append(number)
            if number == self.blocks.start and number > 0:
                args, kwargs = self._inject(args, kwargs)
            return self._forwards[number](*args, **kwargs)

        return compute

    def _inject(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        flat, spec = tree_flatten((args, kwargs))
        wanted = self._chain.arguments[self.blocks.start]
        found = [i for i, value in enumerate(flat) if isinstance(value, Absent)]
        if found != [argument.position for argument in wanted]:
            raise self._other_arguments(self.blocks.start, len(wanted), len(found))
        tensors = self._receive([flat[i] for i in found])
        for argument, tensor in zip(wanted, tensors, strict=True):
            if argument.needs_gradient and torch.is_grad_enabled():
                self._crossing.received.append(tensor.requires_grad_())
            flat[argument.position] = tensor.clone() if argument.is_modified else tensor
        return tree_unflatten(flat, spec)

    def _take(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        flat, spec = tree_flatten((args, kwargs))
        wanted = self._chain.arguments[self.blocks.stop]
        if len(flat) <= max(argument.position for argument in wanted):
            raise self._other_arguments(self.blocks.stop, len(wanted), len(flat))
        sent: list[Tensor] = []
        for argument in wanted:
            tensor = flat[argument.position]
            if not isinstance(tensor, Tensor) or isinstance(tensor, Absent):
                raise self._other_arguments(self.blocks.stop, len(wanted), 0)
            if tensor.is_nested:
                raise UserError(
                    f"{self._chain.names[self.blocks.stop]} takes a nested tensor, which no stage "
                    "can send; give nn.TransformerEncoder enable_nested_tensor=False",
                    "",
                )
            sent.append(tensor)
            if argument.needs_gradient:
                self._crossing.sent_with_gradient.append(tensor)
            flat[argument.position] = absent_like(tensor)
        self._send(sent)
        return tree_unflatten(flat, spec)

    def _other_arguments(self, block: int, wanted: int, found: int) -> UserError:
        return UserError(
            f"{self._chain.names[block]} takes {found} tensors of what is computed before it on "
            f"this micro-batch, and {wanted} on the one that the pipeline was found on",
            "",
        )


class _StandIns:
    """For the parameters of other stages, and the buffers that their blocks write."""

    def __init__(
        self, model: nn.Module, chain: Chain, blocks: range, whole: Mapping[str, Tensor]
    ) -> None:
        self._whole, self._recurrent = whole, recurrent_in(model)
        here = set(chain.parameters_of(blocks))
        parameters = {id(p): name for name, p in model.named_parameters()}
        buffers = {id(b): name for name, b in model.named_buffers()}
        self._places: list[tuple[dict[str, Any], str, str]] = [
            (own_parameters(module), key, name)
            for module in model.modules()
            for key, p in own_parameters(module).items()
            if p is not None and (name := parameters[id(p)]) not in here
        ]
        self._places += [
            (own_buffers(module), key, name)
            for module in model.modules()
            for key, b in own_buffers(module).items()
            if b is not None and (name := buffers[id(b)]) in chain.buffers
            if chain.buffers[name] not in blocks
        ]
        self._made: dict[tuple[str, torch.dtype], Absent] = {}
        self._placed: list[tuple[dict[str, Any], str, Tensor]] = []
        """Where they are now, and for what."""

    def place(self) -> None:
        for held, key, name in self._places:
            real: Tensor = held[key]
            held[key] = self._like(name, real)
            self._placed.append((held, key, real))
        refresh(self._recurrent)

    def _like(self, name: str, real: Tensor) -> Absent:
        made = self._made.get((name, real.dtype))
        if made is None or (name not in self._whole and made.shape != real.shape):
            like = self._whole.get(name, real)
            like = torch.empty_like(like, dtype=real.dtype, device="meta")
            made = self._made[name, real.dtype] = absent_like(like, real.device, name)
        return made

    def take_away(self) -> None:
        while self._placed:
            held, key, real = self._placed.pop()
            held[key] = real
        refresh(self._recurrent)
