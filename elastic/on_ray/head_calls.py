# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Calls that Ray's head must answer, beside the controller's loop, which never waits for the head.

While the head is stopped such a call blocks its thread for as long as a minute, then it fails: to
make an actor, or to look for one by its name. To call or to kill an actor does neither.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ray.exceptions import GetTimeoutError, RpcError

from elastic.store.files import first_line

log = logging.getLogger(__name__)
RETRY_S = 0.5
END_S = 3.0
"""How long the end of a run waits for a call under way..."""
AFTER_END_S = 10.0
"""...which is made again for as long as this process may still live."""

Answer = TypeVar("Answer")


class HeadCalls:
    """One thread, so in order; a call that the head did not answer is made again."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "head-calls")
        self._under_way: set[Future[Any]] = set()
        self._until = math.inf

    def start(self, call: Callable[[], Answer]) -> "Future[Answer]":
        """`call` may be made more than once."""
        answer = self._executor.submit(self._insist, call)
        self._under_way.add(answer)
        answer.add_done_callback(self._under_way.discard)
        return answer

    def _insist(self, call: Callable[[], Answer]) -> Answer:
        while True:
            try:
                return call()
            except (GetTimeoutError, RpcError) as error:
                if time.monotonic() > self._until:
                    raise
                log.warning('head reason="%s"', first_line(error))
                time.sleep(RETRY_S)

    def close(self) -> None:
        """What has not begun is not done any more. What the head has made for a call that it did
        not answer is known by its answer to the next one only, and must be ended, too."""
        self._until = time.monotonic() + AFTER_END_S
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def rest(self) -> None:
        """Wait until the call under way is over and its answer has been dealt with, if the head is
        not away for long."""
        calls = [asyncio.wrap_future(call) for call in tuple(self._under_way)]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), END_S)
