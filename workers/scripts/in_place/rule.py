"""The rule by which a call of a script goes on in place after a loss, and what does not meet it.

A lost rank's part of a step must be one that who is left can do again: so all that ranks share must
come through one of three doors (`Clause`). Whatever comes another way is an `Obstacle`: from there
on a loss has the script called again, at level 0. Where each is noticed is seams.py's, course.py's
and the loaders'; docs/your-script.md has its list from here.
"""

from dataclasses import dataclass
from enum import Enum


class Clause(Enum):
    """Of the rule, for a reader of docs/your-script.md."""

    GRADIENTS = (
        "Gradients meet in `DistributedDataParallel`, at the end of each synchronised backward, on "
        "all ranks alike"
    )
    SAMPLES = "Samples come from what deals them again"
    STATE = (
        "Each rank has the whole state; what ranks share beside gradients are collectives of all "
        "of them, one after the other"
    )


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What does not meet a clause."""

    clause: Clause
    why: str
    """For `level_reason`; `{}` stands for a name."""
    docs: str = ""
    """What it is in a script; empty: it is met after a loss only, which has a list of its own."""

    def of(self, what: str) -> str:
        """Why, with this name."""
        return self.why.format(what)


OWN_GROUP = Obstacle(
    Clause.GRADIENTS,
    "a model has a process group of its own",
    "DDP's `process_group=` with a group of the script's own",
)
MIXED_PRECISION = Obstacle(
    Clause.GRADIENTS,
    "a model has DDP's mixed_precision",
    "DDP's `mixed_precision=` (`torch.autocast` and `GradScaler` are the script's own)",
)
SPARSE = Obstacle(
    Clause.GRADIENTS,
    "a model has sparse gradients",
    "sparse gradients, as of `Embedding(sparse=True)`",
)
SEVERAL_DEVICES = Obstacle(
    Clause.GRADIENTS, "a model is on several devices", "a model on several devices"
)
DELAYED = Obstacle(
    Clause.GRADIENTS,
    "a model delays the reduction of parameters",
    "DDP's `delay_all_reduce_named_params=`",
)
OWN_REDUCTION = Obstacle(
    Clause.GRADIENTS,
    "the script uses DistributedDataParallel.{}",
    "DDP's `register_comm_hook` and `join`",
)
SECOND_GRADIENT = Obstacle(
    Clause.GRADIENTS,
    "a parameter got a second gradient in one backward after the first was sent; "
    "use checkpoint(use_reentrant=False)",
    "a parameter that gets a second gradient in one backward, as of "
    "`checkpoint(use_reentrant=True)`",
)
NEW_PARAMETERS = Obstacle(
    Clause.GRADIENTS,
    "a model has parameters that it had not when DistributedDataParallel was made of it: their "
    "gradients are not shared",
    "parameters that a model gets after `DistributedDataParallel` was made of it",
)
LBFGS = Obstacle(
    Clause.GRADIENTS,
    "the optimizer is LBFGS: each rank decides by its own loss how often it is called",
    "LBFGS, in which each rank decides by its own loss how often it computes gradients",
)
ELSEWHERE = Obstacle(
    Clause.SAMPLES,
    "samples come from no DataLoader: those of a lost rank would be missed; "
    "elastic.torch.on_missing(samples='survivors') accepts that",
    "samples from no `DataLoader` and no `get_dataset_shard()`, as slices of the script's own, "
    "DALI or FFCV: more than eight backwards without a new batch",
)
NOT_DEALT = Obstacle(
    Clause.SAMPLES,
    "a DataLoader has no DistributedSampler of torch's",
    "a training `DataLoader` without torch's own `DistributedSampler` and batches, as with "
    "`add_dist_sampler=False` or a stream (of Accelerate's: `dispatch_batches`, "
    "`even_batches=False`, `skip_first_batches` and samplers of the script's own)",
)
OTHER_ORDER = Obstacle(
    Clause.SAMPLES,
    "a sampler of Accelerate's has not the same order on all ranks: give them one seed",
    "a sampler of Accelerate's whose order differs between ranks, as of `use_seedable_sampler` "
    "without a seed",
)
NOT_BATCHES = Obstacle(
    Clause.SAMPLES,
    "rows of get_dataset_shard() are dealt again within a call in batches of a size only: use "
    "iter_torch_batches() or iter_batches()",
    "a shared data set of Ray Data that is not read in batches of a size: `iter_rows()`, "
    "`materialize()`",
)
DEVICE_MESH = Obstacle(
    Clause.STATE,
    "the script has a device mesh, as FSDP and tensor parallelism have",
    "device meshes, as of FSDP2 and tensor parallelism",
)
FSDP1 = Obstacle(
    Clause.STATE,
    "a model is in FSDP's FullyShardedDataParallel",
    "FSDP1's `FullyShardedDataParallel`",
)
SHARED_OPTIMIZER = Obstacle(
    Clause.STATE,
    "the optimizer is {}: ranks share its state or steps",
    "`ZeroRedundancyOptimizer` and others of `torch.distributed.optim`",
)
OWN_GROUPS = Obstacle(
    Clause.STATE,
    "the script has process groups of its own",
    "process groups of the script's own (`new_group`)",
)
SENDS = Obstacle(Clause.STATE, "the script sends from rank to rank", "sending from rank to rank")
IN_FLIGHT = Obstacle(
    Clause.STATE,
    "a collective of the script's own is in flight while gradients meet",
    "a collective of the script's own that is in flight while gradients meet",
)
OTHER_RANKS = Obstacle(
    Clause.STATE,
    "ranks are other members' since the script has called a collective that names some",
)
AFTER_A_LOSS = Obstacle(Clause.STATE, "with fewer ranks than it was called with, the script met {}")

OBSTACLES = tuple(found for found in vars().copy().values() if isinstance(found, Obstacle))
"""In the order in which docs/your-script.md has them."""
