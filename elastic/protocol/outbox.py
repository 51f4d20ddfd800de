"""What one end of a link has said, until the other end has heard it: a link that is taken up again
over another connection goes on where it stood, with no frame lost or said twice.

Both ends count the frames that they have heard, in order. Who connects is elsewhere.
"""

from collections import deque


class Outbox:
    """Frames in order: heard ones are forgotten, sent ones are kept, the others wait."""

    def __init__(self) -> None:
        self._sent: deque[bytes] = deque()
        self.unsent: deque[bytes] = deque()
        self._num_heard = 0

    def sent(self) -> None:
        """The first of the unsent ones has been."""
        self._sent.append(self.unsent.popleft())

    def heard(self, num_heard: int) -> None:
        """The other end has heard so many since the link began."""
        while self._num_heard < num_heard and self._sent:
            self._sent.popleft()
            self._num_heard += 1

    def take_up(self, num_heard: int) -> None:
        """Over another connection; what was not heard is to be sent again."""
        self.heard(num_heard)
        self.unsent.extendleft(reversed(self._sent))
        self._sent.clear()

    def begin(self, *first: bytes) -> None:
        """Another link: what was sent over the last one is none of its business."""
        self._sent.clear()
        self._num_heard = 0
        self.unsent.extendleft(reversed(first))
