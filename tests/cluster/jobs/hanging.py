"""Workloads that misbehave: hang in every way there is, are slow in harmless ways."""

import ctypes
import os
import re
import time
from pathlib import Path

import torch
from toy import Samples, Toy  # pyright: ignore[reportMissingImports]

FOREVER_S = 3600
WARM_STEPS = 12
"""So many steps a process needs until its phases have a usual time that is one."""


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


class Misbehaves(Watched):
    """Each of `ways` once, in their order, on a certain rank, when it has made some steps there.

    marker: a folder, where whoever does it leaves a file with the time.
    """

    def __init__(self, marker, ways, rank=1, world_size=3, **settings):
        super().__init__(**settings)
        self.marker, self.ways = Path(marker), ways
        self.place = (rank, world_size)

    def due(self):
        """The next way, if it is this process's turn."""
        if self.session is None:
            return None
        if (self.session.rank, self.session.world_size) != self.place:
            self.num_steps = 0  # so that it is long in its place, and the regroup before is over
        if self.num_steps < WARM_STEPS:
            return None
        for way in self.ways:
            try:
                with (self.marker / way).open("x") as file:
                    file.write(str(time.time()))
            except FileExistsError:
                continue
            self.num_steps = 0
            return way
        return None


class Hangs(Misbehaves):
    """In the loss."""

    def loss(self, model, batch):
        way = self.due()
        if way is not None:
            WAYS[way]()
        return super().loss(model, batch)


class Hungry(Misbehaves):
    """Moves into a memory control group, `group`, and takes more than there is."""

    def __init__(self, group, **settings):
        super().__init__(ways=["eat"], **settings)
        self.group = Path(group)

    def loss(self, model, batch):
        if self.due():
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
            eaten = []
            while True:  # the kernel ends this process
                eaten.append(os.urandom(2**20))
                time.sleep(0.03)
        return super().loss(model, batch)


class GoesAstray(Misbehaves):
    """Evaluates alone, which all ranks must do together; has a bit of its weights flipped."""

    is_to_flip = False

    def evaluate(self, session):
        super().evaluate(session)
        way = self.due()
        if way == "evaluate_alone":
            session.evaluate(Samples(12), lambda model, batch: model(batch[0]).mean())
        self.is_to_flip = way == "flip_a_bit"

    def loss(self, model, batch):
        if self.is_to_flip:
            self.is_to_flip = False
            model[0].weight.data.view(torch.int32)[1, 2] ^= 1 << 20
        return super().loss(model, batch)


class Harmless(Watched):
    """Slow in every way that is no hang: the first passes, a tokenizer that holds the GIL in each
    step of rank 1, an evaluation of rank 0's own, a compilation in the middle of a step."""

    num_losses = 0

    def __init__(self, detect_s, **settings):
        super().__init__(**settings)
        self.detect_s = detect_s

    def evaluate(self, session):
        super().evaluate(session)
        if session.rank == 0 and self.num_steps == 6:
            time.sleep(4 * self.detect_s)

    def loss(self, model, batch):
        self.num_losses += 1
        if self.num_losses <= 2:
            time.sleep(5 * self.detect_s)
        rank = 0 if self.session is None else self.session.rank
        if rank == 1 and self.num_losses % 4 == 0:
            ctypes.PyDLL(None).usleep(int(2e6 * self.detect_s))
        if rank == 0 and self.num_steps == 9 and self.num_losses % 4 == 0:
            torch.compile(lambda x: 2 * x, backend=self.compile_slowly)(torch.ones(3))
        return super().loss(model, batch)

    def compile_slowly(self, graph, _):
        time.sleep(4 * self.detect_s)
        return graph.forward


class Slow(Watched):
    """One process, whichever is rank 1 at the third step, is five times as slow as the others."""

    is_slow = False

    def __init__(self, marker, **settings):
        super().__init__(**settings)
        self.marker = Path(marker)

    def evaluate(self, session):
        super().evaluate(session)
        if (session.rank, session.world_size, self.num_steps > 2) == (1, 3, True):
            try:
                (self.marker / "slow").touch(exist_ok=False)
                self.is_slow = True
            except FileExistsError:
                return

    def loss(self, model, batch):
        if self.is_slow:
            time.sleep(4 * self.sleep)
        return super().loss(model, batch)


class OneSlowSample(Samples):
    """`slow` takes far longer than the others, wherever it is loaded."""

    def __init__(self, count, slow, slow_s):
        super().__init__(count)
        self.slow, self.slow_s = slow, slow_s

    def __getitem__(self, i):
        if i == self.slow:
            time.sleep(self.slow_s)
        return super().__getitem__(i)


class SlowOnce(Watched):
    """A slow sample, and a slow micro-batch in step `slow_step`, for whoever is rank 1 there."""

    def __init__(self, slow, slow_step, slow_s, **settings):
        super().__init__(**settings)
        self.slow, self.slow_step, self.slow_s = slow, slow_step, slow_s

    def dataset(self):
        return OneSlowSample(self.count, self.slow, self.slow_s)

    def loss(self, model, batch):
        at = (0, 0) if self.session is None else (self.session.step + 1, self.session.rank)
        if at == (self.slow_step, 1):
            time.sleep(self.slow_s)
        return super().loss(model, batch)
