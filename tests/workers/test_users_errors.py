"""What user code raises in a step or an evaluation whose generation is over is no failure of it."""

import weakref
from unittest.mock import MagicMock

import pytest
import torch

from elastic.protocol.errors import CollectiveRefused, NoAnswer, OutOfDeviceMemory, PeerLost
from tests.workers.session_rig import Rig, Tiny, abort
from workers.health import gpu
from workers.parallel import over_shards
from workers.train_state.digest import weights_sha256

pytestmark = pytest.mark.usefixtures("place")


class Cautious(Tiny):
    """`trouble` strikes in the loss, once."""

    trouble = staticmethod(lambda: None)
    scale = 1.0

    def loss(self, model, batch):
        trouble, self.trouble = self.trouble, lambda: None
        trouble()
        total, weight = super().loss(model, batch)
        return total * self.scale, weight


@pytest.fixture
def rig():
    torch.set_num_threads(1)
    made = Rig("bitwise", Cautious())
    made.form(generation=1, step=0)
    made.step()
    yield made
    made.loader.close()


def give_up(rig):
    """The generation; the next one is of the same member."""
    rig.member.hear(abort(1))
    go_on(rig)


def go_on(rig):
    rig.link.commands.put(abort(1))
    rig.form(generation=2, step=rig.session.step)


def raise_(error, cause=None):
    raise error from cause


def calm_hash(steps):
    calm = Rig("bitwise", Cautious())
    calm.form(generation=1, step=0)
    for _ in range(steps):
        calm.step()
    calm.loader.close()
    return weights_sha256(calm.train_state.model)


def test_what_it_makes_of_an_abandoned_collective_s_garbage_cancels_the_step(rig, caplog):
    def trouble():
        give_up(rig)
        raise ValueError("the loss is 1e12")

    rig.workload.trouble = trouble
    assert not rig.step().committed
    assert "given up before user code raised ValueError: the loss is 1e12" in caplog.text
    assert rig.step().committed
    assert weights_sha256(rig.train_state.model) == calm_hash(2)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("kind", [PeerLost, CollectiveRefused])
def test_a_lost_peer_in_its_own_collective_is_told_and_cancels_the_step(rig, kind, is_wrapped):
    def trouble():
        go_on(rig)
        lost = kind("connection closed by peer")
        raise_(RuntimeError("redistribute failed"), lost) if is_wrapped else raise_(lost)

    rig.workload.trouble = trouble
    assert not rig.step().committed
    ((said, _),) = rig.link.of("collective_failed")
    assert (said["generation"], said["message"]) == (1, "connection closed by peer")
    assert said["is_refused"] == (kind is CollectiveRefused)
    assert rig.step().committed
    assert weights_sha256(rig.train_state.model) == calm_hash(2)


def test_the_host_that_a_backend_got_no_answer_from_is_told(rig):
    def trouble():
        go_on(rig)
        raise NoAnswer("NET/IB: Got completion from peer 10.2.0.5<33092>", "10.2.0.5")

    rig.workload.trouble = trouble
    assert not rig.step().committed
    ((said, _),) = rig.link.of("collective_failed")
    assert (said["generation"], said["unanswered"]) == (1, "10.2.0.5")


def test_a_step_without_memory_among_fewer_members_waits_for_more_of_them(rig):
    def trouble():
        go_on(rig)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nhint")

    rig.workload.trouble, rig.strategy.fitted_over = trouble, 2
    assert not rig.step().committed
    ((said, _),) = rig.link.of("collective_failed")
    assert (said["too_few"], said["is_explained"], said["is_refused"]) == (1, True, False)
    assert said["message"] == (
        "step and state fit over 2 workers, and not over 1: CUDA out of memory. Tried to allocate "
        "2 GiB"
    )
    assert rig.step().committed
    assert weights_sha256(rig.train_state.model) == calm_hash(2)


@pytest.mark.parametrize(("fitted_over", "too_few"), [(0, 0), (2, 1)])
def test_a_backend_without_memory_tries_again_or_waits_for_more_members(rig, fitted_over, too_few):
    def trouble():
        go_on(rig)
        raise OutOfDeviceMemory("NCCL got no memory of the GPU: Cuda failure 2 'out of memory'")

    rig.workload.trouble, rig.strategy.fitted_over = trouble, fitted_over
    assert not rig.step().committed
    ((said, _),) = rig.link.of("collective_failed")
    assert (said["too_few"], said["is_explained"]) == (too_few, too_few > 0)
    assert not said["is_refused"]
    assert said["message"].endswith("NCCL got no memory of the GPU: Cuda failure 2 'out of memory'")
    assert rig.step().committed


