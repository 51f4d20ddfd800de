"""A step whose vote only some have seen complete: the others roll forward to the same bits."""

import queue

import pytest
import torch
from torch import nn

from elastic.protocol.errors import PeerLost
from elastic.protocol.seams import WorkerSpec
from workers import groups
from workers.build import build_replica
from workers.digest import weights_sha256
from workers.loader import Loader
from workers.member import Member, RunEnded
from workers.peer import PeerServer
from workers.saver import Saver
from workers.session import Session
from workers.vitals import Vitals

CPU = torch.device("cpu")


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


class FakeLink:
    """The controller's part: its commands are scripted, what is reported is kept."""

    def __init__(self):
        self.commands = queue.SimpleQueue()
        self.recorded_step = 0
        self.num_controllers = 1
        self.sent = []

    def send(self, kind, payload=b"", **fields):
        self.sent.append((kind, fields, payload))

    def of(self, kind):
        return [(fields, payload) for k, fields, payload in self.sent if k == kind]


class LosesVote(groups.Alone):
    """Fails the vote, the only all-reduce of a lone member."""

    def all_reduce(self, tensor):
        raise PeerLost("connection closed by peer")


def spec(reduction="bitwise"):
    return WorkerSpec(
        worker=0, run_id="r", token="t", controller=("127.0.0.1", 1), host="127.0.0.1",
        device="cpu", num_threads=1, folder=None, steps=9, global_batch=12, micro_batch=3,
        reduction=reduction, clip_norm=0.5, seed=3, eval_every=None, checkpoint_every=None,
        has_checkpoints=False, max_nonfinite=1,
        detect_s=3.0, heartbeat_s=0.5, join_timeout_s=5.0, operation_timeout_s=60.0, lease_s=30.0,
    )  # fmt: skip


class Rig:
    """One worker's objects without processes of a run around them, but for its loader."""

    def __init__(self, reduction):
        self.spec, self.workload, self.link = spec(reduction), Tiny(), FakeLink()
        self.loader = Loader(self.workload, 3, 12, 3)
        self.replica = build_replica(self.workload, self.spec, CPU)
        self.member = Member(
            self.spec, self.replica, self.link, PeerServer("127.0.0.1", "t", lambda: None),
            Saver(self.link, self.spec), Vitals(), CPU, on_load=lambda place, step: [],
            on_sync=lambda: None, on_log_to=lambda place: None,
            on_finish=lambda member, place: "hash",
        )  # fmt: skip
        self.session = Session(self.spec, self.workload, self.member, self.loader)

    def form(self, generation, step, vote=None, payload=b"", **changes):
        header = {
            "type": "form", "generation": generation, "rank": 0, "world_size": 1, "step": step,
            "store": None, "then_pause": False, "recorded_step": 0, "evaluation": None,
            "vote": vote, **changes,
        }  # fmt: skip
        self.link.commands.put((header, payload))

    def step(self):
        with self.session.next_step() as step:
            for batch in step.microbatches():
                step.backward(self.workload.loss(self.session.model, batch))
                self.session.log(size=batch[0].shape[0])
            step.commit()
        return step


@pytest.fixture(params=["bitwise", "fast"])
def rigs(request):
    torch.set_num_threads(1)
    made = [Rig(request.param) for _ in range(2)]
    for rig in made:
        rig.form(generation=1, step=0)
    yield made
    for rig in made:
        rig.loader.close()


def test_a_survivor_that_missed_the_vote_rolls_forward_to_the_same_bits(rigs):
    committed, behind = rigs
    for rig in rigs:
        assert rig.step().committed
    assert committed.step().committed
    behind.member.group = LosesVote()
    behind.session._reducer_of = (0, ())  # the reducer of the group that fails
    fields, payload = committed.link.of("committed")[-1]
    behind.link.commands.put(({"type": "abort", "generation": 1}, b""))
    behind.form(generation=2, step=2, vote=fields["vote"], payload=payload)
    assert behind.step().committed, "the step counts although its block was cancelled"
    suspended, _ = behind.link.of("suspended")[-1]
    assert (suspended["step"], suspended["is_prepared"]) == (1, True)
    assert behind.session.step == 2
    for rig in rigs:
        assert rig.step().committed
    assert weights_sha256(committed.replica.model) == weights_sha256(behind.replica.model)
    records = [
        {
            line["samples"]["step"]: line["samples"]
            for fields, _ in rig.link.of("committed")
            for line in fields["steps"]
        }
        for rig in rigs
    ]
    assert records[0] == records[1], "said twice perhaps, but the same"
    assert list(records[0]) == [1, 2, 3]


def test_a_cancelled_step_leaves_the_state_and_is_done_again(rigs):
    calm, cancelled = rigs
    for rig in rigs:
        rig.step()
    before = weights_sha256(cancelled.replica.model)
    cancelled.link.commands.put(({"type": "abort", "generation": 1}, b""))
    cancelled.form(generation=2, step=1)
    with cancelled.session.next_step() as step:
        for batch in step.microbatches():
            try:
                cancelled.member.group.abandon()
                step.backward(cancelled.workload.loss(cancelled.session.model, batch))
            except Exception:
                pytest.fail("a user's `except Exception` must not eat the cancellation")
    assert not step.committed
    assert weights_sha256(cancelled.replica.model) == before
    suspended, _ = cancelled.link.of("suspended")[-1]
    assert (suspended["step"], suspended["is_prepared"]) == (1, False)
    for rig in rigs:
        rig.step()
    assert weights_sha256(cancelled.replica.model) == weights_sha256(calm.replica.model)


def test_a_pause_is_taken_at_the_next_boundary_by_the_vote(rigs):
    rig, _ = rigs
    rig.step()
    rig.member.interrupt({"type": "pause", "generation": 1})
    assert rig.step().committed
    assert rig.link.of("paused") == []
    rig.form(generation=2, step=2)
    assert rig.step().committed
    assert rig.link.of("paused") == [({"generation": 1, "rank": 0, "step": 2}, b"")]


def test_the_block_says_what_is_wrong_with_a_loop(rigs):
    rig, _ = rigs
    with pytest.raises(RuntimeError, match=r"without step\.commit\(\)"), rig.session.next_step():
        pass
    with rig.session.next_step() as step:
        for batch in step.microbatches():
            step.backward(rig.workload.loss(rig.session.model, batch))
        with pytest.raises(RuntimeError, match="second time"):
            next(step.microbatches())
        with pytest.raises(RuntimeError, match="still open"):
            rig.session.next_step()
        step.commit()
        with pytest.raises(RuntimeError, match="second time"):
            step.commit()


def test_the_end_of_the_run_unwinds_the_loop(rigs):
    rig, _ = rigs
    rig.step()
    rig.member.interrupt({"type": "pause", "generation": 1})
    rig.step()
    finish = {"type": "finish", "generation": 1, "rank": 0, "world_size": 1, "outcome": "stopped"}
    finish["log_folder"] = None
    rig.link.commands.put((finish, b""))
    with pytest.raises(RunEnded):
        rig.step()
    assert rig.link.of("ended") == [({"generation": 1, "rank": 0, "weights_sha256": "hash"}, b"")]
