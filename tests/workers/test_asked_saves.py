"""A checkpoint that the controller asks for: by the vote, all ranks save the same step, once."""

import threading

import pytest
import torch

from elastic.protocol.messages.to_worker import Checkpoint
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from tests.workers.fake_groups import run_threads
from tests.workers.session_rig import InThread, Rig
from workers.train_state.digest import weights_sha256

pytestmark = pytest.mark.usefixtures("place")


def asked(step, generation=1):
    return Checkpoint(generation, 0, 1, step)


def saved_steps(rig):
    rig.member.saver._wait_moving()
    return [fields["step"] for fields, _ in rig.link.of("part_saved")]


@pytest.fixture
def rig(tmp_path):
    torch.set_num_threads(1)
    made = Rig("fast", has_checkpoints=True)
    made.member.saver.open(str(tmp_path))
    made.form(generation=1, step=0)
    yield made
    made.loader.close()


def test_all_ranks_save_the_same_step_whenever_they_hear_of_it(tmp_path):
    torch.set_num_threads(1)
    rigs = [Rig("bitwise", thread=rank, has_checkpoints=True) for rank in range(2)]
    for rig in rigs:
        rig.member.saver.open(str(tmp_path))
        rig.form(generation=1, step=0)

    def body(group):
        rig, is_late = rigs[group.rank()], group.rank() == 1
        rig.join(InThread(group.rank(), group._mailboxes))
        rig.step()
        if not is_late:
            rig.member.hear(asked(1))
        rig.step()
        assert saved_steps(rig) == [2]
        if is_late:
            rig.member.hear(asked(1))
        rig.step()
        return saved_steps(rig), weights_sha256(rig.train_state.model)

    found = run_threads(2, body)
    for rig in rigs:
        rig.loader.close()
    calm = Rig("bitwise")
    calm.form(generation=1, step=0)
    for _ in range(3):
        calm.step()
    calm.loader.close()
    assert found == [([2], weights_sha256(calm.train_state.model))] * 2


def test_an_asked_save_waits_for_the_one_before(rig, tmp_path):
    is_allowed = threading.Event()

    class Slow(Catalogue):
        def prepare(self, step):
            assert is_allowed.wait(30)
            return super().prepare(step)

    saver = rig.member.saver
    rig.step()
    saver.catalogue = Slow(open_folder(str(tmp_path)))
    saver.begin(rig.train_state, rig.member)
    rig.step()
    rig.member.hear(asked(2))
    rig.step()
    is_allowed.set()
    assert saved_steps(rig) == [1]
    rig.step()
    rig.step()
    assert saved_steps(rig) == [1, 4]


def test_nothing_is_saved_for_another_generation_or_twice_at_the_end(rig):
    rig.member.hear(asked(1, generation=2))
    for _ in range(rig.spec.steps - 1):
        rig.step()
    rig.member.hear(asked(8))
    rig.step()
    assert saved_steps(rig) == []
