"""The training state and the one way in which it changes: `TrainState.apply(update)`.

Members and followers apply the same updates with the same code, so they hold the same bits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import nn

from elastic.protocol.messages import peer
from workers.reduction.norm import clip_coefficient, norm_of_rows, row_squares
from workers.step.buffers import TrackedBuffers
from workers.step.precision import Casting, LossScale
from workers.step.vote import Prepared, Vote
from workers.tensors.local import is_shard, local
from workers.tensors.strides import laid_out
from workers.torch_private.tensors import divide_all_, multiply_all_
from workers.train_state import serialization
from workers.train_state.snapshot import Arena, HostMemory, Snapshot
from workers.train_state.state_header import entry, names_in


@dataclass(frozen=True, slots=True)
class Update:
    """Everything that a committed step changes, by name."""

    step: int
    """Committed steps once it is applied."""
    is_finite: bool
    divisor: float
    num_microbatches: int
    gradients: Mapping[str, torch.Tensor]
    """The sum over micro-batches per parameter; without those that no micro-batch used."""
    buffers: Mapping[str, torch.Tensor]
    """The sum over micro-batches of each tracked floating buffer, float64."""
    integers: Mapping[str, torch.Tensor]
    """The new value of each tracked integer buffer."""
    log_names: tuple[str, ...]
    """See `TrainState.log_names`."""
    origin: int = 0
    """The generation that computed it: another one's sums may be rounded otherwise."""
    squares: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Of each gradient's rows, of all ranks, for the norm; empty: who applies it looks itself."""

    @classmethod
    def of(cls, prepared: Prepared, vote: Vote, before: "TrainState") -> "Update":
        """A prepared step with its completed vote."""
        return cls(
            step=before.step + 1,
            is_finite=vote.is_finite,
            divisor=vote.divisor,
            num_microbatches=prepared.layout.num_microbatches,
            gradients={n: g for n, g in prepared.reduced.gradients.items() if n in vote.used},
            buffers=prepared.reduced.buffers,
            integers=before.buffers.integers,
            log_names=prepared.layout.log_names,
            origin=prepared.generation,
            squares=prepared.reduced.squares,
        )

    def to_message(self, records: dict[str, Any]) -> tuple[peer.Update, dict[str, torch.Tensor]]:
        """For followers, with the tensors themselves. records: what is known of the step."""
        message = peer.Update(
            step=self.step,
            is_finite=self.is_finite,
            divisor=self.divisor,
            num_microbatches=self.num_microbatches,
            log_names=self.log_names,
            records=records,
            origin=self.origin,
        )
        kinds = {"gradient": self.gradients, "buffer": self.buffers, "integer": self.integers}
        return message, {f"{kind}/{n}": t for kind, of in kinds.items() for n, t in of.items()}

    @classmethod
    def from_message(
        cls, said: peer.Update, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> "Update":
        found: dict[str, dict[str, torch.Tensor]] = {"gradient": {}, "buffer": {}, "integer": {}}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            found[kind][name] = tensor.to(device)
        return cls(
            step=said.step,
            is_finite=said.is_finite,
            divisor=said.divisor,
            num_microbatches=said.num_microbatches,
            gradients=found["gradient"],
            buffers=found["buffer"],
            integers=found["integer"],
            log_names=said.log_names,
            origin=said.origin,
        )


def step_of(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


class TrainState:
    """Model, optimizer, scheduler and the number of committed steps."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scheduler: Any | None,
        *,
        clip_norm: float | None,
        max_nonfinite: int,
        casting: Casting | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """parameters: those that are trained. casting: of the parameters in a forward; None: they
        are used as they are. loss_scale: to begin with; None: losses are not scaled."""
        self.model, self.parameters = model, parameters
        self.optimizer, self.scheduler = optimizer, scheduler
        self.clip_norm, self.max_nonfinite = clip_norm, max_nonfinite
        self.casting = casting or Casting(model, None)
        self.loss_scale = loss_scale
        self.buffers = TrackedBuffers(model)
        self.step, self.origin = 0, 0
        self.skipped_in_a_row = 0
        self.first_nonfinite = ""
        """Of the step that stops the run: where, and what to do (workers/nonfinite.py)."""
        self.log_names: tuple[str, ...] = ()
        """Names given to session.log so far, sorted: the layout of votes."""
        self._agreed = (self.buffers.tracked, self.log_names)
        """As of the last committed step: a vote that was cut off reached some members only."""
        self.gradient_norm: float | None = None
        self._snapshots: list[Snapshot] = []

    def apply(
        self,
        update: Update,
        step: Callable[[torch.optim.Optimizer], Any] = step_of,
    ) -> None:
        """Take one step, by oneself: all have voted for it. step: of the optimizer. Raises
        FloatingPointError after too many steps that are not finite."""
        assert update.step == self.step + 1, (update.step, self.step)
        self.settle()
        self.buffers.track({**update.buffers, **update.integers})
        if update.is_finite:
            self._change_weights(update, step)
        else:
            self.buffers.restore()
        self.drop_gradients()
        if self.scheduler is not None:
            self.scheduler.step()
        self.log_names = update.log_names
        self._agreed = (self.buffers.tracked, self.log_names)
        self.step, self.origin = update.step, update.origin
        self._count_skipped(update.is_finite)
        if self.skipped_in_a_row > self.max_nonfinite:
            raise FloatingPointError(
                f"the gradients of {self.skipped_in_a_row} steps in a row, up to step "
                f"{self.step}, were not finite: {self.first_nonfinite}, or raise "
                f"faults.max_nonfinite (now {self.max_nonfinite})"
            )

    def _count_skipped(self, is_finite: bool) -> None:
        """A step that only found the loss scale too high is no sign of trouble."""
        scale = self.loss_scale
        is_search = scale is not None and scale.value > 1
        if scale is not None:
            self.loss_scale = scale.after(is_finite)
        if is_finite:
            self.skipped_in_a_row = 0
        elif not is_search:
            self.skipped_in_a_row += 1

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _change_weights(self, update: Update, step: Callable[[torch.optim.Optimizer], Any]) -> None:
        self._scale(update)
        self.drop_gradients()
        for name, gradient in update.gradients.items():
            parameter = self.parameters[name]
            if not is_shard(gradient):  # a follower receives it row by row
                gradient = laid_out(gradient, parameter.stride())
            parameter.grad = gradient
        step(self.optimizer)
        self.buffers.commit(update.buffers, update.integers, update.num_microbatches)

    def _scale(self, update: Update) -> None:
        """Sums become means, clipped. The norm is of the sums, whose divisor the vote has found."""
        divisor = update.divisor * (self.loss_scale.value if self.loss_scale else 1.0)
        sums = [local(gradient) for gradient in update.gradients.values()]
        coefficient = 1.0
        if self.clip_norm is not None:
            known = update.squares
            squares = [known[n] for n in update.gradients if n in known] or [row_squares(sums)]
            self.gradient_norm = norm_of_rows(torch.cat(squares)) / divisor
            coefficient = clip_coefficient(self.gradient_norm, self.clip_norm)
        if math.frexp(divisor)[0] == 0.5:  # by a power of two: exact, so that one pass is enough
            divisor, coefficient = 1.0, coefficient / divisor
        if sums and divisor != 1.0:
            divide_all_(sums, divisor)
        if sums and coefficient != 1.0:
            multiply_all_(sums, coefficient)

    def snapshot(
        self,
        select: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = dict,
        memory: HostMemory | Arena | None = None,
    ) -> Snapshot:
        """The state of the last committed step; to be asked for between steps.

        select: gives those tensors, or views of them, that the reader wants.
        memory: for the copies.
        """
        header, tensors = self.header_and_tensors()
        snapshot = Snapshot(header, select(tensors), memory)
        self._snapshots.append(snapshot)
        return snapshot

    def header_and_tensors(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What `restore` takes: JSON, and the live tensors (a rank's shard where sharded)."""
        values, tensors = serialization.capture(self.model, self.optimizer, self.scheduler)
        header = {
            "type": "snapshot",
            "step": self.step,
            "origin": self.origin,
            "values": values,
            "weights": serialization.weight_names(self.model),
            "tracked": list(self._agreed[0]),
            "log_names": list(self._agreed[1]),
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_scale": None if self.loss_scale is None else astuple(self.loss_scale),
        }
        return header, tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live state by its names in a snapshot; who changes it calls `settle` first."""
        return serialization.capture(self.model, self.optimizer, self.scheduler)[1]

    def settle(self) -> None:
        """The state is about to change: copy what readers have not."""
        while self._snapshots:
            self._snapshots.pop().settle()

    def restore(self, header: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a snapshot; `tensors` are given away."""
        self.settle()
        values = entry(header, "values", dict)
        step, skipped = entry(header, "step", int), entry(header, "skipped_in_a_row", int)
        log_names, tracked = names_in(header, "log_names"), names_in(header, "tracked")
        serialization.restore(
            self.model, self.optimizer, self.scheduler, values, tensors, is_owned=True
        )
        self.step, self.skipped_in_a_row = step, skipped
        self.origin = entry(header, "origin", int) if "origin" in header else 0
        loss_scale = header.get("loss_scale")
        if self.loss_scale is not None and loss_scale:  # else keep the first one
            self.loss_scale = LossScale(*loss_scale)
        self.log_names = tuple(log_names)
        self.buffers.track_only(tracked)
        self._agreed = (self.buffers.tracked, self.log_names)
        self.buffers.refresh()

    def forget_unagreed(self) -> None:
        """Before another attempt at a step, by other members: they may not know what this one
        found out (changing buffers, names of logged values) in a step that was never committed."""
        tracked, self.log_names = self._agreed
        self.buffers.track_only(tracked)
