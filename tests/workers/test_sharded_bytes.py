"""What a sharded rank holds and sends, counted: shares of the whole, nothing twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.workers.counting import CountingGroup
from tests.workers.places import Place
from tests.workers.ranks import run_ranks
from tests.workers.sharded_rig import (
    NUM_MICROBATCHES,
    Microbatched,
    Work,
    build,
    catalogue_in,
    enter,
    load,
    save_part,
    spec,
    train,
)
from workers.backup.client import BackupClient
from workers.backup.server import BackupServer
from workers.distributed.process_group import Alone, AnyGroup
from workers.parallel.strategy import Strategy
from workers.resharding.host_memory import give_back
from workers.tensors.local import local

WIDTH, BLOCKS = 254, 2
PARAMETERS = 4.0 * BLOCKS * WIDTH * WIDTH
SETTINGS = [
    (parallel, reduction, world_size)
    for parallel in ("ddp", "fsdp", "fsdp-grad-op")
    for reduction in ("bitwise", "fast")
    for world_size in (2, 4)
] + [("hsdp:2", "bitwise", 4), ("hsdp:2", "fast", 4)]


class Wide(Work):
    """Blocks only, whose rows do not divide by four."""

    def build_model(self):
        return Microbatched(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))

    def batch(self, step, microbatch_id):
        return torch.ones(2, WIDTH)


def held_bytes(strategy: Strategy) -> int:
    """Parameters, gradients as big as they are, optimizer state: the memory behind them."""
    model = [t for n, t in strategy.train_state.tensors().items() if n.startswith("model/")]
    state = [t for n, t in strategy.train_state.tensors().items() if not n.startswith("model/")]
    return sum(local(t).untyped_storage().nbytes() for t in (*model, *model, *state))


@pytest.fixture(scope="module")
def measured(place_slowly):
    """Setting -> (bytes sent by part, bytes held), by rank; for one step."""

    def body(ranks):
        found = {}
        for generation, setting in enumerate(SETTINGS):
            parallel, reduction, world_size = setting
            if ranks.index < world_size:
                group = CountingGroup(ranks.form(generation, list(range(world_size))))
                strategy = build(parallel, reduction, Wide())
                enter(strategy, cast(AnyGroup, group), 0)
                group.sent.clear()
                train(strategy, cast(Any, group), parallel, 1, reduction, Wide())
                found[setting] = (dict(group.sent), held_bytes(strategy))
        return found

    by_rank = run_ranks(4, body)
    return {s: [found[s] for found in by_rank[: s[2]]] for s in SETTINGS}


def test_a_sharded_pass_sends_three_shares_and_the_others_two_per_step(measured):
    for (parallel, reduction, world_size), found in measured.items():
        if parallel == "hsdp:2":
            continue
        rounds = NUM_MICROBATCHES // world_size
        times = 3 * rounds if parallel == "fsdp" else 2
        wanted = times * PARAMETERS * (world_size - 1) / world_size
        for sent, _ in found:
            assert sum(sent.values()) == pytest.approx(wanted, rel=0.05), (parallel, reduction)


def test_replicas_exchange_each_row_of_the_gradient_twice_per_step_and_no_parameters(measured):
    for reduction in ("bitwise", "fast"):
        for rank, (sent, _) in enumerate(measured["hsdp:2", reduction, 4]):
            order = 8  # the checksum of what was sent, once per step
            assert sent[f"replica{rank // 2}"] == pytest.approx(2 * 3 * PARAMETERS / 2 + order)
            assert sent[f"shard{rank % 2}"] == pytest.approx(2 * PARAMETERS / 2 / 2, rel=0.05)
            assert sent[""] < 0.05 * PARAMETERS


def test_a_rank_holds_its_share_of_parameters_gradients_and_optimizer_state(measured):
    whole = 4 * PARAMETERS  # AdamW
    for (parallel, _, world_size), found in measured.items():
        shards = {"ddp": 1, "hsdp:2": 2}.get(parallel, world_size)
        held = [size for _, size in found]
        assert sum(held) / len(held) == pytest.approx(whole / shards, rel=0.03)
        row = 4 * 4 * BLOCKS * WIDTH
        assert max(held) <= whole / shards + row


class Large(Wide):
    """32 MiB of parameters, made a module at a time."""

    def build_model(self):
        return Microbatched(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))

    def init_weights(self, module, name):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-6)

    def batch(self, step, microbatch_id):
        return torch.full((2, 1024), 0.01)


def resident_bytes(kind: str) -> int:
    """kind: VmRSS now, VmHWM the most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(kind)


