"""What happens to few: memory formats, scarce memory, slow disks, states that nobody can take over,
a process that freezes with all but its own work done."""

import resource
import time
from collections import deque
from pathlib import Path

import torch
from hanging import FOREVER_S, Watched  # pyright: ignore[reportMissingImports]
from torch import nn
from toy import Toy  # pyright: ignore[reportMissingImports]

from elastic.store import checkpoint_files


class ChannelsLast(Toy):
    """Convolutions with fused updates, in `torch.channels_last`."""

    def build_model(self):
        model = nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)),
            nn.Conv2d(2, 16, 2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 8, 2),
            nn.Flatten(),
            nn.Linear(32, 4),
        )
        return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-2, fused=True)

    def loss(self, model, batch):
        self.rest()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Remembers(torch.optim.SGD):
    """Keeps the last norms in a deque, which cannot be carried."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("norms", deque()).append(float(p.detach().norm()))


class KeepsADeque(ChannelsLast):
    def build_optimizer(self, params):
        return Remembers(params, lr=0.1)


class Bulky(ChannelsLast):
    """`numbers` parameters in one tensor."""

    def __init__(self, numbers, **settings):
        super().__init__(**settings)
        self.numbers = numbers

    def build_model(self):
        model = super().build_model()
        model.register_parameter("bulk", nn.Parameter(torch.ones(self.numbers)))
        return model

    def loss(self, model, batch):
        return super().loss(model, batch) + 1e-3 * model.bulk.mean()


class Starved(Bulky):
    """The first process that comes after `marker`/killed is given no memory for what it copies."""

    def __init__(self, marker, spare, **settings):
        super().__init__(**settings)
        self.marker, self.spare = Path(marker), spare

    def build_optimizer(self, params):
        if (self.marker / "killed").exists() and not (self.marker / "starved").exists():
            (self.marker / "starved").touch()
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + self.spare
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return super().build_optimizer(params)


class WritesSlowly(Bulky):
    """Each block of a checkpoint takes `seconds`."""

    def __init__(self, seconds, **settings):
        super().__init__(**settings)
        self.seconds = seconds

    def build_model(self):
        write, seconds = checkpoint_files._LocalFile.write, self.seconds

        def slowly(file, block):
            time.sleep(seconds)
            write(file, block)

        checkpoint_files._LocalFile.write = slowly  # type: ignore[method-assign]
        return super().build_model()


class FreezesInItsLastStep(Watched):
    """Rank 1, once: it has voted, the others take the step and are through."""

    def __init__(self, marker, steps, **settings):
        super().__init__(**settings)
        self.marker, self.steps = Path(marker), steps

    def build_optimizer(self, params):
        workload = self

        class Freezing(torch.optim.AdamW):
            def step(self, closure=None):
                session = workload.session
                if session and (session.rank, session.step) == (1, workload.steps - 1):
                    try:
                        (workload.marker / "frozen").touch(exist_ok=False)
                        time.sleep(FOREVER_S)
                    except FileExistsError:
                        pass
                super().step(closure)

        return Freezing(params, lr=1e-2)
