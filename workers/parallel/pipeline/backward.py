"""The backward of a micro-batch on one stage, whole or in two halves: first the gradients of what
the stage received, for which the stage before waits, and those of its parameters later.

A parameter's gradient begins at one operation on the way from the results to what was received, and
nowhere else on it. The first half keeps what comes to these operations, the second goes on from
there. Which half is due when is schedule.py's.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from workers.torch_private.autograd import adds_once

Node = Any
"""Of autograd's graph."""
_REENTRANT = "CheckpointFunctionBackward"
"""Its backward is a whole one itself."""


class StageBackward:
    """Of one forward. Either `whole`, or `inputs` and then `weights`."""

    def __init__(
        self,
        results: Sequence[Tensor],
        gradients: Sequence[Tensor] | None,
        received: Sequence[Tensor],
        parameters: Sequence[Tensor],
        has_halves: bool = True,
    ) -> None:
        """results: of the forward, that need a gradient. gradients: of these; None: it is a loss.
        received: from the stage before, that need one. parameters: that may get one; they have
        none when a half begins. has_halves: else the first one is all of it, as where each would
        compute the forward once more."""
        self._parameters, self._has_halves = parameters, has_halves
        self._results, self._gradients = list(results), gradients and list(gradients)
        self._received = list(received)
        self._later: list[_Later] = []
        self._kept: list[tuple[Tensor, Tensor]] = []
        """Parameters whose gradient there is already."""

    @property
    def adds_once(self) -> bool:
        """To each gradient, if it is whole."""
        return adds_once(self._results)

    def whole(self) -> None:
        """All have their gradients."""
        if self._results:
            torch.autograd.backward(self._results, self._gradients)

    def inputs(self) -> None:
        """What was received has its gradient, and no parameter."""
        if not self._received or not self._results:
            return
        found = _Split(self._results, self._received) if self._has_halves else None
        if found is None or found.is_impossible:
            self.whole()
            self._kept = [(p, p.grad) for p in self._parameters if p.grad is not None]
            for parameter, _ in self._kept:
                parameter.grad = None
            self._results = []
            return
        self._later = found.later
        edges = [edge for later in self._later for edge in later.edges]
        gradients = cast(Any, torch.autograd).grad(  # its types know no mixture of these
            self._results,
            [*self._received, *edges],
            self._gradients,
            retain_graph=True,
            allow_unused=True,
        )
        for tensor, gradient in zip(self._received, gradients, strict=False):
            tensor.grad = gradient
        rest = iter(gradients[len(self._received) :])
        for later in self._later:
            later.gradients = [next(rest) for _ in later.edges]

    def weights(self) -> None:
        """After `inputs`: the parameters have theirs."""
        if not self._received:
            self.whole()
        for later in self._later:
            pairs = [
                (e, g) for e, g in zip(later.edges, later.gradients, strict=True) if g is not None
            ]
            if pairs:
                edges, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(edges, gradients, inputs=later.leaves)
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._later, self._kept, self._results = [], [], []


class _Later:
    """An operation, and the leaves that have their gradient from it alone."""

    def __init__(self, node: Node, outputs: Sequence[int]) -> None:
        self.edges = [GradientEdge(node, number) for number in outputs]
        self.gradients: list[Tensor | None] = []
        self.leaves: list[Tensor] = []


class _Split:
    """Where a graph is split."""

    def __init__(self, results: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        roots = [get_gradient_edge(t) for t in results]
        inputs = {get_gradient_edge(t).node for t in received}
        self._walk(roots)
        self._on_way = self._before(inputs)
        """Operations that a gradient passes from the results to what was received."""
        ends = [n for n in self._outputs if hasattr(n, "variable") and n not in inputs]
        self.later: list[_Later] = []
        self.is_impossible = any(n.name() == _REENTRANT for n in self._outputs)
        by_node: dict[Node, _Later] = {}
        outside = {edge.node for edge in roots} - self._on_way
        for end in ends:
            reached = self._before({end}, self._on_way)
            begins = reached & self._on_way
            if len(begins) != 1 or outside & reached:
                self.is_impossible = True  # only the whole backward knows the order of addition
                return
            (node,) = begins
            if node not in by_node:
                by_node[node] = _Later(node, sorted(self._outputs[node]))
                self.later.append(by_node[node])
            by_node[node].leaves.append(end.variable)

    def _walk(self, roots: Sequence[GradientEdge]) -> None:
        """All that backward leads to: by operation those of its results that have a gradient, and
        the operations behind it."""
        self._outputs: dict[Node, set[int]] = defaultdict(set)
        self._users: dict[Node, list[Node]] = defaultdict(list)
        todo: list[Node] = []
        for edge in roots:
            if edge.node not in self._outputs:
                todo.append(edge.node)
            self._outputs[edge.node].add(edge.output_nr)
        while todo:
            node = todo.pop()
            for after, number in node.next_functions:
                if after is None:
                    continue
                if after not in self._outputs:
                    todo.append(after)
                self._outputs[after].add(number)
                self._users[after].append(node)

    def _before(self, nodes: set[Node], stop: set[Node] | None = None) -> set[Node]:
        """These, and what backward passes before it comes to them; not beyond `stop`."""
        found, todo = set(nodes), list(nodes)
        while todo:
            node = todo.pop()
            if stop is not None and node in stop:
                continue
            for user in self._users[node]:
                if user not in found:
                    found.add(user)
                    todo.append(user)
        return found
