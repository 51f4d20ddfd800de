"""Small exact exchanges among the members of a generation, for rare occasions: over the control
group, so in host memory."""

import json
from typing import Any

import numpy as np
import torch

from workers.distributed.process_group import AnyGroup

SMALL_BYTES = 248
"""Of JSON: if no rank has more, all is said in one collective."""
LENGTH_BYTES = 8


def gather_json(group: AnyGroup, value: Any) -> list[Any]:
    """Every rank's JSON value, in rank order. A collective. Raises PeerLost."""
    if group.size() == 1:
        return [json.loads(json.dumps(value))]
    text = json.dumps(value).encode()
    framed = len(text).to_bytes(LENGTH_BYTES, "little") + text
    mine = np.zeros(LENGTH_BYTES + SMALL_BYTES, np.uint8)
    begin = np.frombuffer(framed, np.uint8)[: mine.size]
    mine[: begin.size] = begin
    received = torch.empty(group.size() * mine.size, dtype=torch.uint8)
    group.control.all_gather_flat(received, torch.from_numpy(mine)).wait()
    frames = [frame.tobytes() for frame in received.numpy().reshape(group.size(), -1)]
    sizes = [int.from_bytes(frame[:LENGTH_BYTES], "little") for frame in frames]
    if max(sizes) <= SMALL_BYTES:
        ends = [LENGTH_BYTES + size for size in sizes]
        return [json.loads(f[LENGTH_BYTES:end]) for f, end in zip(frames, ends, strict=True)]
    outputs = [torch.empty(n, dtype=torch.uint8) for n in sizes]
    whole = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
    group.control.all_gather(outputs, whole).wait()
    return [json.loads(bytes(t.numpy())) for t in outputs]