def test_behind_the_vote_the_error_says_what_did_fit(rig):
    error = torch.OutOfMemoryError("CUDA out of memory")
    rig.strategy.fitted_over, rig.strategy.apply = 2, lambda update: raise_(error)
    with pytest.raises(torch.OutOfMemoryError):
        rig.step()
    (note,) = error.__notes__
    assert note == "step and state fit over 2 workers, and not over 1: CUDA out of memory"


def test_a_cancelled_step_holds_nothing_of_its_forward_when_the_next_state_comes(rig, monkeypatch):
    held = []

    def trouble():
        activations = torch.ones(3)
        held.append(weakref.ref(activations))
        give_up(rig)
        raise ValueError("no")

    reset = rig.strategy.reset
    monkeypatch.setattr(rig.strategy, "reset", lambda: held.append(held[0]()) or reset())
    rig.workload.trouble = trouble
    assert not rig.step().committed
    assert held[1] is None


def test_a_device_that_failed_with_a_peers_is_told_before_the_next_generation(rig, monkeypatch):
    def touch(device):
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    def trouble():
        give_up(rig)
        raise_(PeerLost("connection closed by peer"))

    monkeypatch.setattr(gpu, "touch", touch)
    rig.workload.trouble = trouble
    with pytest.raises(torch.AcceleratorError):
        rig.step()
    assert rig.session.generation == 1


def test_more_members_are_waited_for_only_where_they_share_the_state(rig, monkeypatch):
    """A newcomer learns from the others over how many the last step did fit."""
    made = Rig("bitwise", parallel="fsdp")
    made.loader.close()
    sharded = made.strategy
    assert (rig.strategy.fitted_over, sharded.fitted_over) == (0, 0)
    monkeypatch.setattr(over_shards, "gather_json", lambda group, mine: [[mine[0], 3], mine])
    sharded.claims(MagicMock())
    assert sharded.fitted_over == 3
    monkeypatch.setattr(sharded.train_state, "apply", lambda *arguments: None)
    sharded.apply(MagicMock())
    assert sharded.fitted_over == 1


def test_a_step_that_never_fitted_is_the_users(rig):
    rig.workload.trouble = lambda: raise_(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        rig.step()


def test_a_lost_peer_behind_the_commit_leaves_the_step_committed(rig):
    with rig.session.next_step() as step:
        for batch in step.microbatches():
            step.backward(rig.workload.loss(rig.session.model, batch))
        step.commit()
        go_on(rig)
        raise PeerLost("connection closed by peer")
    assert step.committed
    assert (rig.session.step, rig.session.generation) == (2, 2)


def test_an_error_in_a_generation_at_work_is_the_users(rig):
    rig.workload.trouble = lambda: raise_(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        rig.step()


def test_what_all_ranks_raise_once_they_have_agreed_ends_the_run_whoever_is_lost_then(rig):
    """The step counts everywhere, so nobody would raise it again."""
    rig.train_state.max_nonfinite = 0
    apply = rig.strategy.apply

    def apply_as_it_is_given_up(update):
        rig.member.hear(abort(1))
        apply(update)

    rig.strategy.apply = apply_as_it_is_given_up
    rig.session._inspection.ask(1, 1)
    rig.workload.scale = float("inf")
    with pytest.raises(FloatingPointError):
        rig.step()


@pytest.mark.parametrize("is_known", [False, True])
def test_an_evaluation_is_done_again(rig, is_known):
    troubles = [lambda: give_up(rig) or raise_(ValueError("no"))]
    if not is_known:
        troubles = [lambda: go_on(rig) or raise_(PeerLost("connection closed by peer"))]

    def evaluate(model, batch):
        if troubles:
            troubles.pop()()
        return float(model(batch[0]).mean())

    found = rig.session.evaluate(rig.workload.dataset(), evaluate)
    assert found == rig.session.evaluate(rig.workload.dataset(), evaluate)
    assert rig.session.generation == 2
    assert len(rig.link.of("collective_failed")) == int(not is_known)


def test_an_evaluation_s_error_in_a_generation_at_work_is_the_users(rig):
    with pytest.raises(ValueError, match="no"):
        rig.session.evaluate(rig.workload.dataset(), lambda *_: raise_(ValueError("no")))
