"""Loader processes: what they load, how they stop, and how their troubles arrive."""

import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from elastic.data import parquet
from elastic.protocol.errors import StepCancelled, UserError, WrongInput
from workers.data.loader import Loader, LoaderLost
from workers.data.order import SampleOrder
from workers.data.parquet_source import is_rays_own
from workers.step.randomness import seed_microbatch, seed_sample

SEED, GLOBAL_BATCH, MICRO_BATCH, NUM_ROWS = 5, 8, 2, 21


class Rows:
    """Samples: the row, draws of all three generators, and a payload of `size` floats."""

    def __init__(self, num_rows: int = NUM_ROWS, size: int = 3) -> None:
        self.num_rows, self.size = num_rows, size

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        draws = [random.random(), np.random.rand(), float(torch.rand(()))]
        return {
            "row": row,
            "draws": torch.tensor(draws),
            "name": f"row {row}",
            "payload": torch.full((self.size,), float(row)),
        }


class Workload:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def dataset(self) -> Any:
        return self._dataset


def never() -> bool:
    return False


@pytest.fixture
def make() -> Iterator[Any]:
    loaders: list[Loader] = []

    def _make(workload: Any, processes: int = 1, global_batch: int = GLOBAL_BATCH) -> Loader:
        loaders.append(Loader(workload, SEED, global_batch, MICRO_BATCH, processes))
        return loaders[-1]

    yield _make
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("size", [3, 20_000])
def test_batches_hold_the_rows_of_the_stream_and_seeded_draws(
    make: Any, processes: int, size: int
) -> None:
    loader = make(Workload(Rows(size=size)), processes)
    assert loader.num_rows == NUM_ROWS
    order = SampleOrder(NUM_ROWS, SEED)
    loader.assign(4, range(1, 3))
    for step in range(4, 9):
        for i in (1, 2):
            loaded = loader.next(step, i, never)
            first = step * GLOBAL_BATCH + i * MICRO_BATCH
            rows = order.rows(first, MICRO_BATCH)
            assert (loaded.step, loaded.microbatch_id) == (step, i)
            assert loaded.rows.dtype == np.int64
            assert loaded.rows.tolist() == rows.tolist() == loaded.batch["row"].tolist()
            assert loaded.batch["name"] == [f"row {row}" for row in rows]
            assert loaded.batch["payload"].tolist() == [[float(row)] * size for row in rows]
            for k in range(MICRO_BATCH):
                seed_sample(SEED, first + k)
                expected = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
                assert torch.equal(loaded.batch["draws"][k], expected)
            assert loaded.batch["payload"].data_ptr() % 64 == 0
            loaded.batch["payload"].add_(1.0)  # the batch is ours


def test_a_new_assignment_replaces_the_old_one_at_any_moment(make: Any) -> None:
    loader = make(Workload(Rows()), processes=2)
    order = SampleOrder(NUM_ROWS, SEED)
    for attempt in range(200):
        ids = range(attempt % 3, attempt % 3 + 2)
        step = attempt // 7
        loader.assign(step, ids)
        for i in list(ids)[: attempt % 4]:
            rows = order.rows(step * GLOBAL_BATCH + i * MICRO_BATCH, MICRO_BATCH)
            assert loader.next(step, i, never).rows.tolist() == rows.tolist()


def test_fetch_gives_one_micro_batch_and_the_next_assignment_works(make: Any) -> None:
    loader = make(Workload(Rows()))
    assert loader.fetch(0, 0).microbatch_id == 0
    loader.assign(3, range(2, 4))
    assert loader.next(3, 2, never).step == 3


class Slow(Rows):
    def __getitem__(self, row: int) -> Any:
        time.sleep(60.0 if row == self.num_rows - 1 else 0.0)
        return row


def test_waiting_ends_when_the_step_is_cancelled(make: Any) -> None:
    loader = make(Workload(Slow(num_rows=1)))
    loader.assign(0, range(1))
    looks = iter(
        [False, False, False, True]
    )  # a fourth look is enough; the sample takes far longer
    with pytest.raises(StepCancelled):
        loader.next(0, 0, lambda: next(looks))
    with pytest.raises(StepCancelled):
        loader.next(0, 0, lambda: True)


