"""For a script that reports no checkpoint: a loop over epochs at whose ends new workers enter.

Where no script's run is under way, as under plain `python train.py`, `epochs(n)` is `range(n)` and
the others do nothing.
"""

from collections.abc import Iterator
from typing import Any


def epochs(num: int) -> Iterator[int]:
    """`for epoch in epochs(10):` in place of `range(10)`. All ranks call it alike, once, after
    models and optimizers are made.

    At the end of each epoch the state of models in DistributedDataParallel, optimizers, schedules,
    `GradScaler`s and of what `keep` has named is kept in the run directory. Then new workers enter,
    and the script is called again: on all ranks its objects take that state here, and the loop goes
    on with the next epoch. RuntimeError if they are not the objects of before.
    """
    from workers.scripts.epochs import current

    found = current()
    return iter(range(num)) if found is None else found.iterate(num)


def keep(**objects: Any) -> None:
    """What else goes on at the end of an epoch, by name: whatever has `state_dict()` and
    `load_state_dict()`, tensors, and `torch.Generator`s. Call it before `epochs`.

    ValueError for another object, RuntimeError after `epochs` has begun.
    """
    from workers.scripts.epochs import current

    if (found := current()) is not None:
        found.keep(objects)


def on_missing(
    policy: str | None = None, *, sums: str | None = None, samples: str | None = None
) -> None:
    """What becomes of what a lost rank had a part in. "restart", as without this, calls the script
    again; "survivors" goes on without that part. All ranks say the same.

    sums: an `all_reduce` of the script's own, which is then the sum over who is left. samples:
    those that come from no DataLoader; a lost rank's are used by nobody then. policy: of both.

    ValueError for another policy.
    """
    asked = {"sums": sums or policy, "samples": samples or policy}
    for name, value in asked.items():
        if value not in (None, "restart", "survivors"):
            what = f'on_missing({name}=...) must be "restart" or "survivors"'
            raise ValueError(f"{what}, got {value!r}")
    from workers.scripts.epochs import current

    if (found := current()) is not None:
        found.go_on_missing(**asked)
