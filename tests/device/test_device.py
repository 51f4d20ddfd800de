"""What the simulated device does as a GPU does it, apart from collectives (test_nccl_group.py)."""

import ctypes
import threading
import time

import pytest
import torch
from torch import nn

from tests.device import device
from tests.device.device import HostTouched, counters, reset_counters

SIM = torch.device("sim", 0)


class Small(nn.Module):
    """The operations that models of the tests have."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.linear(self.embedding(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.dropout(self.norm(x), 0.2, self.training)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.nn.functional.gelu(x))


def trained(where):
    torch.manual_seed(3)
    model = Small()
    model.to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        torch.manual_seed(step)
        tokens = torch.randint(0, 11, (4, 6)).to(where)
        torch.manual_seed(step)  # of the device, too: dropout begins at the same number
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: t.cpu() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("is_far_ahead", [False, True])
def test_a_model_trains_to_the_bits_of_the_cpu(is_far_ahead):
    expected = trained(torch.device("cpu"))
    if is_far_ahead:
        with device.far_ahead():
            found = trained(SIM)
    else:
        found = trained(SIM)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_host_runs_ahead_of_a_slow_kernel_until_it_reads():
    x = torch.ones(4, device=SIM)
    device.slow("mul", 0.2)
    began = time.monotonic()
    assert (x * 3).sum().item() == 12
    assert time.monotonic() - began >= 0.2
    device.stick("mul")
    y = (x * 3).sum() + 1  # else it would never come back
    threading.Timer(0.1, device.release).start()
    assert y.item() == 13


def test_a_stuck_kernel_holds_its_stream_and_no_other_one():
    device.stick("mul")
    x = torch.ones(4, device=SIM)
    stuck = x * 3
    side = torch.Stream(SIM)
    with side:
        y = torch.ones(2, device=SIM) + 1
        there = side.record_event()
    there.synchronize()
    assert not torch.accelerator.current_stream(SIM).query()
    with side:
        assert y.tolist() == [2.0, 2.0]
    device.release()
    assert stuck.sum().item() == 12


def test_a_wait_that_does_not_end_says_for_what():
    device.SIM.set_wait_limit(0.2)
    device.stick("mul")
    x = torch.ones(4, device=SIM) * 3
    with pytest.raises(RuntimeError, match=r"waited 0.2 s for device 0 .*aten::mul"):
        x.sum().item()
    device.release()


def test_an_access_that_no_event_orders_is_reported():
    x = torch.ones(4, device=SIM)
    side = torch.Stream(SIM)
    with side:
        y = x + 1
    (race,) = device.races()
    assert "aten::add.out" in race or "aten::add" in race
    assert "reads on stream" in race
    assert "aten::fill_ wrote on stream 0, and no event orders them" in race
    side.wait_stream(torch.accelerator.current_stream(SIM))
    with side:
        y.add_(x)
    assert device.races() == []


def test_what_the_host_has_waited_for_is_in_order():
    x = torch.ones(4, device=SIM)
    torch.sim.synchronize()
    with torch.Stream(SIM):
        x.add_(1)
    assert device.races() == []


def test_memory_that_is_freed_and_used_again_while_another_stream_reads_it_is_reported():
    x = torch.ones(1000, device=SIM)
    side = torch.Stream(SIM)
    side.wait_stream(torch.accelerator.current_stream(SIM))
    with side:
        y = x + 1
    address = x.data_ptr()
    del x
    z = torch.ones(1000, device=SIM)
    assert z.data_ptr() == address
    (race,) = device.races()
    assert "(memory freed since)" in race
    del y


def test_record_stream_makes_reuse_safe():
    x = torch.ones(1000, device=SIM)
    side = torch.Stream(SIM)
    side.wait_stream(torch.accelerator.current_stream(SIM))
    with side:
        y = x + 1
    x.record_stream(side)
    del x
    z = torch.zeros(1000, device=SIM)
    torch.sim.synchronize()
    assert device.races() == []
    assert y.sum().item() == 2000
    del z


def peek(tensor):
    return bytes((ctypes.c_char * 4).from_address(tensor.data_ptr()))


def test_host_code_that_touches_device_memory_gets_an_error_that_names_it():
    x = torch.ones(4, device=SIM)
    with pytest.raises(HostTouched):
        assert peek(x) != bytes(ctypes.c_float(1.0))
    (touch,) = device.host_touches()
    assert "host code has touched device memory" in touch
    assert "in peek" in touch
    assert x.sum().item() == 4  # kernels see what they saw before
    with pytest.raises(HostTouched):
        peek(x)
    assert len(device.host_touches()) == 1


def test_pinned_memory_may_be_read_once_the_host_has_waited_for_its_copy():
    x = torch.arange(4.0, device=SIM)
    landed = torch.empty(4, pin_memory=True)
    assert landed.is_pinned()
    landed.copy_(x, non_blocking=True)
    there = torch.accelerator.current_stream(SIM).record_event()
    with pytest.raises(HostTouched):
        peek(landed)
    (touch,) = device.host_touches()
    assert "pinned memory before its copy was waited for" in touch
    there.synchronize()
    assert landed.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_pinned_memory_may_not_be_written_while_it_is_sent():
    given = torch.ones(4).pin_memory()
    device.stick("to the device")
    x = given.to(SIM, non_blocking=True)
    assert peek(given) == bytes(ctypes.c_float(1.0))
    ctypes.memset(given.data_ptr(), 0, 4)  # without the GIL: said at the next launch
    with pytest.raises(RuntimeError, match="has touched memory of the simulated device"):
        x.add_(1)
    device.host_touches()
    device.release()
    torch.sim.synchronize()


def test_counters_are_exact():
    x = torch.ones(1000, device=SIM)
    pinned = torch.empty(1000, pin_memory=True)
    torch.sim.synchronize()
    reset_counters()
    before = counters().live_bytes
    x.cpu()
    pinned.copy_(x, non_blocking=True)
    torch.sim.synchronize()
    y = torch.empty(500, device=SIM)
    y.fill_(1)
    del y
    (x.sum() > 3).item()
    found = counters()
    assert found.syncs_by_reason == {"copy to the host": 2, "synchronize": 1}
    assert found.host_syncs == 3
    assert found.pageable_d2h_bytes == 4000 + 1
    assert found.pinned_d2h_bytes == 4000
    assert found.kernels == 3 + 1 + 2  # copies, fill, sum and comparison
    assert found.peak_bytes == before + 2000
    assert found.unqueued == {}


def test_an_operation_whose_size_depends_on_the_data_makes_the_host_wait():
    x = torch.tensor([1.0, 0.0, 2.0]).to(SIM)
    reset_counters()
    assert x[x > 0].cpu().tolist() == [1.0, 2.0]
    assert counters().syncs_by_reason["aten::nonzero"] == 1


def test_more_than_the_memory_that_is_there_is_out_of_memory():
    x = torch.empty(1000, device=SIM)
    device.limit_memory(counters().live_bytes + 4000)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 8000 bytes"):
        torch.empty(2000, device=SIM)
    assert torch.empty(1000, device=SIM).numel() == x.numel()


def test_a_device_that_is_gone_says_so_to_whatever_asks_it():
    x = torch.ones(4, device=SIM)
    device.fail("uncorrectable ECC error encountered", code=214)
    with pytest.raises(torch.AcceleratorError, match="uncorrectable ECC error"):
        x.add_(1)
    with pytest.raises(torch.AcceleratorError, match="uncorrectable ECC error"):
        x.tolist()
    other = torch.ones(4, device=torch.device("sim", 1))
    assert other.sum().item() == 4


def test_an_index_out_of_range_is_an_assert_of_the_device_at_the_next_read():
    table, index = torch.ones(3, 2, device=SIM), torch.tensor([5]).to(SIM)
    found = table.index_select(0, index)
    with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
        found.cpu()


def test_tensors_of_two_devices_do_not_mix():
    x, y = torch.ones(2, device=SIM), torch.ones(2, device=torch.device("sim", 1))
    with pytest.raises(RuntimeError, match="same device"):
        x + y
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2)
    assert (x + y.to(SIM)).tolist() == [2.0, 2.0]


def test_events_tell_the_time_of_the_device():
    first, second = (torch.Event("sim", enable_timing=True) for _ in range(2))
    x = torch.ones(4, device=SIM)
    first.record()
    device.slow("mul", 0.2)
    y = x * 2
    second.record()
    second.synchronize()
    assert 200 <= first.elapsed_time(second) < 2000
    del y
