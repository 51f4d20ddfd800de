"""A workload that puts faults into its own worker processes, each once, at an exact instant.

An instant inside our code is reached by wrapping the function that lives there; the product knows
nothing of it.
"""

import os
import signal
import time
from pathlib import Path

import torch
from toy import Samples, Toy

NUMBERS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


class Faulty(Toy):
    """faults: (what, where, step), in the order in which they strike; the first process that gets
    there is hit. folder: where those that have struck are noted, for all processes."""

    def __init__(self, folder, faults=(), **settings):
        super().__init__(**settings)
        self.folder, self.faults = folder, faults

    def __setstate__(self, state):
        """Only in a worker: the driver constructs, loaders are forked."""
        vars(self).update(state)
        self.step = 0
        install(self)

    def strike(self, where):
        """The next fault, if this is its place and time."""
        folder = Path(self.folder)
        index = sum(1 for _ in folder.iterdir())
        if index >= len(self.faults):
            return
        what, place, step = self.faults[index]
        if place != where or self.step < step:
            return
        try:
            (folder / str(index)).touch(exist_ok=False)
        except FileExistsError:
            return  # another process was first
        if what == "hang":
            while True:
                time.sleep(60)
        if what == "alone":  # a collective that the others do not make
            self.session.evaluate(Samples(12), lambda model, batch: model(batch[0]).mean())
            return
        if what == "gpu":
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        os.kill(os.getpid(), NUMBERS[what])

    def loss(self, model, batch):
        self.strike("forward")
        loss = super().loss(model, batch)
        loss.register_hook(lambda gradient: self.strike("backward"))
        return loss


def install(workload):
    """Instants that the user's code does not see."""
    from workers.backup.copy import BackupCopy
    from workers.checkpoint.saver import _Job
    from workers.distributed.process_group import Group, OwnGroup
    from workers.session import Session, Step

    def before(kind, name, where):
        original = getattr(kind, name)

        def wrapped(*arguments, **named):
            workload.strike(where)
            return original(*arguments, **named)

        setattr(kind, name, wrapped)

    def after(kind, name, where):
        original = getattr(kind, name)

        def wrapped(*arguments, **named):
            found = original(*arguments, **named)
            workload.strike(where)
            return found

        setattr(kind, name, wrapped)

    next_step, contents = Session.next_step, _Job.contents

    def counted(session):
        workload.session, workload.step = session, session.step
        workload.strike("boundary")
        return next_step(session)

    def cut_short(job, copies):
        for i, content in enumerate(contents(job, copies)):
            if i == 1:
                workload.strike("save")
            yield content

    Session.next_step, _Job.contents = counted, cut_short
    after(Group, "_launch", "collective")  # our part is on its way, the others' is awaited
    before(Step, "_apply", "vote")  # all have voted, nothing is applied
    after(Step, "_apply", "applied")
    before(OwnGroup, "meet", "regroup")
    before(BackupCopy, "make", "copy")  # in the thread that keeps this rank's shard for others
