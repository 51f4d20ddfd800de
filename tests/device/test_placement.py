"""Batches come to a device as what they are."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import torch

from tests.device import device
from workers.data.placement import to_device

HERE = torch.device("sim", 0)
Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    name: str


class Encoding(UserDict):
    """As a tokenizer's: attributes are items, and it moves itself."""

    def __getattr__(self, name):
        return self.data[name]

    def to(self, where):
        return Encoding({name: tensor.to(where) for name, tensor in self.data.items()})


def test_a_batch_keeps_its_type_and_what_else_is_in_it():
    one = torch.ones(2)
    batch = {
        "ordered": OrderedDict(a=one),
        "default": defaultdict(list, a=one),
        "pair": Pair(one, 3),
        "list": [one, (one, "text")],
        "sample": Sample(one, "x"),
        "encoding": Encoding(ids=one),
    }
    moved = to_device(batch, HERE)
    assert [type(v) for v in moved.values()] == [type(v) for v in batch.values()]
    assert moved["default"]["b"] == []
    assert (moved["pair"].second, moved["sample"].name, moved["list"][1][1]) == (3, "x", "text")
    tensors = [
        moved["ordered"]["a"],
        moved["default"]["a"],
        moved["pair"].first,
        moved["list"][0],
        moved["list"][1][0],
        moved["sample"].tokens,
        moved["encoding"].ids,
    ]
    assert {t.device for t in tensors} == {HERE}
    assert batch["ordered"]["a"].device.type == "cpu", "the batch itself stays where it is"


def test_a_tensor_on_its_way_blocks_no_host():
    device.reset_counters()
    to_device({"x": torch.ones(4)}, HERE)
    assert device.counters().host_syncs == 0
