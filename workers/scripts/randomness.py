"""The generators of random numbers that a script and the engine share in one process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is drawn or seeded within, the script's generators do not notice."""
    state, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def renew() -> None:
    """As in a new process: nothing of the seeds of before, and other numbers on each rank."""
    random.seed()
    np.random.seed()
    torch.seed()