def test_a_killed_loader_process_is_an_error_and_not_a_hang(make: Any) -> None:
    loader = make(Workload(Slow(num_rows=1)))
    loader.assign(0, range(1))
    os.kill(loader.pids[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"{loader.pids[0]} was killed by SIGKILL \(w"):
        loader.next(0, 0, never)


def _failing_getitem(row: int) -> Any:
    if row == 3:
        raise ValueError("row three is bad")
    return row


class Failing(Rows):
    def __getitem__(self, row: int) -> Any:
        return _failing_getitem(row)


def test_a_users_exception_comes_with_its_traceback_position_and_step(make: Any) -> None:
    loader = make(Workload(Failing()))
    place = SampleOrder(NUM_ROWS, SEED).rows(0, NUM_ROWS).tolist().index(3)
    step, i = place // GLOBAL_BATCH, place % GLOBAL_BATCH // MICRO_BATCH
    loader.assign(0, range(4))
    for index in range(step * 4 + i):
        loader.next(*divmod(index, 4), never)
    with pytest.raises(UserError) as caught:
        loader.next(step, i, never)
    assert "_failing_getitem" in caught.value.traceback_text
    assert caught.value.message == (
        f"ValueError: row three is bad, loading the sample at stream position {place} "
        f"(row 3, step {step + 1}, micro-batch {i})"
    )


class Collating(Workload):
    def collate(self, samples: list[Any]) -> Any:
        if len(self._dataset) == 1:
            raise KeyError("no such column")
        return Pair(torch.rand(2), tuple(s["row"] for s in samples))


class Pair(NamedTuple):
    draws: torch.Tensor
    rows: tuple[int, ...]


def test_the_workloads_own_collate_is_used_and_seeded(make: Any) -> None:
    loader = make(Collating(Rows()))
    loader.assign(2, range(4))
    loaded = loader.next(2, 0, never)
    seed_microbatch(SEED, 2, 0)
    assert torch.equal(loaded.batch.draws, torch.rand(2))
    assert loaded.batch.rows == tuple(loaded.rows.tolist())


def test_an_exception_in_collate_names_all_positions(make: Any) -> None:
    loader = make(Collating(Rows(1)))
    loader.assign(2, range(4))
    said = r"KeyError.*stream positions 16\.\.17 \(rows \[0, 0\], step 3, micro-batch 0\)"
    with pytest.raises(UserError, match=said):
        loader.next(2, 0, never)


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (lambda: sys.exit(4), "SystemExit: 4"),
        (lambda: _raise(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda: _raise(GeneratorExit("enough")), "GeneratorExit: enough"),
        (
            lambda: _raise(Speechless()),
            "Speechless: (its text cannot be had, str() of it raised RuntimeError)",
        ),
    ],
)
def test_whatever_a_sample_raises_is_the_users_error_and_no_lost_process(
    make: Any, sample: Callable[[], Any], said: str
) -> None:
    class Samples(Rows):
        def __getitem__(self, row: int) -> Any:
            return sample()

    loader = make(Workload(Samples(1)))
    loader.assign(2, range(4))
    with pytest.raises(UserError) as caught:
        loader.next(2, 1, never)
    assert caught.value.message == (
        f"{said}, loading the sample at stream position 18 (row 0, step 3, micro-batch 1)"
    )
    assert "test_loader.py" in caught.value.traceback_text


class Unwilling:
    def __reduce__(self) -> Any:
        sys.exit("not me")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (lambda: lambda: 1, "Can't pickle"),
        (lambda: (i for i in range(3)), "TypeError: cannot pickle 'generator' object"),
        (lambda: [torch.zeros(9000), threading.Lock()], "TypeError: cannot pickle '_thread.lock'"),
        (Unwilling, "SystemExit: not me"),
    ],
)
def test_a_batch_that_cannot_leave_the_process_is_the_users_error(
    make: Any, batch: Callable[[], Any], said: str
) -> None:
    class Batches(Workload):
        def collate(self, samples: list[Any]) -> Any:
            return batch()

    loader = make(Batches(Rows(1)))
    loader.assign(2, range(4))
    with pytest.raises(UserError) as caught:
        loader.next(2, 0, never)
    assert said.lower() in caught.value.message.lower()
    assert caught.value.message.endswith(
        ", passing to the worker the batch of the samples at stream positions 16..17 "
        "(rows [0, 0], step 3, micro-batch 0)"
    )


def test_an_exit_without_a_word_is_a_lost_process(make: Any) -> None:
    class Exits(Rows):
        def __getitem__(self, row: int) -> Any:
            os._exit(9)

    loader = make(Workload(Exits(1)))
    loader.assign(0, range(4))
    with pytest.raises(LoaderLost, match=r"^loader process \d+ exited with status 9$"):
        loader.next(0, 0, never)


class Unreadable:
    def dataset(self) -> Any:
        raise FileNotFoundError("no /data")


