"""A collective of the script's own, in a call that goes on after losses: what it is mended with.

Who has missed its result takes it from who has it; some can be done again without the lost.
Whether they are is call_state.py's to judge.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.tensors.local import flat_bytes

KEPT_BYTES = 1 << 20
"""What is larger is not kept: its loss has the script called again."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of a collective, the same on all ranks."""

    tensors: tuple[Tensor, ...]

    def encoded(self) -> list[str]:
        return [
            base64.b64encode(flat_bytes(t).cpu().numpy().tobytes()).decode() for t in self.tensors
        ]


class OwnCollective:
    """One of the script's own, from its launch to its end."""

    def __init__(
        self,
        doing: str,
        outputs: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        source: int = -1,
    ) -> None:
        """doing: one of call_state.py's. outputs: where the result comes to be, if it is the same
        on all ranks. inputs: what the collective writes over. source: the member who sends; -1:
        all.
        """
        is_kept = sum(t.nbytes for t in (*outputs, *inputs)) <= KEPT_BYTES
        self.doing, self.source = doing, source
        self._outputs = tuple(outputs) if is_kept else ()
        self._inputs = [(t, t.detach().clone()) for t in inputs] if is_kept else []
        self.can_be_done_again = is_kept

    def result(self) -> Result | None:
        """None: it is not kept."""
        if not self._outputs:
            return None
        return Result(tuple(t.detach().clone() for t in self._outputs))

    @torch.no_grad()
    def take(self, encoded: Sequence[str]) -> None:
        """The result is that which another rank has."""
        for output, text in zip(self._outputs, encoded, strict=True):
            flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            output.copy_(flat.view(output.dtype).view(output.shape))

    @torch.no_grad()
    def restore(self) -> None:
        """Before it is done again: a failed one has left garbage."""
        for tensor, before in self._inputs:
            tensor.copy_(before)


def plain(result: Any) -> Any:
    """As JSON has it."""
    return result.encoded() if isinstance(result, Result) else result
