"""Where the processes of a test's ranks come from: a server that has imported torch and Ray once.

A process of its own for each rank takes 3 s of a core for its imports; a forked one, 0.1 s.
The server has no threads; a test process has, and a fork of one once hung in MKL's allocator.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """One server for each test process; it ends with it. Its children have the environment that
    the test process had at the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.workers.preloaded"])
    return context
