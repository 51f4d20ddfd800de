"""Small workloads that exercise everything that must not see the world size."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import elastic
from workers.train_state.digest import weights_sha256


class Samples(torch.utils.data.Dataset):
    """Rows that depend on randomness drawn while they are loaded."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        noise = torch.randn(8) + float(np.random.rand())
        return torch.full((8,), i % 7 / 7) + noise, i % 4


class Counting(nn.Module):
    """Buffers that only its forward changes, in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("level", torch.zeros(4))
        self.register_buffer("evaluations", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.level.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        else:
            self.evaluations += 1
        return x


class Resting(elastic.Workload):
    """It sleeps in each micro-batch, while there is no file at `until`."""

    def __init__(self, sleep=0.0, until=None, beats=None):
        """sleep: seconds. beats: a file that gets a byte for each micro-batch of any rank, for
        tests that see whether there is training while no controller says it."""
        self.sleep, self.until, self.beats = sleep, until, beats

    def rest(self):
        if self.beats is not None:
            with open(self.beats, "ab") as file:
                file.write(b".")
        if self.until is None or not Path(self.until).exists():
            time.sleep(self.sleep)


class Toy(Resting):
    """BatchNorm, dropout, a parameter that only some micro-batches use, a schedule, a log."""

    def __init__(self, sleep=0.0, until=None, count=501, weighted=False, beats=None):
        super().__init__(sleep, until, beats)
        self.count, self.weighted = count, weighted

    def build_model(self):
        model = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(32, 4),
            Counting(),
        )
        model.register_parameter("sometimes", nn.Parameter(torch.ones(())))
        model.register_parameter("never", nn.Parameter(torch.ones(3)))
        return model

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-2)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 20))

    def dataset(self):
        return Samples(self.count)

    def loss(self, model, batch):
        self.rest()
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        if int(labels[0]) % 2:
            loss = loss * model.sometimes
        if self.weighted:
            return loss, labels.numel() - int(labels[0])
        return loss / labels.numel()


class Still(Toy):
    """Ends with the weights that it began with."""

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def build_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.0)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Large(Still):
    """As large as its state takes: to initialise, and to restore."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds = seconds

    def build_model(self):
        model = super().build_model()
        model.add_module("slow", Restored(self.seconds))
        return model

    def init_weights(self, module, name):
        if isinstance(module, nn.Linear):
            time.sleep(self.seconds / 2)
            nn.init.normal_(module.weight)

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.01)


class Restored(nn.Module):
    """It takes its time to be restored."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        return x

    def get_extra_state(self):
        return {}

    def set_extra_state(self, state):
        time.sleep(self.seconds)


class Hashed(Toy):
    """Writes the hash of its weights whenever it would evaluate."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def evaluate(self, session):
        (self.folder / str(session.step)).write_text(weights_sha256(session.model))


class Logging(Toy):
    """Logs, evaluates."""

    def loss(self, model, batch):
        self.session.log(twice=2 * batch[1].float().mean())
        return super().loss(model, batch)

    def evaluate(self, session):
        self.evaluations.append(session.step)
        return session.evaluate(Samples(37), lambda model, batch: {"mean": model(batch[0]).mean()})


class Evaluates(Toy):
    """Seven batches, so that ranks have different numbers of them."""

    def evaluate(self, session):
        mean = session.evaluate(Samples(37), lambda model, batch: model(batch[0]).mean())
        session.log(mean=mean)


def logging_loop(session):
    """A user's own loop: logs and evaluates."""
    workload = session.workload
    workload.session, workload.evaluations = session, []
    while session.step < session.steps:
        with session.next_step() as step:
            for batch in step.microbatches():
                step.backward(workload.loss(session.model, batch))
            step.commit()
        if step.committed and session.step % 4 == 0:
            workload.evaluate(session)


def saving_loop(session):
    """Saves when it likes, and waits until it is durable."""
    while session.step < session.steps:
        with session.next_step() as step:
            for batch in step.microbatches():
                step.backward(session.workload.loss(session.model, batch))
            step.commit()
        if step.committed and session.step == 7:
            assert session.save(pin=True).wait(60)


class DiesOnce(Toy):
    """The process that reaches step `at` first with `rank`'s micro-batch dies in `where`."""

    def __init__(self, marker, where="forward", at=5, **settings):
        super().__init__(**settings)
        self.marker, self.where, self.at = Path(marker), where, at

    def die(self, where):
        if where != self.where:
            return
        try:
            self.marker.touch(exist_ok=False)  # ranks get here at the same time: one of them dies
        except FileExistsError:
            return
        os.kill(os.getpid(), 9)

    def build_optimizer(self, params):
        workload = self

        class Dying(torch.optim.AdamW):
            steps = 0

            def step(self):
                self.steps += 1
                if self.steps >= workload.at:
                    workload.die("apply")
                super().step()
                if self.steps >= workload.at:
                    workload.die("applied")

        return Dying(params, lr=1e-2)

    def loss(self, model, batch):
        steps = int(model[1].num_batches_tracked)
        if steps >= self.at:
            self.die("forward")
        loss = super().loss(model, batch)
        if steps >= self.at and self.where == "backward":
            loss.register_hook(lambda gradient: self.die("backward"))
        return loss


class Dying(nn.Module):
    """Dies when the final state is written: it is asked for twice per snapshot, and the first one
    goes to peer memory."""

    def __init__(self, workload):
        super().__init__()
        self.workload, self.times_asked = workload, 0

    def forward(self, x):
        return x

    def get_extra_state(self):
        if self.workload.scheduler.last_epoch == self.workload.steps:
            self.times_asked += 1
            if self.times_asked == 3:
                self.workload.die("end")
        return 0

    def set_extra_state(self, state):
        pass


class DiesAtEnd(DiesOnce):
    """The first process that writes its part of the final state dies."""

    def __init__(self, marker, steps=30):
        super().__init__(marker, where="end")
        self.steps = steps

    def build_model(self):
        return super().build_model().append(Dying(self))

    def build_scheduler(self, optimizer):
        self.scheduler = super().build_scheduler(optimizer)
        return self.scheduler


class Raises(Toy):
    def loss(self, model, batch):
        if int(model[1].num_batches_tracked) >= 3:
            raise KeyError("the user's own mistake")
        return super().loss(model, batch)


class Mistake(ValueError):
    """Known only to this file, and lost by a plain pickle."""

    def __init__(self, what, where):
        super().__init__(f"{what} in {where}")


class RaisesItsOwn(Toy):
    def loss(self, model, batch):
        if int(model[1].num_batches_tracked) >= 3:
            raise Mistake("nonsense", "the labels")
        return super().loss(model, batch)


class RaisesInDataset(Toy):
    def dataset(self):
        samples = Samples(self.count)
        original = Samples.__getitem__

        class Broken(Samples):
            def __getitem__(self, i):
                if i == 17:
                    raise OSError("sample 17 is unreadable")
                return original(self, i)

        samples.__class__ = Broken
        return samples


class Unreduced(Toy):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Empty(Toy):
    def dataset(self):
        return []
