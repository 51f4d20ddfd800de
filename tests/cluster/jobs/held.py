"""Workloads whose workers can be held: while they build the model, or write the final state."""

import os
import time
from pathlib import Path

from torch.optim.lr_scheduler import LambdaLR
from toy import Toy

PATIENCE_S = 60.0


class HeldAtTheEnd(Toy):
    """Where peer memory has a copy of every step, the state of the last one is captured for it
    first, and for the final checkpoint then.

    folder: as long as its file `hold` exists, workers that write the final state wait in there, and
    leave a file each that is named by their pid.
    """

    def __init__(self, folder, steps, **settings):
        super().__init__(**settings)
        self.folder, self.steps = folder, steps

    def build_scheduler(self, optimizer):
        folder, steps = Path(self.folder), self.steps

        class Held(LambdaLR):
            def state_dict(self):
                if self.last_epoch == steps:
                    captured.append(steps)
                if len(captured) == 2:
                    hold(folder)
                return super().state_dict()

        captured: list[int] = []
        return Held(optimizer, lambda s: min(1.0, (s + 1) / 20))


class HeldAtTheStart(Toy):
    """folder: as above, of workers that build the model."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = folder

    def build_model(self):
        hold(Path(self.folder))
        return super().build_model()


def hold(folder):
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + PATIENCE_S
    while (folder / "hold").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
