"""The shares of a replicated state, and a state that goes through files and comes back."""

import os
import threading

import pytest
import torch
from torch import nn

from elastic.protocol.layout import Position
from elastic.protocol.manifest import SavedPart, check_cover, merge
from elastic.protocol.mesh import Mesh, Parallel
from elastic.protocol.messages.to_controller import PartFailed, PartSaved
from elastic.store.catalogue import Catalogue, file_name
from elastic.store.files import open_folder
from elastic.store.remote import patiently
from tests.workers import where
from tests.workers.session_rig import spec
from workers.checkpoint import saver as saver_module
from workers.checkpoint.load import load_newest
from workers.checkpoint.saver import Saver, share
from workers.tensors.local import layout_of
from workers.train_state.digest import weights_sha256
from workers.train_state.serialization import capture
from workers.train_state.train_state import TrainState

on_both = pytest.mark.usefixtures("place")
TENSORS = {
    "a": torch.arange(24.0).reshape(6, 4),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 5),
    "b": torch.arange(1000.0).reshape(1, 1000),
    "c": torch.arange(90).reshape(30, 3).t(),
    "last": torch.zeros(0),
}


def at(rank: int, world_size: int) -> Position:
    return Position(Mesh(Parallel("ddp"), world_size), rank)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 50])
def test_shares_cover_everything_once_and_are_about_equal(world_size: int) -> None:
    found: dict[str, list[torch.Tensor]] = {name: [] for name in TENSORS}
    for rank in range(world_size):
        for box, piece in share(TENSORS, at(rank, world_size)):
            assert box.box.shape == tuple(piece.shape)
            assert box.size_bytes == piece.nbytes
            found[box.name].append(piece)
    for name, tensor in TENSORS.items():
        whole = torch.cat(found[name]) if tensor.ndim else found[name][0]
        assert torch.equal(whole, tensor), name
    rows = {f"r{i}": torch.zeros(100, 10) for i in range(7)}
    sizes = [sum(t.nbytes for _, t in share(rows, at(r, world_size))) for r in range(world_size)]
    assert max(sizes) - min(sizes) <= 40


class Link:
    def __init__(self) -> None:
        self.said: list[PartSaved | PartFailed] = []
        self.concluded_saves: dict[int, bool] = {}
        self.has_news = threading.Event()

    def send(self, report: PartSaved | PartFailed) -> None:
        self.said.append(report)
        self.has_news.set()


class By:
    generation, step = 4, 9

    def __init__(self, rank: int, world_size: int = 3) -> None:
        self.rank, self.world_size = rank, world_size
        self.position = at(rank, world_size)
        self.layout = layout_of


