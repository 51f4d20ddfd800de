"""Fixtures of more than one file here."""

import os
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def process():
    """process("ray::title") -> a process of that title that sleeps."""
    made = []

    def make(title: str) -> subprocess.Popen:
        made.append(subprocess.Popen([title, "600"], executable="/bin/sleep"))
        command = Path(f"/proc/{made[-1].pid}/cmdline")
        while not command.read_bytes():  # Popen returns in the middle of the kernel's exec
            os.sched_yield()
        return made[-1]

    yield make
    for one in made:
        one.kill()
        one.wait()
