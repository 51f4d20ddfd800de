"""Work that grows with the state, once a generation's groups have formed and before its first step:
done in pieces, so that it has no deadline as a whole.

Each piece is a sign of life, and between two of them the member looks at whether the generation is
given up. What is done is of no concern here.
"""

import time
from collections.abc import Callable

import torch

from workers.distributed.pending import Settling
from workers.distributed.process_group import AnyGroup

ROUND_OF_JOINING = 0.5
"""Ranks that are apart meet after this part of what a generation has for forming."""
LOOK_S = 0.05
"""Between two looks, while the storage is away."""


class Pieces:
    """Those of one member for one generation.

    Ranks may be apart for longer than the backend lets a collective wait. So they meet every now
    and then in a round, a collective of one number that nobody waits for before its own work is
    done; the last round is the one in which all say that they are done.
    """

    def __init__(
        self,
        group: AnyGroup,
        say_alive: Callable[[], None],
        round_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """say_alive: called before each piece. round_s: between rounds; far below the backend's own
        limit per collective."""
        self._group, self._say_alive = group.control, say_alive
        self._round_s, self._clock = round_s, clock
        self._round: tuple[Settling, torch.Tensor] | None = None
        self._due_at = clock() + round_s

    def begin(self) -> None:
        """A piece between collectives. PeerLost once the generation is given up."""
        self.check()
        self._say_alive()

    def check(self) -> None:
        """PeerLost once the generation is given up."""
        self._group.check()

    def begin_apart(self) -> None:
        """A piece of a stretch without collectives, which ends with `wait_for_all`."""
        if self._round is not None and self._round[0].is_settled:
            self._end_round()
        if self._round is None and self._clock() >= self._due_at:
            self._begin_round(is_done=False)
        self.begin()  # last: a round that ends looks like waiting for peers

    def rest(self, pause_s: float) -> None:
        """A piece in which nothing is done."""
        end = time.monotonic() + pause_s
        while (left_s := end - time.monotonic()) > 0:
            self.begin_apart()
            time.sleep(min(left_s, LOOK_S))

    def wait_for_all(self) -> None:
        """Until the others are here, too. A collective. Raises PeerLost."""
        self.begin()
        if self._round is not None:
            self._end_round()
        num_done = 0
        while num_done < self._group.size():
            self._begin_round(is_done=True)
            num_done = self._end_round()

    def _begin_round(self, *, is_done: bool) -> None:
        number = torch.full((1,), int(is_done), dtype=torch.int64)
        self._round = self._group.all_reduce(number), number

    def _end_round(self) -> int:
        """Gives how many are done."""
        assert self._round is not None
        pending, number = self._round
        pending.wait()
        self._round, self._due_at = None, self._clock() + self._round_s
        return int(number.item())
