"""Draws what the ranks of a pipeline do when: a step of real ranks whose blocks sleep, from the
times at which these begin and end.

    python -m tests.bench.schedule_picture docs/schedules.svg
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic.protocol.schedule import SCHEDULES, stages_per_rank
from tests.workers.pipeline_models import Case
from tests.workers.pipeline_ranks import Trained, groups_in
from tests.workers.ranks import Ranks, run_ranks
from workers.distributed.store import StoreClient
from workers.parallel.pipeline.absent import Absent

RANKS, BLOCKS, MICROBATCHES = 4, 8, 8
PART_S = 0.08
"""Of a block's forward, and of each half of its backward."""
WIDTH, ROW, GAP, LEFT = 900, 22, 34, 70
COLORS = {
    "forward": ("#4477aa", "#88bbdd"),
    "inputs": ("#cc6644", "#eebb99"),
    "weights": ("#998833", "#ddcc77"),
}
"""Of the stages of a rank."""
Span = tuple[str, int, float, float]
"""Kind, block, begin, end."""


def sleep_as(kind: str, block: int) -> None:
    began = time.monotonic()
    time.sleep(PART_S)
    Timed.record(kind, block, began)


class Timed(torch.autograd.Function):
    record: Callable[[str, int, float], None]
    """Of this process; given the kind, the block and its begin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: int) -> Tensor:
        ctx.block = block
        sleep_as("forward", block)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sleep_as("inputs", ctx.block)
        return gradient, None


class TimedBehind(torch.autograd.Function):
    """On the way to the gradient of a parameter alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, block: int) -> Tensor:
        ctx.block = block
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sleep_as("weights", ctx.block)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.linear.weight, Absent):
            return self.linear(x)
        weight = TimedBehind.apply(self.linear.weight, self.number)
        return Timed.apply(nn.functional.linear(x, weight, self.linear.bias), self.number)


CASE = Case(
    lambda: nn.Sequential(*(Sleeper(number) for number in range(BLOCKS))),
    lambda generator, index: torch.randn(2, 4, generator=generator),
    lambda model, batch: (model(batch).square().mean(), None),
)


def spans_of(schedule: str) -> list[list[Span]]:
    """By rank, those of one step, which all have begun together."""

    def body(ranks: Ranks) -> list[Span]:
        spans: list[Span] = []
        Timed.record = lambda kind, block, at: spans.append((kind, block, at, time.monotonic()))
        group = ranks.form(0, list(range(RANKS)))
        trained = Trained(CASE)
        trained.batches = (trained.batches * MICROBATCHES)[:MICROBATCHES]
        trained.train(groups_in(group), RANKS, 1, schedule)  # what is slow once
        store = StoreClient(ranks.address, 60.0)
        store.set(f"ready/{ranks.index}", "")
        store.wait([f"ready/{rank}" for rank in range(RANKS)])
        spans.clear()
        trained.train(groups_in(group), RANKS, 1, schedule)
        return spans

    return run_ranks(RANKS, body)


def drawn(found: dict[str, list[list[Span]]]) -> str:
    begins = {name: min(s[2] for spans in ranks for s in spans) for name, ranks in found.items()}
    ends = {name: max(s[3] for spans in ranks for s in spans) for name, ranks in found.items()}
    longest = max(ends[name] - begins[name] for name in found)
    scale, height = (WIDTH - LEFT - 10) / longest, len(found) * (RANKS * ROW + GAP) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    top = 0
    for name, ranks in found.items():
        took_s = ends[name] - begins[name]
        busy_s = sum(end - begin for spans in ranks for _, _, begin, end in spans)
        idle = 1 - busy_s / (RANKS * took_s)
        words = f"{name}: {took_s:.2f} s, {idle:.0%} idle"
        lines.append(f'<text x="{LEFT}" y="{top + 22}" font-size="13">{words}</text>')
        for rank, spans in enumerate(ranks):
            y = top + GAP + rank * ROW - 4
            lines.append(f'<text x="10" y="{y + 14}">rank {rank}</text>')
            own = sorted({block for _, block, _, _ in spans})
            in_first = own[: len(own) // stages_per_rank(name)]
            for kind, block, begin, end in spans:
                x, wide = LEFT + (begin - begins[name]) * scale, (end - begin) * scale
                color = COLORS[kind][block not in in_first]
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 4}" '
                    f'fill="{color}" stroke="white" stroke-width="0.5"/>'
                )
        top += RANKS * ROW + GAP
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    arguments.file.write_text(drawn({name: spans_of(name) for name in SCHEDULES}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
