"""Ray's part of a script, as ranks have it that no cluster has started: it never looks for one.

Ranks are forked from a process that has imported it, which takes a second.
"""

import os

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # Ray reads it while it is imported

import ray.train.torch  # noqa: F401
