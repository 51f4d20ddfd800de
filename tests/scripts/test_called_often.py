"""A function that is called again and again in one process leaves nothing behind."""

import gc
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.local_run import LocalRun
from workers.script_loop import ScriptLoop

CALLS = [6, pytest.param(20, marks=pytest.mark.slow)]
WARM = 2
"""The call that the last one is compared with."""


def standing() -> dict[str, int]:
    """Of this process: what it holds of the system."""
    gc.collect()
    here = Path("/proc/self")
    pages = int((here / "statm").read_text().split()[1])
    children = [(task / "children").read_text().split() for task in (here / "task").iterdir()]
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(list((here / "task").iterdir())),
        "fds": len(os.listdir(here / "fd")),
        "children": sum(map(len, children)),
    }


def train(place: str, calls: int) -> None:
    """It fails in the middle of a pass, with a model, an optimizer and a loader's process."""
    import torch
    import torch.distributed as dist
    from torch import nn

    with (Path(place) / f"standing-{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(standing()) + "\n")
    num_calls = len((Path(place) / f"standing-{dist.get_rank()}.jsonl").read_text().splitlines())
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.randn(64, 1024), 8, num_workers=1)  # pyright: ignore
    for _, batch in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    if num_calls < calls:
        raise ValueError(f"the script's own, in call {num_calls}")


@pytest.fixture(scope="module", params=CALLS)
def lines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    place = tmp_path_factory.mktemp("often") / "run"
    loop = ScriptLoop(
        function=partial(train, str(place), request.param),
        place=str(place),
        name="run",
        max_failures=-1,
    )
    run = LocalRun(loop, place, 2).start()
    assert run.wait(300.0) == "succeeded", run.failure
    texts = (place / "standing-0.jsonl").read_text().splitlines()
    assert len(texts) == request.param
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("what", ["threads", "fds", "children"])
def test_nothing_of_an_earlier_call_is_left(lines, what):
    """What the start has not ended by then (a thread that asks for the data's length) may go."""
    assert lines[-1][what] <= lines[WARM - 1][what], [line[what] for line in lines]


def test_memory_does_not_grow(lines):
    sizes = [line["rss_bytes"] for line in lines]
    assert sizes[-1] <= 1.05 * sizes[WARM - 1], sizes