def test_wrong_datasets_are_refused_in_one_line(make: Any) -> None:
    with pytest.raises(UserError, match="FileNotFoundError: no /data") as caught:
        _ = make(Unreadable()).num_rows
    assert "in dataset" in caught.value.traceback_text
    with pytest.raises(WrongInput, match="length 0") as refused:
        _ = make(Workload(Rows(0))).num_rows
    assert "\n" not in str(refused.value)
    with pytest.raises(WrongInput, match="map-style"):
        _ = make(Workload(iter([1]))).num_rows
    with pytest.raises(WrongInput, match=r"return elastic\.data\.parquet\('data/train'\)"):
        _ = make(Workload("data/train")).num_rows
    with pytest.raises(WrongInput, match="a dict, whose keys are no positions"):
        _ = make(Workload({"a": 1})).num_rows
    with pytest.raises(WrongInput, match="a list of paths, which are no samples"):
        _ = make(Workload(["0.parquet", Path("1.parquet")])).num_rows
    with pytest.raises(WrongInput, match=r"a tuple of 2 tensors, .*TensorDataset\(\*tensors\)"):
        _ = make(Workload((torch.zeros(8, 1), torch.zeros(8)))).num_rows


def test_what_ends_or_cannot_leave_a_loader_process_is_told(make: Any) -> None:
    lock = threading.Lock()

    class Unpicklable:
        def dataset(self) -> Any:
            return parquet("somewhere", transform=lambda t: lock and t)

    class Ends:
        def dataset(self) -> Any:
            sys.exit("no data today")

    class Speaks:
        def dataset(self) -> Any:
            raise Speechless

    class Sizeless:
        def dataset(self) -> Any:
            return Failing(-1)

    with pytest.raises(
        UserError, match="cannot be passed on to the feed: TypeError: cannot pickle"
    ):
        make(Unpicklable()).source()
    with pytest.raises(UserError, match="raised SystemExit: no data today"):
        make(Ends()).source()
    with pytest.raises(UserError, match=r"raised Speechless: \(its text cannot be had"):
        make(Speaks()).source()
    with pytest.raises(UserError, match=r"the length of what dataset\(\) returned: ValueError"):
        make(Sizeless()).source()


def test_a_users_folder_named_ray_is_not_rays_own(tmp_path: Path) -> None:
    path = tmp_path / "ray" / "session" / "job.py"
    path.parent.mkdir(parents=True)
    path.write_text("open('/no/such/file')")

    def error_of(call: Callable[[], Any]) -> Exception:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        return caught.value

    assert not is_rays_own(error_of(lambda: runpy.run_path(str(path))))
    assert is_rays_own(error_of(lambda: import_module("ray").remote(3)))


def test_unusual_batches_arrive_whole(make: Any) -> None:
    class Odd(Workload):
        def collate(self, samples: list[Any]) -> Any:
            return [
                torch.empty(0, 3),
                torch.tensor(2.5, dtype=torch.bfloat16),
                torch.arange(6).reshape(2, 3).t(),
                np.arange(3.0),
                None,
                {"k": (1, "two")},
                [torch.tensor(i) for i in range(1500)],
                torch.tensor([True, False]),
                torch.zeros(300, 300),
            ]

    loader = make(Odd(Rows()))
    loader.assign(0, range(4))
    batch = loader.next(0, 0, never).batch
    assert batch[0].shape == (0, 3)
    assert batch[1].dtype == torch.bfloat16
    assert batch[1].item() == 2.5
    assert torch.equal(batch[2], torch.arange(6).reshape(2, 3).t())
    assert batch[3].tolist() == [0.0, 1.0, 2.0]
    assert batch[4:6] == [None, {"k": (1, "two")}]
    assert [int(t) for t in batch[6]] == list(range(1500))
    assert batch[7].tolist() == [True, False]
    assert batch[8].shape == (300, 300)


_ORPHAN = """
import os, sys
sys.path.insert(0, {root!r})
from workers.data.parquet_source import is_rays_own
from workers.data.loader import Loader, LoaderLost
class W:
    def dataset(self): return list(range(10))
loader = Loader(W(), 0, 4, 2, 2)
print(loader.num_rows, *loader.pids, flush=True)
os.kill(os.getpid(), 9)
"""


def test_loader_processes_die_with_their_worker() -> None:
    root = str(Path(__file__).parents[2])
    program = subprocess.Popen(
        [sys.executable, "-c", _ORPHAN.format(root=root)], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    num_rows, *pids = map(int, program.stdout.readline().split())
    assert num_rows == 10
    program.wait(60)
    deadline = time.monotonic() + 60
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
