"""The hash of the final state may take as long as it gets further, as its save may."""

from types import SimpleNamespace

import pytest
import torch

from elastic.protocol.messages.to_worker import Finish
from tests.workers.session_rig import Rig
from workers.membership import member
from workers.membership.unwinding import RunEnded
from workers.parallel.sharded import Sharded
from workers.parallel.shards import Ownership
from workers.train_state import digest
from workers.worker import Worker

pytestmark = pytest.mark.usefixtures("place")
TENSOR_S = 20.0
LEASE_S = 30.0


@pytest.fixture(params=["ddp", "fsdp"])
def rig(request):
    torch.set_num_threads(1)
    made = Rig("bitwise", parallel=request.param, lease_s=LEASE_S)
    worker = object.__new__(Worker)  # its end alone, without the process around it
    worker._log, worker._place = SimpleNamespace(collect=lambda: None, path=None), None  # pyright: ignore
    made.member._on_finish = worker._finish
    if isinstance(made.strategy, Sharded):
        made.strategy.shards.holding = Ownership("initial")
    made.form(generation=1, step=0, holders=[])
    made.member.wait_for_generation()
    yield made
    made.loader.close()


def test_a_member_says_now_and_then_that_the_hash_of_the_final_state_gets_further(rig, monkeypatch):
    now, bytes_of = [100.0], digest.tensor_bytes

    def slowly(tensor):
        now[0] += TENSOR_S
        return bytes_of(tensor)

    monkeypatch.setattr(digest, "tensor_bytes", slowly)
    monkeypatch.setattr(member, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rig.link.sent.clear()
    rig.link.commands.put(Finish(2, 0, 1, "succeeded", None, 0))
    with pytest.raises(RunEnded):
        rig.member.returned()
    num_tensors = len(rig.workload.build_model().state_dict())
    assert now[0] == 100.0 + num_tensors * TENSOR_S
    said = [kind for kind, _, _ in rig.link.sent if kind in ("still_saving", "ended")]
    assert said == ["still_saving"] * (num_tensors // 2) + ["ended"], "after every other tensor"
    assert rig.link.of("still_saving")[0] == ({"generation": 2, "rank": 0}, b"")
