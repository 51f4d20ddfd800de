"""A link with a delay, where the kernel has no netem: two TAP devices, frames passed on later.

Run as a script: python relay.py NAME NAME DELAY_MS. It makes both devices, says "ready", and ends
when its standard input does. TAP devices announce no offloads, so frames are complete.
"""

import fcntl
import heapq
import os
import select
import struct
import sys
import time
from contextlib import suppress

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x0002 | 0x1000
FRAME_BYTES = 2**16


def tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), TAP_WITHOUT_HEADER))
    return device


def pass_on(ends: tuple[int, int], delay_s: float) -> None:
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    late: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait_s = None if not late else max(0.0, late[0][0] - time.monotonic())
        readable = select.select([*ends, sys.stdin], [], [], wait_s)[0]
        if sys.stdin in readable and not os.read(sys.stdin.fileno(), 1):
            return
        for end in set(readable) & set(ends):
            number += 1  # frames of one moment keep their order
            due = time.monotonic() + delay_s
            heapq.heappush(late, (due, number, other[end], os.read(end, FRAME_BYTES)))
        while late and late[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(late)
            with suppress(OSError):  # down, or its queue is full: a frame is lost, as on any link
                os.write(end, frame)


if __name__ == "__main__":
    taps = tap(sys.argv[1]), tap(sys.argv[2])
    print("ready", flush=True)
    pass_on(taps, float(sys.argv[3]) / 1e3)
