"""A step whose vote only some have seen complete: the others roll forward to the same bits."""

import contextlib
import threading
from dataclasses import replace

import pytest
import torch

from elastic.protocol.errors import PeerLost
from elastic.protocol.messages.to_controller import Suspended
from elastic.protocol.messages.to_worker import Finish, Pause, Recall
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.workers import where
from tests.workers.fake_groups import Done, run_threads
from tests.workers.session_rig import InThread, Rig, Tiny, abort, obey
from workers.distributed.process_group import Alone
from workers.membership.member import RunEnded
from workers.membership.state import BrokenInvariant, Holding
from workers.parallel.shards import Ownership
from workers.train_state.digest import weights_sha256

pytestmark = pytest.mark.usefixtures("place_slowly")


class LosesVote(Alone):
    """Fails the vote, the only all-reduce of a lone member."""

    def all_reduce(self, tensor):
        raise PeerLost("connection closed by peer")


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
    behind.member.own.group = LosesVote()
    behind.session._reducer_of = (0, ())  # the reducer of the group that fails
    fields, payload = committed.link.of("committed")[-1]
    behind.link.commands.put(abort(1))
    behind.form(generation=2, step=2, vote=fields["vote"], payload=payload)
    assert behind.step().committed, "the step counts although its block was cancelled"
    suspended, _ = behind.link.of("suspended")[-1]
    assert (suspended["step"], suspended["prepared_by"]) == (1, 1)
    assert behind.session.step == 2
    for rig in rigs:
        assert rig.step().committed
    assert weights_sha256(committed.train_state.model) == weights_sha256(behind.train_state.model)
    records = [
        {
            step.step: step.samples
            for fields, _ in rig.link.of("committed")
            for step in fields["steps"]
        }
        for rig in rigs
    ]
    assert records[0] == records[1], "said twice perhaps, but the same"
    assert list(records[0]) == [1, 2, 3]


def leave_behind(committed, behind):
    """One has committed step 2, whose vote the other has lost; what the first one says of it."""
    for rig in (committed, behind):
        rig.step()
    committed.step()
    behind.member.own.group = LosesVote()
    behind.session._reducer_of = (0, ())
    behind.link.commands.put(abort(1))
    return committed.link.of("committed")[-1]


def test_who_is_recalled_from_a_generation_it_was_never_told_of_answers_and_rolls_forward(
    rigs, monkeypatch
):
    """Its Form waited for a rendezvous, and it was given up meanwhile."""
    committed, behind = rigs
    fields, payload = leave_behind(committed, behind)
    recall = Recall(2, 1, 2)
    say = behind.link.send

    def send(report):
        if isinstance(report, Suspended) and report.generation == 1:
            behind.member.hear(recall)
        return say(report)

    monkeypatch.setattr(behind.link, "send", send)
    behind.link.commands.put(recall)
    behind.form(generation=3, step=2, vote=fields["vote"], payload=payload)
    assert behind.step().committed
    said = [fields for fields, _ in behind.link.of("suspended")]
    assert [(f["generation"], f["rank"], f["step"], f["prepared_by"]) for f in said] == [
        (1, 0, 1, 1),
        (2, 1, 1, 1),
    ]
    assert weights_sha256(committed.train_state.model) == weights_sha256(behind.train_state.model)


def test_who_rolls_forward_comes_to_its_evaluation_before_it_pauses(rigs):
    committed, behind = rigs
    fields, payload = leave_behind(committed, behind)
    behind.form(generation=2, step=2, vote=fields["vote"], payload=payload, then_pause=True)
    behind.form(generation=3, step=2)
    assert behind.step().committed
    assert (behind.link.of("paused"), behind.session.generation) == ([], 2)
    behind.step()
    assert behind.link.of("paused") == [({"generation": 2, "rank": 0, "step": 2, "origin": 1}, b"")]


def test_a_cancelled_step_leaves_the_state_and_is_done_again(rigs):
    calm, cancelled = rigs
    for rig in rigs:
        rig.step()
    before = weights_sha256(cancelled.train_state.model)
    cancelled.link.commands.put(abort(1))
    cancelled.form(generation=2, step=1)
    with cancelled.session.next_step() as step:
        for batch in step.microbatches():
            try:
                cancelled.member.hear(abort(1))
                step.backward(cancelled.workload.loss(cancelled.session.model, batch))
            except Exception:
                pytest.fail("a user's `except Exception` must not eat the cancellation")
    assert not step.committed
    assert weights_sha256(cancelled.train_state.model) == before
    suspended, _ = cancelled.link.of("suspended")[-1]
    assert (suspended["step"], suspended["prepared_by"]) == (1, 0)
    for rig in rigs:
        rig.step()
    assert weights_sha256(cancelled.train_state.model) == weights_sha256(calm.train_state.model)


