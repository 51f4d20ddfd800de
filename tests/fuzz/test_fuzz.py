"""Damaged files and frames, by seeds: every one is refused in a clean way or changes nothing.

`make test-faults` runs the long ones. An error names the seed, and `damage(Random(seed), content)`
gives its input again.
"""

import faulthandler
import os
import random
import signal
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from elastic.data.crashing import CRASHES
from tests.fuzz.target import REFUSALS, Target
from tests.fuzz.targets import TARGETS

MAX_S = 3.0
"""Of this process's own time, which other load on the machine does not change."""
MAX_BYTES = 64 * 2**20
FEW = 15
MANY = {
    "manifest": 30_000,
    "sealed-manifest": 1_500,
    "part": 12_000,
    "safetensors": 6_000,
    "torch": 3_000,
    "state-header": 6_000,
    "status": 1_500,
    "config": 1_500,
    "result": 1_500,
    "metrics": 1_500,
    "samples": 1_500,
    "journal": 600,
    "faults": 600,
    "feed-record": 2_000,
    "parquet": 4_000,
    "parquet-pages": 4_000,
    "hello": 40_000,
    "controllers-hello": 40_000,
    "messages": 40_000,
    "events": 10_000,
}


class Hang(BaseException):
    """An input took too long."""


def on_alarm(*_: object) -> None:
    raise Hang


def run(name: str, seeds: range, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    target = TARGETS[name](folder)
    if target.crashed is None:
        attempt_all(name, target, seeds)
        return
    first = seeds.start
    while first < seeds.stop:  # a child does it as long as it lives
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            in_child(name, target, range(first, seeds.stop), writer)
        os.close(writer)
        with open(reader, "rb") as said:
            begun = said.read().split()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        assert -status in CRASHES, f"{name}: status {status} at seed {begun[-1]}"
        first = int(begun[-1]) + 1
        assert target.crashed(target.damage(random.Random(first - 1), target.content))


def in_child(name: str, target: Target, seeds: range, told: int) -> NoReturn:
    faulthandler.disable()
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the C++ library says when it ends
        attempt_all(name, target, seeds, lambda seed: os.write(told, b"%d\n" % seed))
        os._exit(0)
    finally:
        os._exit(1)


def attempt_all(
    name: str, target: Target, seeds: range, tell: Callable[[int], object] = lambda _: None
) -> None:
    before = signal.signal(signal.SIGPROF, on_alarm)
    try:
        for seed in seeds:
            content = target.damage(random.Random(seed), target.content)
            tell(seed)
            signal.setitimer(signal.ITIMER_PROF, MAX_S)
            try:
                target.attempt(content)
            except REFUSALS:
                pass
            except BaseException as error:
                error.add_note(f"{name}, seed {seed}: {content[:200]!r}")
                raise
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.signal(signal.SIGPROF, before)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_damaged_inputs_are_refused_or_change_nothing(name: str, tmp_path: Path):
    run(name, range(FEW), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TARGETS)
def test_many_damaged_inputs_are_refused_or_change_nothing(name: str, tmp_path: Path):
    run(name, range(FEW, FEW + MANY[name]), tmp_path)


@pytest.mark.parametrize("name", ["hello", "controllers-hello"])
def test_a_stranger_takes_no_memory(name: str, tmp_path: Path):
    tracemalloc.start()
    try:
        run(name, range(10_000, 10_500), tmp_path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
