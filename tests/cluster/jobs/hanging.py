"""Workloads that misbehave: hang in every way there is, are slow in harmless ways."""

import re
import time
from pathlib import Path

from toy import Toy  # pyright: ignore[reportMissingImports]

FOREVER_S = 3600
WARM_STEPS = 12
"""So many steps a process needs until its phases have a usual time."""


def sleep_for_ever():
    time.sleep(FOREVER_S)


def burn_for_ever():
    while True:
        pass


def hold_the_gil():
    re.match("(a+)+$", "a" * 99 + "b")


WAYS = {f.__name__: f for f in (sleep_for_ever, burn_for_ever, hold_the_gil)}


class Watched(Toy):
    """Knows its session. Run with eval_every=1."""

    session = None
    num_steps = 0

    def evaluate(self, session):
        self.session = session
        self.num_steps += 1


class Hangs(Watched):
    """Rank 1 hangs once in each of `ways`, in the loss, as soon as all are there and warm.

    marker: a folder, where whoever hangs leaves a file with the time.
    """

    def __init__(self, marker, ways, world_size=3, **settings):
        super().__init__(**settings)
        self.marker, self.ways, self.world_size = Path(marker), ways, world_size

    def loss(self, model, batch):
        if self.session is not None and self.num_steps >= WARM_STEPS:
            place = (self.session.rank, self.session.world_size)
            for way in self.ways if place == (1, self.world_size) else ():
                self.hang(way)
        return super().loss(model, batch)

    def hang(self, way):
        try:
            with (self.marker / way).open("x") as file:
                file.write(str(time.time()))
        except FileExistsError:
            return
        WAYS[way]()
