"""Seeds: what torch, numpy and random will draw depends on the sample or micro-batch alone.

Never on a rank or on what the process did before. The sample order is in workers/data/order.py.
"""

import random
from hashlib import blake2b

import numpy as np
import torch


def seed_dataset(seed: int) -> None:
    """Before `Workload.dataset()`: a random split there is the same one in every process."""
    _seed_all(f"{seed}", b"dataset")


def seed_sample(seed: int, position: int) -> None:
    """Before the sample at this stream position is loaded."""
    _seed_all(f"{seed}:{position}", b"sample")


def seed_module(seed: int, name: str) -> None:
    """Before the weights of the module of this name are initialised."""
    _seed_all(f"{seed}:{name}", b"module")


def seed_microbatch(seed: int, step: int, microbatch_id: int) -> None:
    """Before collate and before loss; `step` counts the steps committed so far."""
    _seed_all(f"{seed}:{step}:{microbatch_id}", b"microbatch")


def _seed_all(name: str, purpose: bytes) -> None:
    digest = blake2b(name.encode(), digest_size=24, person=purpose).digest()
    torch_seed = int.from_bytes(digest[:8], "little")
    torch.default_generator.manual_seed(torch_seed)
    accelerator = torch.accelerator.current_accelerator()
    module = accelerator and torch.get_device_module(accelerator)
    if module is not None and module.is_initialized():  # it is not in a forked process
        module.manual_seed(torch_seed)  # of the current device alone
    # 32 bits: an array of seeds would take numpy five times as long.
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    random.seed(int.from_bytes(digest[12:], "little"))
