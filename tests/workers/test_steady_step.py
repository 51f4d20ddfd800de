"""What a steady step of a session waits for of its device, and what it copies to the host."""

import pytest
import torch

from tests.device import device
from tests.workers.session_rig import Rig
from tests.workers.threads_of_sessions import run_sessions

pytestmark = pytest.mark.usefixtures("on_device")
STEPS_BEFORE = 3
MOST_SYNCS = 2


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "fsdp-grad-op"])
def test_a_steady_step_hardly_waits_and_copies_nothing_by_pageable_memory(parallel: str):
    """Losses, logged tensors and the norm are read, buffers are averaged."""

    def body(rig: Rig) -> tuple[bool, int, dict[str, int]]:
        for _ in range(STEPS_BEFORE):
            take_step(rig)
        torch.sim.synchronize()
        device.reset_counters(rig.device.index)
        take_step(rig)
        found = device.counters(rig.device.index)
        few = found.host_syncs <= MOST_SYNCS
        return few, found.pageable_d2h_bytes, {} if few else found.syncs_by_reason

    found = run_sessions(2, body, reduction="fast", parallel=parallel)
    assert found == [(True, 0, {})] * 2


def take_step(rig: Rig) -> None:
    with rig.session.next_step() as step:
        for batch in step.microbatches():
            total, weight = rig.workload.loss(rig.session.model, batch)
            rig.session.log(total=total)
            step.backward((total, weight))
        step.commit()
    assert step.committed
