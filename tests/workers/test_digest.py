"""`weights_sha256` as docs/running.md defines it."""

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.workers import where
from workers.train_state.digest import full_state, weights_sha256


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(2, 1, bias=False)
        self.a = nn.Linear(2, 1, bias=False)
        self.a.weight = self.b.weight
        with torch.no_grad():
            self.b.weight.copy_(torch.tensor([[1.0, -2.5]]))
        self.register_buffer("A", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("é", torch.tensor([1.5], dtype=torch.bfloat16))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> str:
        return "does not count"

    def set_extra_state(self, state: str) -> None:
        pass


def _expected() -> str:
    digest = hashlib.sha256()
    digest.update(b"A\0int64\0\0" + struct.pack("<q", 3))
    digest.update(b"a.weight\0float32\x001,2\0" + struct.pack("<2f", 1.0, -2.5))
    digest.update(b"b.weight\0float32\x001,2\0" + struct.pack("<2f", 1.0, -2.5))
    digest.update("é".encode() + b"\0bfloat16\x001\0" + b"\xc0\x3f")
    return digest.hexdigest()


@pytest.mark.usefixtures("place")
def test_the_hash_is_the_contracts_byte_for_byte() -> None:
    model = Model().to(where.HERE)
    assert weights_sha256(model) == _expected()
    assert weights_sha256(model.state_dict()) == _expected()


@pytest.mark.usefixtures("place")
def test_strides_do_not_count_and_one_bit_does() -> None:
    matrix = torch.randn(3, 4).to(where.HERE)
    assert weights_sha256({"w": matrix}) == weights_sha256({"w": matrix.t().contiguous().t()})
    changed = matrix.clone()
    changed.view(torch.int32)[1, 1] ^= 1
    assert weights_sha256({"w": matrix}) != weights_sha256({"w": changed})
    assert weights_sha256({"w": torch.zeros(2)}) != weights_sha256({"w": torch.tensor([-0.0, 0])})
    assert weights_sha256({"w": torch.zeros(0, 3)}) != weights_sha256({"w": torch.zeros(3, 0)})


def test_wrappers_leave_no_trace_in_the_names() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

    plain, wrapped = Outer(Model()), Outer(checkpoint_wrapper(Model()))
    assert weights_sha256(plain) == weights_sha256(wrapped)
    assert weights_sha256(torch.compile(plain)) == weights_sha256(plain)  # type: ignore[arg-type]
    assert "module.b.weight" in full_state(plain)


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
def test_ddp_is_a_wrapper_too() -> None:
    class Plain(Model):
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

    model = Plain()
    assert weights_sha256(nn.parallel.DistributedDataParallel(model)) == _expected()
