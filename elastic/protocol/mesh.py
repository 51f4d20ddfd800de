"""How the workers of a run share the model and the step: the wanted axes (`Parallel`), and the mesh
that the ranks of one generation make of them (`Mesh`).

Who is a member is membership.py's; torch's own mesh is made from it in workers/parallel/.
"""

import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypeAlias

from elastic.protocol.schedule import SCHEDULES, num_ranks_of, stages_at

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: as in torchtitan, whose `ep` lies across dp_shard, cp and tp."""
DATA_WORDS = ("ddp", "fsdp", "fsdp-grad-op", "hsdp")
_SPELLINGS = {name.lower(): name for name in (*SCHEDULES, "LoopedBFS")}
"""In any case, as torch takes them."""
AVAILABLE = "ddp, fsdp, fsdp-grad-op, hsdp:S, pp:S, package.module:function"
"""What is built, and a strategy of one's own; the grammar also knows what is to come."""
MODEL_AXES = ("pp", "tp", "cp", "ep")
_WORD = re.compile(
    r"(?P<data>ddp|fsdp|fsdp-grad-op)|hsdp:(?P<shards>[1-9]\d*)"
    rf"|(?P<axis>{'|'.join(MODEL_AXES)}):(?P<size>[1-9]\d*)(?:/(?P<schedule>\w+))?"
    rf"|(?P<strategy>(?!(?:hsdp|{'|'.join(MODEL_AXES)}):)[A-Za-z_][\w.]*:[A-Za-z_]\w*)"
)


