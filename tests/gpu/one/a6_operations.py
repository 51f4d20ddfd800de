"""Bits: optimizers on shards, the norm's row sums, the tree's folds, and operations with several
kernels, in one process after another."""

import argparse
import hashlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from tests.gpu.experiment import Table, main
from tests.gpu.groups import HAS_GPU, device_of
from workers.health import gpu
from workers.parallel.fsdp2_private.shard_step import ELEMENTWISE
from workers.reduction.norm import row_squares

SIZE, LARGEST, PROCESSES = 1003, 502, 20
WAYS = ("for-loop", "foreach", "fused", "capturable")


def options_of(way: str) -> dict[str, bool]:
    return {"foreach": way == "foreach", **({way: True} if way in ("fused", "capturable") else {})}


def stepped(kind: type[optim.Optimizer], way: str, start: Tensor, gradient: Tensor) -> Tensor:
    """After three steps. Raises where there is no such way."""
    parameter = nn.Parameter(start.clone())
    optimizer = kind([parameter], lr=0.01, **options_of(way))
    for _ in range(3):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def differing(kind: type[optim.Optimizer], way: str, sizes: list[int]) -> int | None:
    """On how many shards, of so many elements each, the bits are not those of the whole; None if
    there is no such way."""
    device, drawn = device_of(), torch.Generator().manual_seed(5)
    start, gradient = (torch.randn(SIZE, generator=drawn).to(device) for _ in range(2))
    try:
        whole = stepped(kind, way, start, gradient)
    except (TypeError, RuntimeError, ValueError, AssertionError):
        return None
    found = 0
    for size in sizes:
        at = (SIZE - size) // 3
        part = stepped(kind, way, start[at : at + size], gradient[at : at + size])
        found += not torch.equal(part, whole[at : at + size])
    return found


def optimizers(table: Table, sizes: list[int]) -> None:
    for kind, way in itertools.product(ELEMENTWISE, WAYS):
        found = differing(kind, way, sizes)
        name = f"{kind.__name__}, {way}: shards with other bits"
        if found is None:
            table.tell(name, "no such way")
        elif way == "fused":  # it is refused (shard_step.py)
            table.tell(name, f"{found}, refused with bitwise")
        else:
            table.at_most(name, found, 0)


def rows_and_offsets(table: Table) -> None:
    device, drawn = device_of(), torch.Generator().manual_seed(6)
    matrix = torch.randn(SIZE, 257, generator=drawn).to(device)
    whole = row_squares([matrix])
    same = all(
        torch.equal(row_squares([matrix[a:b]]), whole[a:b])
        for a, b in ((0, 1), (1, 2), (3, 500), (500, SIZE), (SIZE - 1, SIZE))
    )
    table.holds("row sums do not depend on the shard", same)
    left, right = (torch.randn(1 << 16, generator=drawn).to(device) for _ in range(2))
    plain = left + right
    for offset in (0, 4, 16, 512):
        memory = torch.empty((1 << 16) + 128, device=device)
        moved = memory[offset // 4 : offset // 4 + (1 << 16)]
        moved.copy_(left)
        table.holds(f"a fold at {offset} bytes", torch.equal(moved.add_(right), plain))


def operations() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Each gives what depends on a kernel's choice."""
    device = device_of()

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, device=device)

    def dropout() -> Tensor:
        return F.dropout(torch.ones(1 << 20, device=device), 0.1)

    def attention() -> Tensor:
        q = drawn(2, 4, 256, 64).requires_grad_()
        F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum().backward()
        assert q.grad is not None
        return q.grad

    def convolution() -> Tensor:
        layer = nn.Conv2d(16, 32, 3, padding=1, device=device)
        layer(drawn(8, 16, 32, 32)).square().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    def embedding() -> Tensor:
        table = nn.Embedding(97, 64, device=device)
        table(torch.randint(0, 97, (4096,), device=device)).square().sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad

    def product() -> Tensor:
        return drawn(512, 384) @ drawn(384, 640)

    yield from (
        ("dropout", dropout),
        ("attention backward", attention),
        ("convolution backward", convolution),
        ("embedding backward", embedding),
        ("matrix product", product),
    )


def hashes() -> dict[str, str]:
    if HAS_GPU:
        gpu.make_deterministic()
    found = dict[str, str]()
    for name, operation in operations():
        torch.manual_seed(7)
        found[name] = hashlib.sha256(operation().detach().cpu().numpy().tobytes()).hexdigest()[:16]
    return found


def body(table: Table, arguments: argparse.Namespace) -> None:
    optimizers(table, list(range(1, LARGEST + 1, arguments.every)))
    rows_and_offsets(table)
    command = [sys.executable, "-c", "from tests.gpu.one.a6_operations import hashes"]
    command[-1] += "; print(sorted(hashes().items()))"
    seen = {
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for _ in range(arguments.processes)
    }
    table.at_most(f"different results of {arguments.processes} processes", len(seen) - 1, 0)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every", type=int, default=1, help="sizes of shards: each so many-th")
    parser.add_argument("--processes", type=int, default=PROCESSES)


if __name__ == "__main__":
    sys.exit(main(body, options=options))