def test_what_a_step_raises_once_its_generation_was_given_up_is_not_the_users_failure(rigs):
    """What it has computed may be of garbage."""
    calm, cancelled = rigs
    cancelled.link.commands.put(abort(1))
    cancelled.form(generation=2, step=0)
    with cancelled.session.next_step() as step:
        for _ in step.microbatches():
            cancelled.member.hear(abort(1))
            raise ValueError("the loss is 1e38")
    assert not step.committed
    for rig in rigs:
        rig.step()
    assert weights_sha256(cancelled.train_state.model) == weights_sha256(calm.train_state.model)


class AbandonedInVote(Alone):
    """Its vote ends without an error, as an aborted NCCL kernel does, in a generation given up."""

    def __init__(self, member):
        super().__init__()
        self._member = member

    def all_reduce(self, tensor):
        self._member.hear(abort(1))
        assert self.is_abandoned
        return Done()


def test_a_vote_of_a_generation_that_was_given_up_meanwhile_commits_nothing(rigs):
    rig, _ = rigs
    rig.step()
    before = weights_sha256(rig.train_state.model)
    rig.member.own.group = AbandonedInVote(rig.member)
    rig.session._reducer_of = (0, ())
    rig.link.commands.put(abort(1))
    rig.form(generation=2, step=1)
    assert not rig.step().committed
    assert (rig.session.step, weights_sha256(rig.train_state.model)) == (1, before)
    suspended, _ = rig.link.of("suspended")[-1]
    assert (suspended["step"], suspended["prepared_by"]) == (1, 1), "others may have seen it"


def test_gradients_of_a_generation_are_not_those_of_the_next(rigs):
    """It did not roll forward: the step is done again, and is prepared once it is."""
    rig, _ = rigs
    rig.step()
    rig.member.own.group = LosesVote()
    rig.session._reducer_of = (0, ())
    rig.link.commands.put(abort(1))
    rig.form(generation=2, step=1)
    assert not rig.step().committed
    assert rig.session.generation == 2
    obey(rig.member, abort(2))
    said = [(f["generation"], f["prepared_by"]) for f, _ in rig.link.of("suspended")]
    assert said == [(1, 1), (2, 0)]


def test_a_save_is_given_up_with_its_generation(rigs, tmp_path):
    rig, _ = rigs
    rig.step()
    saver, is_allowed = rig.member.saver, threading.Event()

    class Slow(Catalogue):
        def prepare(self, step):
            assert is_allowed.wait(30)
            return super().prepare(step)

    saver.catalogue = Slow(open_folder(str(tmp_path)))
    saver.begin(rig.train_state, rig.member)
    obey(rig.member, abort(1))
    rig.form(generation=2, step=1)
    rig.member.wait_for_generation()
    is_allowed.set()
    saver._wait_moving()
    assert rig.link.of("part_saved") == []


class Counts(Tiny):
    """Its forward changes a buffer that nobody has seen change before."""

    def build_model(self):
        model = super().build_model()
        model.register_buffer("calls", torch.zeros(()))
        return model

    def loss(self, model, batch):
        model.calls += 1
        return super().loss(model, batch)


def test_a_newcomer_never_copies_a_buffer_that_a_cut_off_forward_changed(monkeypatch):
    torch.set_num_threads(1)
    rig = Rig("bitwise", Counts())
    rig.form(generation=1, step=0)
    copied = []

    def send(report):
        if isinstance(report, Suspended):  # from now on newcomers are served
            copied.append(rig.train_state.header_and_tensors()[1]["model/calls"].item())
        return say(report)

    say = rig.link.send
    monkeypatch.setattr(rig.link, "send", send)
    with rig.session.next_step() as step:
        for batch in step.microbatches():
            loss = rig.workload.loss(rig.session.model, batch)
            if not copied:
                rig.member.hear(abort(1))
                rig.link.commands.put(abort(1))
                rig.form(generation=2, step=0)
            step.backward(loss)
    rig.loader.close()
    assert copied == [0.0]


def test_who_is_done_takes_no_newcomer_into_the_generation_that_ends_the_run(rigs):
    rig, _ = rigs
    rig.step()
    rig.link.commands.put(abort(1))
    rig.form(generation=2, step=1)
    rig.member.returned()
    assert rig.link.of("done")[-1][0]["step"] == 1
    assert rig.link.of("suspended")[-1][0]["is_between_steps"]


@pytest.mark.parametrize("swallows", ["loss", "commit", "everything"])
def test_code_that_swallows_the_cancellation_does_not_end_the_run(rigs, swallows):
    calm, cancelled = rigs
    for rig in rigs:
        rig.step()
    cancelled.link.commands.put(abort(1))
    cancelled.form(generation=2, step=1)
    swallowing = contextlib.suppress(BaseException)
    with (
        cancelled.session.next_step() as step,
        swallowing if swallows == "everything" else contextlib.nullcontext(),
    ):
        for batch in step.microbatches():
            loss = cancelled.workload.loss(cancelled.session.model, batch)
            if swallows != "commit":
                cancelled.member.hear(abort(1))
                # What a fallback gives: nothing to be differentiated.
                loss = torch.zeros((), device=where.HERE)
            step.backward(loss)
        if swallows == "commit":
            cancelled.member.hear(abort(1))
            with swallowing:
                step.commit()
        else:
            step.commit()
    assert not step.committed
    for rig in rigs:
        rig.step()
    assert weights_sha256(cancelled.train_state.model) == weights_sha256(calm.train_state.model)


