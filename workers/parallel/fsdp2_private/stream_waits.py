"""Where FSDP2 has the stream of the passes wait for peers. The same wait comes before it, within
what is told of it; FSDP2's own has nothing to wait for then.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def tell_waits(group: Any, waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """group: FSDP2's record of a parameter group. waiting: entered around each wait."""
    kind: Any = type(group)

    def wait(event: torch.Event | None) -> None:
        if event is not None:
            with waiting():
                torch.accelerator.current_stream(group.device).wait_event(event)

    def wait_for_unshard() -> None:
        if (gathered := group._all_gather_result) is not None:
            wait(gathered.all_gather_event)
        kind.wait_for_unshard(group)

    def post_backward(*unused: Any) -> None:
        context = group.comm_ctx
        sent, most = context.reduce_scatter_states, context.reduce_scatter_max_input_buffers
        if len(sent) >= most:
            wait(sent[-most].event)
        wait(group._post_reduce_event)
        kind.post_backward(group, *unused)

    def finalize_backward() -> None:
        for event in group.comm_ctx._last_post_reduce_events.values():
            wait(event)
        kind.finalize_backward(group)

    group.wait_for_unshard = wait_for_unshard
    group.post_backward, group.finalize_backward = post_backward, finalize_backward
