"""A CUDA graph is captured in CUDA's "global" mode, as `torch.cuda.graph` does, while another
thread takes snapshots: does the capture hold, and does the graph compute what it should?"""

import argparse
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from tests.gpu.experiment import Table, main
from tests.gpu.groups import device_of
from workers.distributed import captures
from workers.train_state.snapshot import Arena, Snapshot

TENSORS, ELEMENTS = 64, 1 << 18


def keep_taking(state: dict[str, Tensor], is_over: threading.Event, errors: list[str]) -> int:
    """Snapshots until it is over; how many. Each has memory of its own, as a first one has."""
    taken = 0
    while not is_over.is_set():
        memory = Arena(is_pinned=True)
        try:
            memory.reserve((t.dtype, t.shape) for t in state.values())
            Snapshot({}, state, memory).taken()
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])
        taken += 1
    return taken


def captured(count: int, beside: Callable[[threading.Event, list[str]], object]) -> list[str]:
    """What went wrong in so many captures, or beside them."""
    errors, is_over = list[str](), threading.Event()
    device = device_of()
    own = torch.ones(256, 256, device=device)
    bool((own @ own / 256 == 1).all().item())  # libraries make their handles, which no capture may
    thread = threading.Thread(target=beside, args=(is_over, errors))
    thread.start()
    for _ in range(count):
        graph, result = torch.cuda.CUDAGraph(), own
        try:
            with torch.cuda.graph(graph):
                for _ in range(50):
                    result = result @ own / 256
            graph.replay()
            if not bool((result == 1).all().item()):
                errors.append("the graph computes something else")
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])
    is_over.set()
    thread.join()
    return errors


def body(table: Table, arguments: argparse.Namespace) -> None:
    device = device_of()
    state = {f"t{i}": torch.full((ELEMENTS,), float(i), device=device) for i in range(TENSORS)}
    taken = list[int]()

    def beside(is_over: threading.Event, errors: list[str]) -> None:
        taken.append(keep_taking(state, is_over, errors))

    errors = captured(arguments.captures, beside)
    table.holds("captures beside snapshots hold", not errors, errors[0][:80] if errors else "yes")
    table.at_least("snapshots meanwhile", taken[-1], 1)
    told, captures.driver = captures.driver, lambda: None
    errors = captured(arguments.captures, beside)
    captures.driver = told
    table.tell("if the thread did not say that it takes no part", f"{len(errors)} errors")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--captures", type=int, default=50)


if __name__ == "__main__":
    sys.exit(main(body, options=options))