def peak_of(what: Callable[[], None]) -> tuple[int, int]:
    """(the most memory of this process meanwhile, what it has afterwards)"""
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    what()
    peak = resident_bytes("VmHWM")
    give_back()
    return peak, resident_bytes("VmRSS")


@pytest.mark.slow  # resident bytes are what they are only on a quiet machine
def test_the_new_rows_take_the_place_of_the_old_ones_when_some_come_from_a_holder():
    """One of three ranks is lost. Copies and shadows count apart."""
    holder = BackupServer("127.0.0.1", "t")
    at = [["elsewhere", *holder.address]]

    def body(ranks):
        backup_client = BackupClient(spec("fsdp"), lambda kind, **fields: None)
        strategy = build("fsdp", workload=Large(), open_backup=lambda: backup_client)
        if ranks.index:
            strategy.forget()
        backup_client.hear(at)
        group = ranks.form(1, [0, 1, 2])
        enter(strategy, group, 0)
        backup_client.begin(strategy.train_state, 1, Place(1, ranks.index, 3))
        backup_client.wait(lambda: False)
        after_step = lambda r: backup_client.after_step(r, Place(1, ranks.index, 3))  # noqa: E731
        train(strategy, group, "fsdp", 1, work=Large(), after_step=after_step)
        backup_client.wait(lambda: False)
        group.all_reduce(torch.zeros(1)).wait()
        if ranks.index == 2:
            return None
        group = ranks.form(2, [0, 1])
        shadows = resident_bytes("RssShmem")
        peak, after = peak_of(lambda: enter(strategy, group, 1, generation=2))
        assert strategy.shards.holding.step == 1
        base = after - held_bytes(strategy) * 3 // 4  # no gradients now
        return peak - base, after - base, shadows

    for found in run_ranks(3, body)[:2]:
        assert found is not None
        peak, steady, shadows = found
        assert peak <= 1.2 * steady + 8 * 2**20, (peak >> 20, steady >> 20, shadows >> 20)
    holder.close()


@pytest.mark.slow  # resident bytes are what they are only on a quiet machine
def test_a_rank_that_loads_a_checkpoint_holds_its_rows_and_little_more(tmp_path):
    place = str(tmp_path)

    def save(ranks):
        group, strategy = ranks.form(1, [0, 1]), build("fsdp", workload=Large())
        enter(strategy, group, 0)
        train(strategy, group, "fsdp", 1, work=Large())
        return save_part(strategy, group, place, 1)

    saved = run_ranks(2, save)
    catalogue_in(place).publish(1, 1, [part for part, _ in saved], saved[0][1], {})

    def body(ranks):
        group = ranks.form(1, [0, 1, 2])
        give_back()
        base, loaded = resident_bytes("VmRSS"), []
        what = lambda: loaded.append(load("fsdp", group, place, 1, Large()))  # noqa: E731
        peak, after = peak_of(what)
        return peak - base, after - base

    for peak, steady in run_ranks(3, body):
        assert peak <= 1.2 * steady + 8 * 2**20, (peak >> 20, steady >> 20)


@pytest.mark.slow  # resident bytes are what they are only on a quiet machine
def test_nobody_holds_much_more_than_the_old_or_the_new_rows_while_they_move():
    """Nor, at the start, more than its rows and one module."""

    def body(ranks):
        strategy = build("fsdp", workload=Large())
        give_back()
        base, found = resident_bytes("VmRSS"), []
        if ranks.index == 0:
            peak, after = peak_of(lambda: enter(strategy, Alone(), 0))
            found.append((peak - base, after - base))
            train(strategy, Alone(), "fsdp", 1, work=Large())
        else:
            strategy.forget()
        group = ranks.form(0, [0, 1])
        before = resident_bytes("VmRSS")
        peak, after = peak_of(lambda: enter(strategy, group, 1))
        return [*found, (peak - base, max(before, after) - base)]

    for of_rank in run_ranks(2, body):
        for peak, steady in of_rank:
            assert peak <= 1.2 * steady + 8 * 2**20, (peak >> 20, steady >> 20)