def make(seed: int, steps: int = 3) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1, bias=False))
    model[2].weight = nn.Parameter(torch.randn(5, 1).t())  # not contiguous
    model.to(where.HERE)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1))
    train_state = TrainState(
        model, dict(model.named_parameters()), optimizer, scheduler, clip_norm=None, max_nonfinite=1
    )
    for _ in range(steps):
        model(torch.randn(4, 7).to(where.HERE)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    train_state.step = 9
    train_state.buffers.refresh()
    return train_state


@on_both
@pytest.mark.parametrize("saved_at", [1, 2, 3, 4])
def test_a_state_saved_at_any_world_size_is_loaded_at_any_other(tmp_path, saved_at) -> None:
    train_state, link = make(0), Link()
    expected = weights_sha256(train_state.model)
    savers = [Saver(link, spec()) for _ in range(saved_at)]  # type: ignore[arg-type]
    for rank, saver in enumerate(savers):
        saver.open(str(tmp_path))
        saver.begin(train_state, By(rank, saved_at))
    train_state.settle()
    with torch.no_grad():
        for parameter in train_state.parameters.values():
            parameter.zero_()  # the next step must not show in the checkpoint
    for saver in savers:
        saver._wait_moving()
    assert [type(said) for said in link.said] == [PartSaved] * saved_at
    saved = [SavedPart.unpack(said.payload) for said in link.said]
    parts = [each.part for each in saved]
    states = [each.state for each in saved if each.state is not None]
    assert len(states) == 1
    for tensor in merge(parts)[1]:
        check_cover(tensor)
    catalogue = Catalogue(open_folder(str(tmp_path)).at("checkpoints"))
    catalogue.publish(9, 4, parts, states[0], {})
    for loaded_at in (1, 2, 3, 4):
        for rank in range(loaded_at):  # replicas: each takes the whole state
            other = make(1 + rank, steps=rank % 2)  # with and without optimizer state
            other.step = 0
            assert load_newest(catalogue, other) == []
            assert other.step == 9
            assert weights_sha256(other.model) == expected
            assert whole_state(other) == whole_state(make(0))
    assert load_newest(catalogue, other) == [], "nothing newer"


def whole_state(train_state: TrainState) -> tuple:
    header, tensors = capture(train_state.model, train_state.optimizer, train_state.scheduler)
    others = {n: t.tolist() for n, t in tensors.items() if not n.startswith("model/")}
    return header, others


@on_both
def test_damage_found_half_way_leaves_a_trained_replica_as_it_was(tmp_path) -> None:
    train_state, link = make(0), Link()
    saver = Saver(link, spec())  # type: ignore[arg-type]
    saver.open(str(tmp_path))
    saver.begin(train_state, By(0, 1))
    saver._wait_moving()
    saved = SavedPart.unpack(link.said[0].payload)
    catalogue = Catalogue(open_folder(str(tmp_path)).at("checkpoints"))
    manifest = catalogue.publish(9, 4, [saved.part], saved.state, {})
    path = tmp_path / "checkpoints" / "step-00000009" / manifest.files[0].name
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    other = make(5)
    other.step = 8
    before = weights_sha256(other.model), whole_state(other)
    assert [damage.step for damage in load_newest(catalogue, other)] == [9]
    assert (weights_sha256(other.model), whole_state(other)) == before
    assert other.step == 8


@on_both
def test_a_step_that_is_saved_already_is_only_pinned(tmp_path) -> None:
    link, train_state = Link(), make(0)
    saver = Saver(link, spec())  # type: ignore[arg-type]
    saver.open(str(tmp_path))
    by = By(0, 1)
    saver.begin(train_state, by)
    saver.save(train_state, by, lambda: False, is_pinned=False)
    saver.save(train_state, by, lambda: False, is_pinned=True)
    said = [SavedPart.unpack(said.payload) for said in link.said]
    assert [each.is_pinned for each in said] == [False, True]
    assert said[0].part == said[1].part


@on_both
def test_whatever_a_saver_meets_is_reported(tmp_path) -> None:
    link, train_state = Link(), make(0)
    saver = Saver(link, spec())  # type: ignore[arg-type]
    saver.open(str(tmp_path))

    def no_memory(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    saver._memory.take = no_memory  # type: ignore[method-assign,assignment]
    saver.begin(train_state, By(0, 1))
    saver._wait_moving()
    (failed,) = link.said
    assert isinstance(failed, PartFailed)
    assert "can't allocate memory" in failed.message


def test_a_part_that_cannot_be_written_is_reported(tmp_path) -> None:
    link = Link()
    saver = Saver(link, spec())  # type: ignore[arg-type]
    (tmp_path / "checkpoints").write_text("in the way")
    saver.open(str(tmp_path))
    saver.begin(make(0), By(1))
    saver._wait_moving()
    (failed,) = link.said
    assert isinstance(failed, PartFailed)
    assert (failed.generation, failed.rank, failed.step) == (4, 1, 9)
    assert "checkpoints" in failed.message


def test_a_storage_that_is_away_for_a_moment_is_waited_for():
    answers = iter([OSError("away"), OSError("away"), 7])

    def read() -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert patiently(read, pauses_s=(0.0, 0.0, 0.0)) == 7
    answers = iter([OSError("away"), OSError("still away")])
    with pytest.raises(OSError, match="still away"):
        patiently(read, pauses_s=(0.0,))


class Clock:
    """The saver's: it goes on when a test says so, and a little whenever it is read."""

    def __init__(self) -> None:
        self._now, self._lock = 100.0, threading.Lock()

    def monotonic(self) -> float:
        return self.pass_(0.05)

    def pass_(self, seconds: float) -> float:
        with self._lock:
            self._now += seconds
            return self._now


def test_a_final_save_that_gets_further_may_take_as_long_as_it_takes(tmp_path, monkeypatch) -> None:
    clock, link, is_told = Clock(), Link(), threading.Semaphore(0)
    monkeypatch.setattr(saver_module, "time", clock)
    monkeypatch.setattr(saver_module, "_POLL_S", 0.005)
    saver = Saver(link, spec(stall_s=1.5, lease_s=0.1, has_checkpoints=True))  # type: ignore[arg-type]
    saver.open(str(tmp_path))
    take, num_taken = saver._memory.take, 0

    def slowly(*arguments):
        nonlocal num_taken
        clock.pass_(1.0)
        assert is_told.acquire(timeout=60)
        num_taken += 1
        return take(*arguments)

    saver._memory.take = slowly  # type: ignore[method-assign]
    train_state, began = make(0), clock.monotonic()
    saver.save_now(train_state, By(0, 1), is_told.release)  # type: ignore[arg-type]
    assert clock.monotonic() - began > num_taken > 10, "longer than a save that hangs"
    assert [type(said) for said in link.said] == [PartSaved]


def test_a_final_save_to_a_storage_that_hangs_fails_and_is_told(tmp_path) -> None:
    """A FIFO without a reader hangs whoever opens it, as a network mount without its server."""
    link, by = Link(), By(0, 1)
    saver = Saver(link, spec(stall_s=0.5, has_checkpoints=True))  # type: ignore[arg-type]
    saver.open(str(tmp_path))
    assert saver.catalogue is not None
    folder = saver.catalogue.prepare(9)
    assert folder.local is not None
    fifo = folder.local / file_name(by.generation, by.rank, by.world_size, saver.catalogue.launch)
    os.mkfifo(fifo)
    saver.save_now(make(0), by)  # type: ignore[arg-type]
    (failed,) = link.said
    assert isinstance(failed, PartFailed)
    assert (failed.generation, failed.step) == (4, 9)
    assert failed.message == "the storage hangs in step 9: nothing was written for 0.5 s"
    saving = saver.save(make(0), by, lambda: False, is_pinned=False)  # type: ignore[arg-type]
    assert link.said[1:] == [failed], "it waits for the one that hangs no longer than the last did"
    link.concluded_saves[9] = False
    assert not saving.wait()
    back = os.open(fifo, os.O_RDWR)  # too late; a reader that stays: the file may be opened twice
    saver._wait_moving()
    os.close(back)
    assert len(link.said) == 2


def test_a_save_waits_for_an_earlier_one_no_longer_than_its_generation_lasts(tmp_path) -> None:
    link, by, is_allowed = Link(), By(0, 1), threading.Event()
    saver = Saver(link, spec(has_checkpoints=True))  # type: ignore[arg-type]
    saver.open(str(tmp_path))
    saver._memory.take = lambda *_: is_allowed.wait(60) and torch.zeros(1)  # type: ignore[assignment]
    saver.begin(make(0, 2), by)  # type: ignore[arg-type]
    saving = saver.save(make(0), by, lambda: True, is_pinned=False)  # type: ignore[arg-type]
    assert not saving.wait()
    assert (link.said, saver.is_busy) == ([], True)
    is_allowed.set()
    saver._wait_moving()
