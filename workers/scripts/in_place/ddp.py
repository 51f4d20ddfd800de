"""What a model in DistributedDataParallel does in place of torch's reducer: `Replica`.

The class and its constructor stay torch's (seams.py says what is replaced). Gradients meet at the
end of `backward()`, in unit.py; `optimizer.step()` is the script's own.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.scripts.in_place.buckets import Limits
from workers.scripts.in_place.call_state import UNIT
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.unit import Outcome, Part, SecondGradient, Unit
from workers.torch_private.autograd import is_in_backward
from workers.torch_private.c10d import list_buffers_anew
from workers.torch_private.dispatch import tree_leaves


class Replica:
    """Of one model. It is what torch keeps as `reducer`, which copies and pickles leave out."""

    def __init__(
        self,
        module: Any,
        parameters: Sequence[Tensor],
        course: Course,
        backward: "Backward",
        *,
        is_static: bool,
    ) -> None:
        self._module, self.course = weakref.ref(module), course
        self._backward = backward
        self.unit = Unit(parameters, Limits.of(module, is_static=is_static))
        self._own = {id(parameter) for parameter in parameters}
        self.number = len(course.models)
        course.models.append(weakref.ref(self))
        self._is_expected = False
        """The last forward was to be synchronised."""
        self._weights: list[float] = []
        """Of the batches of the forwards since the last unit."""
        self._coming: list[float] = []
        """Of the batches since the last forward with gradients."""
        self._measured: list[float] = []
        """Of the newest batch, which has had a forward without gradients."""
        self._has_gradient = False
        """The backward at hand has brought one."""
        self.weight = 1.0
        """What this member's part of the unit counts: 1 if all have as many samples."""
        me: weakref.ref[Replica] = weakref.ref(self)  # what a hook holds is never collected
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(tell_gradient, me, index))

    def has_others(self) -> bool:
        """Parameters that the gradients of this backward do not meet for."""
        module = self._module()
        if module is None:
            return False
        ignored = module.parameters_to_ignore
        named = module.module.named_parameters()
        learned = [p for name, p in named if p.requires_grad and name not in ignored]
        return not {id(p) for p in learned} <= self._own

    def add_samples(self, weight: float) -> None:
        self._measured = []
        self._coming.append(weight)

    def take_weights(self) -> None:
        """That of the batches so far; without a new one it is the last ones'."""
        if self._weights:
            self.weight, self._weights = sum(self._weights) / len(self._weights), []

    def before_forward(self) -> None:
        self.course.check()
        if torch.is_grad_enabled():
            self._backward.forget()
            self.course.begin_forward()
            self._weights += self._coming or self._measured
            self._coming, self._measured = [], []
            return
        self.course.measure()
        if not self._measured:
            self._measured, self._coming = self._coming[-1:], self._coming[:-1]

    def after_forward(self, output: Any, *, is_synchronised: bool) -> None:
        """A backward through this output ends with a unit, if it is to be synchronised."""
        self._is_expected = is_synchronised
        if is_synchronised:
            for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._begin_backward)

    def begin_unit(self) -> None:
        self.take_weights()
        self._has_gradient = False
        self.unit.begin(self.course.group.inner, self._part())

    def _part(self) -> Part:
        return Part(self.weight, self.course.has_news)

    def _begin_backward(self, _: Tensor) -> None:
        self._backward.take(self)

    def hear_gradient(self, index: int) -> None:
        """Once for each parameter in each backward: the time that it takes is the script's."""
        backward, unit = self._backward, self.unit
        self._has_gradient = True
        if self._is_expected and not backward.is_under_way:
            backward.take(self)  # an output in which no tensor was found
            self._has_gradient = True
        if backward.has_taken(self):
            unit.note_order(index)
        else:
            unit.note_backward()
        if backward.launching is self:
            unit.hear_gradient(index)

    def end_backward(self) -> None:
        """The gradients become the means over the members. If there was none, it was a
        `torch.autograd.grad()` of the script's."""
        self._is_expected = False
        if not self._has_gradient:
            return
        course, unit, buffers = self.course, self.unit, self._buffers()
        course.operations.receive = lambda group, source: unit.receive(group, source, buffers)
        try:
            course.do(UNIT, lambda: unit.reduce(course.group.inner, self._part(), buffers))
        except SecondGradient as error:
            course.deny(str(error))
        outcome = Outcome(*course.operations.result)
        course.operations.ended = unit.take(outcome, buffers)
        course.end_unit(outcome.size, outcome.num_refusing)

    def _buffers(self) -> list[Tensor]:
        module = self._module()
        if module is None or not module.forward_sync_buffers or not module.modules_buffers:
            return []
        list_buffers_anew(module)  # a script may have put others in their place
        return list(module.modules_buffers)


class Backward:
    """The backward at hand, and the models whose gradients meet at its end."""

    def __init__(self, queue_callback: Callable[[Callable[[], None]], None]) -> None:
        self._queue_callback = queue_callback
        self._taken: list[Replica] = []
        self.launching: Replica | None = None
        """Its buckets may be launched: among several models nobody knows in which order."""

    @property
    def is_under_way(self) -> bool:
        return bool(self._taken)

    def has_taken(self, replica: Replica) -> bool:
        return replica in self._taken

    def take(self, replica: Replica) -> None:
        if replica in self._taken:
            return
        if not self._taken:
            self._queue_callback(self._end)
        self._taken.append(replica)
        is_only = len(self._taken) == 1 and replica.course.num_models == 1
        self.launching = replica if is_only else None
        replica.begin_unit()

    def forget(self) -> None:
        """A forward has begun: what an exception has ended is over."""
        if not is_in_backward():
            self._taken, self.launching = [], None

    def _end(self) -> None:
        taken, self._taken, self.launching = self._taken, [], None
        for replica in sorted(taken, key=lambda r: r.number):
            replica.end_backward()


def tell_gradient(replica: "weakref.ref[Replica]", index: int, _: Tensor) -> None:
    if (found := replica()) is not None:
        found.hear_gradient(index)


def replica_of(module: nn.Module) -> Replica | None:
    """None: the model is torch's own."""
    found = module.__dict__.get("reducer")
    return found if isinstance(found, Replica) else None
