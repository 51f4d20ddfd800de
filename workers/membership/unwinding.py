"""What a member raises through the user's code, which must not catch it: no Exceptions; and what it
looks for in the exceptions of that code."""

from traceback import clear_frames

import torch

from elastic.protocol.errors import PeerLost
from workers.health import gpu


class RunEnded(BaseException):
    """The controller ended the run; unwinds the user's loop."""


class RolledBack(BaseException):
    """The run went back to a checkpoint in the middle of the user's code outside steps; unwinds
    the user's loop, which begins again."""


def let_go(error: BaseException | None, device: torch.device) -> None:
    """Of a cancelled step: what its frames hold is freed, which the next state needs. Raises
    torch.AcceleratorError if the device has failed with a peer's: they are lost together."""
    gpu.touch(device)
    clear_frames(error.__traceback__ if error else None)


def lost_peer_in(error: BaseException) -> PeerLost | None:
    """The lost peer that an exception is, or was raised from."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, PeerLost):
        found = found.__cause__ or found.__context__
    return found