def _what_else(word: str) -> str:
    """There is than a word that is none."""
    axis = word.partition(":")[0]
    if axis == "pp":
        return (
            ": give pp:S or pp:S/Schedule, where S is the number of stages, a whole number of at "
            f"least 2, such as pp:4, and Schedule one of {', '.join(SCHEDULES)}"
        )
    if axis != "hsdp":
        return f" is unknown: choose one of {AVAILABLE}"
    return (
        ": give hsdp:S, where S is the number of ranks in a replica, a whole number of at least 1, "
        "such as hsdp:4"
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the model is spread over the workers: axes in torchtitan's words.

    The data axes have no number of their own, they take the ranks that are there.
    """

    data: str = "ddp"
    """One of "ddp", "fsdp", "fsdp-grad-op" and "hsdp"; default "ddp"."""
    dp_shard: int | None = None
    """The ranks of a replica; of "hsdp" only, which needs it."""
    pp: int = 1
    """Stages of a pipeline; default 1: none. With "ddp" or "fsdp-grad-op": then those who compute
    the same blocks share the state of these. A rank has one of them, or as many as the schedule
    gives it: then so many ranks."""
    schedule: str = ""
    """Of the pipeline, in torch's words: "GPipe", "1F1B", or "Interleaved1F1B" and "ZBVZeroBubble",
    where a rank has two stages; default "": 1F1B."""
    tp: int = 1
    """Ranks that share each matrix; default 1. Not available yet."""
    cp: int = 1
    """Ranks that share each sequence; default 1. Not available yet."""
    ep: int = 1
    """Ranks that share the experts; default 1. Not available yet."""
    strategy: str = ""
    """The function that makes a strategy of your own over these axes, as "package.module:function";
    default "": ours."""

    @classmethod
    def of(cls, text: str) -> Self:
        """From words joined by commas, such as "hsdp:4,tp:2"; ValueError if it is none."""
        values: dict[str, Any] = {}
        for word in text.split(","):
            found = _WORD.fullmatch(word)
            if found is None:
                raise ValueError(f"parallel={text!r}{_what_else(word)}")
            axis, size, schedule = found["axis"], found["size"], found["schedule"]
            new: dict[str, Any] = {"data": found["data"] or "hsdp"}
            if found["strategy"] is not None:
                new = {"strategy": found["strategy"]}
            elif axis is not None:
                new = {axis: int(size)}
            elif found["shards"] is not None:
                new["dp_shard"] = int(found["shards"])
            if schedule is not None:
                new["schedule"] = _SPELLINGS.get(schedule.lower(), schedule)
            if new.keys() & values.keys():
                what = axis or ("the strategy" if found["strategy"] else "the data axis")
                raise ValueError(f"parallel={text!r} says twice what {what} is: leave one word out")
            if axis is not None and int(size) == 1:
                raise ValueError(f"parallel={text!r}: {axis}:1 is no axis, leave it out")
            values |= new
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"parallel={text!r}: {error}") from error

    def __post_init__(self) -> None:
        if self.data not in DATA_WORDS:
            raise ValueError(
                f"data={self.data!r} is unknown: choose one of {', '.join(DATA_WORDS)}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("dp_shard", *MODEL_AXES) and not (value is None or _is_size(value)):
                raise ValueError(f"{field.name} must be at least 1, got {value!r}")
        if self.data == "hsdp" and self.dp_shard is None:
            raise ValueError("hsdp needs dp_shard, the number of ranks in a replica")
        if self.data != "hsdp" and self.dp_shard is not None:
            raise ValueError(f"dp_shard is hsdp's: {self.data} takes the ranks that are there")
        if self.schedule and self.pp == 1:
            raise ValueError(f"schedule {self.schedule!r} is a pipeline's, and there is none")
        if self.schedule == "LoopedBFS":
            raise ValueError(
                "schedule 'LoopedBFS' computes the backwards from the last micro-batch to the "
                f"first, which no order of addition allows: choose one of {', '.join(SCHEDULES)}"
            )
        if self.schedule and self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule {self.schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}"
            )

    def __str__(self) -> str:
        """The inverse of `of`."""
        words: list[str] = []
        for axis in MODEL_AXES:
            size = getattr(self, axis)
            schedule = f"/{self.schedule}" if axis == "pp" and self.schedule else ""
            words += [f"{axis}:{size}{schedule}"] if size > 1 else []
        words += [self.strategy] if self.strategy else []
        if self.data != "ddp" or not words:  # it is what there is if no word says otherwise
            words.insert(0, self.data if self.dp_shard is None else f"hsdp:{self.dp_shard}")
        return ",".join(words)

    @property
    def missing(self) -> str:
        """Why it is not available yet, as the end of a sentence; empty if it is."""
        if any(getattr(self, axis) > 1 for axis in ("tp", "cp", "ep")) and not self.strategy:
            return f": choose one of {AVAILABLE}, or name a strategy of your own beside it"
        if self.pp == 1:
            return ""
        if self.data not in ("ddp", "fsdp-grad-op") or self.strategy:
            return f": pp:S goes alone or with fsdp-grad-op, such as pp:{self.pp},fsdp-grad-op"
        return ""

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of the parameters and of the optimizer's state."""
        return not self.cuts_tensors and self.pp == 1

    @property
    def cuts_tensors(self) -> bool:
        """Whether a rank holds rows of them; by stages it holds whole ones."""
        return self.data != "ddp"

    @property
    def has_rounds(self) -> bool:
        """Whether every pass exchanges parameters, so that all ranks of a replica take part."""
        return self.data in ("fsdp", "hsdp")

    @property
    def ranks_per_microbatch(self) -> int:
        """Ranks that compute a micro-batch together: one position on the data axes."""
        return self.pp * self.cp * self.tp

    @property
    def fewest_ranks(self) -> int:
        """That can compute a micro-batch: fewer ranks than stages make a pipeline of fewer."""
        return self.cp * self.tp


DDP = Parallel()
Cuts: TypeAlias = tuple[tuple[int, ...], ...]
"""Of each pipeline the borders of its stages: stage s has the blocks from number s to s + 1. Which
rank has which stages follows from the schedule."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of one generation. "ddp" has no shards, "fsdp" no replicas. Ranks behind the last
    whole replica are inactive: they compute and hold nothing.
    """

    parallel: Parallel
    world_size: int
    order: tuple[int, ...] = ()
    """Of each rank the position in the mesh, the last of AXES running fastest; empty: its rank."""
    cuts: Cuts = ()
    """Of a model in stages. Then positions are pipeline by pipeline, the stages in order, and "pp"
    is no axis: pipelines may be of several depths."""

    def size(self, axis: Axis) -> int:
        match axis:
            case "pp":
                return self.parallel.pp
            case "cp":
                return self.parallel.cp
            case "tp":
                return self.parallel.tp
            case "dp_shard":
                return self.num_shards
            case "dp_replicate":
                return self.num_replicas

    @property
    def num_shards(self) -> int:
        most = max(1, self.world_size // self.parallel.ranks_per_microbatch)
        if self.parallel.dp_shard is not None:
            return min(self.parallel.dp_shard, most)
        return most if self.parallel.cuts_tensors else 1

    @property
    def num_replicas(self) -> int:
        return self.world_size // (self.num_shards * self.parallel.ranks_per_microbatch)

    @property
    def dp_degree(self) -> int:
        """So many share the micro-batches of a step."""
        return self.num_replicas * self.num_shards

    @property
    def num_active(self) -> int:
        """Those that are active."""
        if self.cuts:
            return sum(self._num_ranks(cuts) for cuts in self.cuts)
        return self.dp_degree * self.parallel.ranks_per_microbatch

    def _num_ranks(self, cuts: tuple[int, ...]) -> int:
        return num_ranks_of(len(cuts) - 1, self.parallel.schedule)

    def blocks(self, rank: int) -> tuple[int, ...]:
        """Of a model in stages, those that `rank` holds; none if it is inactive."""
        at = self.position(rank)
        for cuts in self.cuts:
            count = self._num_ranks(cuts)
            if at < count:
                stages = stages_at(at, len(cuts) - 1, self.parallel.schedule)
                return tuple(b for s in stages for b in range(cuts[s], cuts[s + 1]))
            at -= count
        return ()

    def ranks_with_blocks(self, blocks: Sequence[int]) -> list[int]:
        """The ranks that hold one of these, by position."""
        ranks = self.ranks()[: self.num_active]
        return [r for r in ranks if any(block in self.blocks(r) for block in blocks)]

    def position(self, rank: int) -> int:
        return self.order[rank] if self.order else rank

    def is_inactive(self, rank: int) -> bool:
        return self.position(rank) >= self.num_active

    def coordinate(self, axis: Axis, rank: int) -> int:
        """Where on `axis`. Not for one that is inactive."""
        return self.position(rank) // self._stride(axis) % self.size(axis)

    def _stride(self, axis: Axis) -> int:
        """How far neighbours on `axis` are apart."""
        stride = 1
        for inner in AXES[AXES.index(axis) + 1 :]:
            stride *= self.size(inner)
        return stride

    def along(self, axis: Axis, rank: int) -> list[int]:
        """The ranks that differ from `rank` on `axis` only, in its order, of active ranks."""
        stride, at = self._stride(axis), self.position(rank)
        first = at - self.coordinate(axis, rank) * stride
        ranks = self.ranks()
        return [ranks[first + i * stride] for i in range(self.size(axis))]

    def shard(self, rank: int) -> int:
        """Where on the shard axis."""
        return self.coordinate("dp_shard", rank)

    def replica(self, rank: int) -> int:
        """Where on the replica axis; behind the last one if it is inactive."""
        if self.is_inactive(rank):
            return self.num_replicas
        return self.coordinate("dp_replicate", rank)

    def dp_rank(self, rank: int) -> int:
        """Where on the two data axes, replica by replica. Not for one that is inactive."""
        return self.replica(rank) * self.num_shards + self.shard(rank)

    def ranks(self) -> list[int]:
        """By position: those that are active come first, replica by replica."""
        return sorted(range(self.world_size), key=self.position)

    def replica_of(self, rank: int) -> list[int]:
        """The ranks of this rank's replica, by shard. Not for one that is inactive."""
        return self.along("dp_shard", rank)

    def ranks_with_shard(self, shard: int) -> list[int]:
        """The ranks that hold `shard`, by replica."""
        return self.along("dp_replicate", self.ranks()[shard * self._stride("dp_shard")])

    def is_covered_by(self, ranks: Set[int]) -> bool:
        """Whether these hold all of a state: one of each shard, whatever its replica."""
        if self.cuts and self.parallel.cuts_tensors:
            return {rank for rank in range(self.world_size) if self.blocks(rank)} <= ranks
        if self.cuts:
            return {b for rank in ranks for b in self.blocks(rank)} == set(range(self.cuts[0][-1]))
        axes: list[Axis] = [axis for axis in AXES if axis != "dp_replicate"]
        active = [rank for rank in ranks if not self.is_inactive(rank)]
        found = {tuple(self.coordinate(axis, rank) for axis in axes) for rank in active}
        return len(found) == math.prod(self.size(axis) for axis in axes)

    def ids_of_replica(self, num_microbatches: int, replica: int) -> range:
        return microbatch_ids(num_microbatches, self.num_replicas, replica)

    def ids(self, num_microbatches: int, rank: int) -> range:
        """The micro-batches that `rank` computes, ascending; the same on all who compute them
        together.

        Where every pass exchanges parameters, the ranks of a replica compute neighbours in the
        canonical tree in each round. Else a rank's ids are contiguous.
        """
        if self.is_inactive(rank):
            return range(0)
        if not self.parallel.has_rounds:
            return microbatch_ids(num_microbatches, self.dp_degree, self.dp_rank(rank))
        ids = self.ids_of_replica(num_microbatches, self.replica(rank))
        return ids[self.shard(rank) :: self.num_shards]

    def num_passes(self, num_microbatches: int, rank: int) -> int:
        """Forward and backward passes of `rank` in a step. Where every pass exchanges parameters,
        all of a replica make as many, and who has no id left serves the others."""
        if self.is_inactive(rank) or not self.parallel.has_rounds:
            return len(self.ids(num_microbatches, rank))
        ids = self.ids_of_replica(num_microbatches, self.replica(rank))
        return -(-len(ids) // self.num_shards)

    def load(self, num_microbatches: int, rank: int) -> float:
        """What `rank` computes in a step, in whole micro-batches."""
        return len(self.ids(num_microbatches, rank))


def microbatch_ids(num_microbatches: int, world_size: int, rank: int) -> range:
    """The contiguous ids that `rank` computes: V=8 over W=3 gives 3, 3, 2."""
    share, extra = divmod(num_microbatches, world_size)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))
