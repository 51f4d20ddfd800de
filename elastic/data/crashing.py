"""Files that end the process that reads them: which ones do is tried in a process of its own.

What is read is units.py's and footers.py's.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that a process gives itself; who is short of memory is killed by another one."""
TRIAL_S = 600.0
TRIAL = """
import importlib, json, sys
asked = json.load(sys.stdin)
sys.path[:] = asked["sys_path"]
module, name = asked["function"]
function = getattr(importlib.import_module(module), name)
for arguments in asked["calls"]:
    print(flush=True)
    try:
        function(*arguments)
    except Exception:
        pass
"""
"""It says a line before each call: whoever counts them knows which call has ended the process."""


def crashes(function: tuple[str, str], calls: Sequence[Sequence[Any]]) -> dict[int, str]:
    """Which calls end a process of their own -> with which signal.

    function: module and name. calls: its arguments, as JSON has them.
    """
    found: dict[int, str] = {}
    first = 0
    while first < len(calls):
        asked = {"function": function, "calls": calls[first:], "sys_path": sys.path}
        try:
            done = subprocess.run(
                [sys.executable, "-c", TRIAL],
                input=json.dumps(asked).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=TRIAL_S,
            )
        except subprocess.TimeoutExpired:
            break
        begun = done.stdout.count(b"\n")
        if -done.returncode not in CRASHES or not begun:
            break
        first += begun
        found[first - 1] = signal.Signals(-done.returncode).name
    return found