def test_a_pause_is_taken_at_the_next_boundary_by_the_vote(rigs):
    rig, _ = rigs
    rig.step()
    rig.member.hear(Pause(1, 0, 1))
    assert rig.step().committed
    assert rig.link.of("paused") == []
    rig.form(generation=2, step=2)
    assert rig.step().committed
    assert rig.link.of("paused") == [({"generation": 1, "rank": 0, "step": 2, "origin": 1}, b"")]


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


def finish(rank: int, recorded_step: int) -> Finish:
    return Finish(1, rank, 2, "stopped", None, recorded_step)


def test_the_end_of_the_run_unwinds_the_loop(rigs):
    rig, _ = rigs
    rig.step()
    rig.member.hear(Pause(1, 0, 1))
    rig.step()
    rig.link.recorded_step = 2  # its words said so
    rig.link.commands.put(finish(0, 2))
    with pytest.raises(RunEnded):
        rig.step()
    assert rig.link.sent[-1] == (
        "ended", {"generation": 1, "rank": 0, "weights_sha256": "hash"}, b""
    )  # fmt: skip
    assert len(rig.link.of("committed")) == 2


def test_at_the_end_the_lowest_rank_says_again_what_is_not_on_record(rigs):
    """The controller that was told died with it; no later step will bring it up."""
    rig, other = rigs
    for _ in range(3):
        rig.step()
        other.step()
    for rank, each in enumerate((rig, other)):
        each.link.recorded_step = 1  # its words said so
        each.link.commands.put(finish(rank, 1))
        with pytest.raises(RunEnded):
            each.member.returned()
    *_, (fields, vote) = rig.link.of("committed")
    assert [step.step for step in fields["steps"]] == [2, 3]
    assert vote == rig.link.of("committed")[-2][1]
    assert [kind for kind, _, _ in rig.link.sent[-2:]] == ["committed", "ended"]
    assert len(other.link.of("committed")) == 3, "one says it"


def hold_initial_state(rig):
    """Where it is in parts somebody must."""
    if not rig.strategy.is_whole:
        rig.strategy.shards.holding = Ownership("initial")
    rig.member.machine = replace(rig.member.machine, holding=Holding.STATE)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_strategy_enters_every_generation_before_its_first_step(parallel):
    torch.set_num_threads(1)
    rig = Rig("bitwise", parallel=parallel)
    hold_initial_state(rig)
    enter, entered = rig.strategy.enter, []

    def enter_and_note(formed):
        entered.append((formed.generation, formed.group is rig.member.group, rig.member.step))
        return enter(formed)

    rig.strategy.enter = enter_and_note
    rig.form(generation=1, step=0)
    rig.member.wait_for_generation()
    assert entered == [(1, True, 0)]
    rig.step()
    rig.link.commands.put(abort(1))
    obey(rig.member, abort(1))
    rig.form(generation=2, step=1)
    assert rig.step().committed
    assert entered[1:] == [(2, True, 1)]
    rig.loader.close()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_a_cut_off_vote_told_is_forgotten_by_every_strategy(parallel):
    """The others may not know it: votes of two layouts would not add up."""
    torch.set_num_threads(1)
    rig = Rig("bitwise", parallel=parallel)
    hold_initial_state(rig)
    rig.form(generation=1, step=0)
    rig.step()
    assert rig.train_state.log_names == ("size",)
    rig.train_state.log_names = ("accuracy", "size")
    rig.link.commands.put(abort(1))
    obey(rig.member, abort(1))
    rig.form(generation=2, step=1)
    rig.member.wait_for_generation()
    assert rig.train_state.log_names == ("size",)
    rig.loader.close()


def test_the_lowest_rank_alone_reports_a_step():
    """The others may be the lowest one later."""
    torch.set_num_threads(1)

    def body(group):
        rig = Rig("bitwise", thread=group.rank())
        rig.form(generation=1, step=0)
        rig.join(InThread(group.rank(), group._mailboxes))
        assert rig.step().committed
        rig.loader.close()
        return len(rig.link.of("committed")), len(rig.member.records.known().steps)

    where.of_rank(1)  # the backward exchanges, in autograd's one thread for each device
    assert run_threads(2, body) == [(1, 1), (0, 1)]


@pytest.mark.parametrize("validate", [True, False])
def test_a_machine_in_a_state_that_cannot_be_is_noticed_where_it_is_asked_for(validate):
    rig = Rig("fast", validate=validate)
    rig.member.machine = replace(rig.member.machine, step=-1)
    asked = pytest.raises(BrokenInvariant, match="steps are counted from 0")
    with asked if validate else contextlib.nullcontext():
        rig.member.hear(abort(1))
    rig.loader.close()
