"""Files that end the process that reads them: which ones do is tried in a process of its own.

What is read is units.py's and footers.py's.
"""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that a process gives itself; who is short of memory is killed by another one."""
TRIAL_S = 600.0
TRIAL = """
import importlib, json, os, sys
from concurrent.futures import ThreadPoolExecutor
asked = json.load(sys.stdin)
sys.path[:] = asked["sys_path"]
module, name = asked["function"]
function = getattr(importlib.import_module(module), name)
def call(place):
    os.write(1, b"%d\\n" % place)
    try:
        function(*asked["calls"][place])
    except Exception:
        pass
    os.write(1, b"%d\\n" % place)
with ThreadPoolExecutor(asked["at_once"]) as pool:
    list(pool.map(call, range(len(asked["calls"]))))
"""
"""It says a call's number before and after it: said once, the call may have ended the process."""


def crashes(
    function: tuple[str, str], calls: Sequence[Sequence[Any]], at_once: int = 1
) -> dict[int, str]:
    """Which calls end a process of their own -> with which signal.

    function: module and name. calls: its arguments, as JSON has them. at_once: how many are made
    at the same time; those among which the process ended are then made one by one.
    """
    found: dict[int, str] = {}
    left = list(range(len(calls)))
    while left:
        asked = {"function": function, "calls": [calls[n] for n in left], "at_once": at_once}
        try:
            done = subprocess.run(
                [sys.executable, "-c", TRIAL],
                input=json.dumps({**asked, "sys_path": sys.path}).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=TRIAL_S,
            )
        except subprocess.TimeoutExpired:
            break
        said = Counter(done.stdout.split())
        times = {number: said[b"%d" % place] for place, number in enumerate(left)}
        suspects = [number for number in left if times[number] == 1]
        if -done.returncode not in CRASHES or not suspects:
            break
        if len(suspects) == 1:
            found[suspects[0]] = signal.Signals(-done.returncode).name
        else:
            alone = crashes(function, [calls[number] for number in suspects])
            found |= {suspects[place]: name for place, name in alone.items()}
        left = [number for number in left if not times[number]]
    return found
