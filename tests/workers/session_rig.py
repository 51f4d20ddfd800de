"""One worker's objects without the processes of a run around them, but for its loader."""

import dataclasses
import queue
import re
from dataclasses import replace

import torch
from torch import nn

from elastic.protocol.mesh import Parallel
from elastic.protocol.messages.to_worker import Abort, Form
from elastic.protocol.worker_spec import Cpus, WorkerSpec
from tests.workers import where
from tests.workers.fake_groups import ThreadGroup
from tests.workers.waits import NAMES, waits
from workers.checkpoint.saver import Saver
from workers.data.loader import Loader
from workers.health.vitals import Vitals
from workers.loop import fit
from workers.membership.member import Member
from workers.membership.state_stream import PeerServer
from workers.parallel.build import build_strategy
from workers.session import Session
from workers.worker import Built

CPU = where.CPU


class Tiny:
    """BatchNorm, a weighted loss, values logged: all that a vote carries."""

    loader_processes = 1

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.1)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def dataset(self):
        return [(torch.full((4,), i / 7), float(i % 3)) for i in range(41)]

    def loss(self, model, batch):
        inputs, wanted = batch
        error = (model(inputs).squeeze(1) - wanted.float()).square()
        return error.sum(), float(inputs.shape[0] + 1)


def kind_of(report):
    """Its name as tests write it: PartSaved is part_saved."""
    return re.sub("(?<=.)([A-Z])", r"_\1", type(report).__name__).lower()


def form(generation, step, **changes):
    """The command, to a lone member unless `changes` say more; generation 1 did the steps."""
    alone = Form(
        generation=generation, rank=0, world_size=1, step=step, then_pause=False, recorded_step=0,
        store=None, vote=None, evaluation=None, holders=(), origin=min(1, step),
    )  # fmt: skip
    return replace(alone, **changes)


def abort(generation):
    return Abort(generation, 0, 1)


def obey(member, command):
    """Whether a generation has formed that may step."""
    member.hear(command)
    member._obey(command)
    return member.machine.is_at_work


class Commands(queue.SimpleQueue):
    """They come when they are taken: what comes earlier, a test has the member `hear`."""

    def hear(self, command):
        raise AssertionError("nobody is connected")

    def get(self, *arguments, **settings):
        command = super().get(*arguments, **settings)
        if command is not None:
            self.hear(command)
        return command


class FakeLink:
    """The controller's part: its commands are scripted, what is reported is kept."""

    def __init__(self):
        self.commands = Commands()
        self.recorded_step = 0
        self.concluded_saves = {}
        self.sent = []

    def send(self, report):
        fields = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
        payload = fields.pop("payload", b"")
        self.sent.append((kind_of(report), fields, payload))

    def wake(self):
        self.commands.put(None)

    def hear_recorded(self, step):
        self.recorded_step = min(self.recorded_step, step)

    def hear_of_peers(self, recorded_step):
        self.recorded_step = max(self.recorded_step, recorded_step)

    def go_back(self, generation, step, recorded_step):
        self.recorded_step = min(self.recorded_step, step)

    def of(self, kind):
        return [(fields, payload) for k, fields, payload in self.sent if k == kind]


def spec(reduction="bitwise", *, parallel="ddp", **changes):
    """changes: of its fields, and of those of its timeouts."""
    seconds = {"join_s": 5.0, "operation_s": 60.0}
    seconds |= {name: changes.pop(name) for name in NAMES if name in changes}
    plain = WorkerSpec(
        worker=0, run_id="r", token="t", controller=("127.0.0.1", 1), host="127.0.0.1",
        device="cpu", cpus=Cpus(1), folder=None, steps=9, global_batch=12, micro_batch=3,
        parallel=Parallel.of(parallel), reduction=reduction, clip_norm=0.5, seed=3,
        eval_every=None, checkpoint_every=None, max_nonfinite=1, detect_s=3.0,
        timeouts=waits(**seconds), has_checkpoints=False,
    )  # fmt: skip
    return replace(plain, **changes)


class InThread(ThreadGroup):
    """A group of threads that a member can be given."""

    is_abandoned = False

    def abandon(self):
        self.is_abandoned = True


class Rig:
    """See above. `form` scripts the controller's command, `step` makes one."""

    def __init__(self, reduction, workload=None, *, thread=0, **changes):
        """thread: the rank's that this one will be, where ranks are threads."""
        self.device = where.of_rank(thread)
        self.spec, self.link = spec(reduction, **changes), FakeLink()
        self.workload = workload or Tiny()
        self.loader = Loader(self.workload, 3, 12, 3)
        self.strategy = build_strategy(self.workload, self.spec, self.device)
        self.train_state = self.strategy.train_state
        self.member = Member(
            self.spec, self.strategy, self.link, PeerServer("127.0.0.1", "t", lambda: None, 3.0),
            saver=Saver(self.link, self.spec), vitals=Vitals(), device=self.device,
            on_load=lambda place, step: [],
            on_log_to=lambda place: None, on_finish=lambda member, place: "hash",
        )  # fmt: skip
        self.link.commands.hear = self.member.hear
        self.session = Session(self.spec, self.workload, self.member, self.loader)

    @property
    def built(self):
        """As a worker has it."""
        return Built(
            self.workload, self.strategy, self.member.peers, self.member.saver, self.member,
            self.session, fit,
        )  # fmt: skip

    def form(self, generation, step, vote=None, payload=b"", **changes):
        self.link.commands.put(form(generation, step, vote=vote, payload=payload, **changes))

    def step(self):
        where.use(self.device)
        with self.session.next_step() as step:
            for batch in step.microbatches():
                step.backward(self.workload.loss(self.session.model, batch))
                self.session.log(size=batch[0].shape[0])
            step.commit()
        return step

    def join(self, group):
        """Be a rank of `group` from now on, in this thread."""
        where.use(self.device)
        assert self.session.step == 0  # waits for the first generation
        self.member.own.group, group.waiting_for = group, self.member.vitals.waiting_for
        self.sit(group.rank(), group.size())

    def sit(self, rank, world_size=1):
        """Be that rank of the generation at hand, which has more members than one."""
        seat = replace(self.member.machine.seat, rank=rank, world_size=max(world_size, rank + 1))
        self.member.machine = replace(self.member.machine, seat=seat)
