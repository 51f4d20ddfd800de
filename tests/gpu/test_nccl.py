"""What one GPU allows: the NCCL group, walking away from it, and equal bits of whole runs."""

import pytest
import torch

from tests.cluster.conftest import ray_temp, start  # noqa: F401
from workers.distributed import process_group
from workers.distributed.backends import connect_for
from workers.distributed.rendezvous import Rendezvous

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def form(rendezvous, generation):
    return process_group.form(
        store_address=rendezvous.open(generation), prefix=f"test/{generation}", rank=0,
        world_size=1, connect=connect_for(torch.device("cuda", 0), "127.0.0.1"), join_timeout_s=60,
        operation_timeout_s=60,
    ).wait(60)  # fmt: skip


def test_a_group_is_left_and_formed_again_in_one_process():
    rendezvous = Rendezvous("127.0.0.1")
    before = None
    for generation in range(1, 6):
        group = form(rendezvous, generation)
        tensor = torch.full((1 << 20,), 3.0, device="cuda")
        group.all_reduce(tensor).wait()
        received = [torch.zeros(4, device="cuda")]
        group.all_to_all(received, [torch.arange(4.0, device="cuda")]).wait()
        assert tensor.unique().tolist() == [3.0]
        assert received[0].tolist() == [0, 1, 2, 3]
        process_group.leave(group)
        used = torch.cuda.mem_get_info()[0]
        before = used if before is None else before
        assert before - used < 256 * 2**20, "leaving a group leaks device memory"


@pytest.mark.cluster
def test_two_runs_on_a_gpu_have_equal_bits(start):  # noqa: F811
    hashes = set()
    for name in ("one", "two"):
        with start("Toy", name, workers=1, device="cuda") as run:
            end = run.finish()
        assert end["status"] == 0, end["err"]
        hashes.add(end["result"]["weights_sha256"])
    assert len(hashes) == 1
