"""What one GPU allows: the NCCL group, walking away from it, and equal bits of whole runs."""

import tempfile
from pathlib import Path

import pytest
import torch

from workers.distributed import process_group
from workers.distributed.backends import connect_for
from workers.distributed.process_group import leave
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
    first_free = None
    for generation in range(1, 6):
        group = form(rendezvous, generation)
        tensor = torch.full((1 << 20,), 3.0, device="cuda")
        group.all_reduce(tensor).wait()
        received = [torch.zeros(4, device="cuda")]
        group.all_to_all(received, [torch.arange(4.0, device="cuda")]).wait()
        assert tensor.unique().tolist() == [3.0]
        assert received[0].tolist() == [0, 1, 2, 3]
        leave(group)
        free = torch.cuda.mem_get_info()[0]
        first_free = free if first_free is None else first_free
        assert first_free - free < 256 * 2**20, "leaving a group leaks device memory"


def test_two_runs_on_a_gpu_have_equal_bits(tmp_path):
    pytest.importorskip("ray", reason="whole runs need Ray")
    from tests.cluster.live import JOBS, LiveRun

    hashes = set()
    with tempfile.TemporaryDirectory(prefix="er-", dir="/tmp") as ray_temp:  # short, for sockets
        for name in ("one", "two"):
            options = {"workers": 1, "device": "cuda", "address": "local"}
            with LiveRun(f"{JOBS}/toy.py:Toy", tmp_path, name, Path(ray_temp), **options) as run:
                end = run.finish()
            assert end["status"] == 0, end["err"]
            hashes.add(end["result"]["weights_sha256"])
    assert len(hashes) == 1
