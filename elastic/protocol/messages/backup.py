"""Between trainers, the controller and a backup server, which keeps copies of ranks' shards."""

from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from elastic.protocol.layout import BlockSets, Box, TensorLayout
from elastic.protocol.mesh import Cuts
from elastic.protocol.messages.direction import Direction

CopyKey: TypeAlias = tuple[int, int, int]
"""Generation in which the copy was made, rank, step."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What a rank held of one tensor, in C order."""

    layout: TensorLayout
    box: Box
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory of a trainer that processes of its node may map."""

    path: str
    inode: int
    serial: int
    """It is mapped once."""
    size_bytes: int
    offsets: tuple[int, ...]
    """Where each tensor begins."""


@dataclass(frozen=True, slots=True)
class Push:
    """A copy. Its bytes follow unless they are shared, then `Sums` in any case."""

    key: CopyKey
    origin: int
    """The generation that computed the step."""
    world_size: int
    state: dict[str, Any]
    """The JSON part of the state."""
    slices: tuple[Slice, ...]
    settled: tuple[int, int] | None
    """Generation and step of which all copies are held: older ones may go."""
    shared: Shared | None = None
    cuts: Cuts = ()
    """As `Mesh.cuts`."""
    lacks: BlockSets = ()
    """As `Position.lacks`."""


@dataclass(frozen=True, slots=True)
class Sums:
    sums: tuple[int, ...]
    """CRC-32 of each slice."""


@dataclass(frozen=True, slots=True)
class Settle:
    """As `Push.settled`; not answered."""

    settled: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Have:
    """What is there?"""


@dataclass(frozen=True, slots=True)
class Describe:
    key: CopyKey


@dataclass(frozen=True, slots=True)
class Read:
    key: CopyKey
    boxes: tuple[tuple[str, Box], ...]
    """Of a tensor by its name; counted in the whole one."""


@dataclass(frozen=True, slots=True)
class Held:
    """The copy is taken in."""


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class Unshared:
    """The memory cannot be mapped here: the bytes are to be sent."""

    reason: str


@dataclass(frozen=True, slots=True)
class Pong:
    generation: int


@dataclass(frozen=True, slots=True)
class HeldCopy:
    key: CopyKey
    origin: int
    world_size: int
    size_bytes: int
    cuts: Cuts = ()
    lacks: BlockSets = ()


@dataclass(frozen=True, slots=True)
class Copies:
    copies: tuple[HeldCopy, ...]


@dataclass(frozen=True, slots=True)
class Described:
    state: dict[str, Any] | None
    """None: there is no such copy."""
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Their contents follow, one after the other."""

    sums: tuple[int, ...]
    """CRC-32 of each."""


ToBackup: TypeAlias = Push | Sums | Settle | Ping | Have | Describe | Read
Question: TypeAlias = Ping | Have | Describe
FromBackup: TypeAlias = Held | Refused | Unshared | Pong | Copies | Described | Boxes

_SLICE = (Slice, TensorLayout, Box)
TO_BACKUP: Direction[ToBackup] = Direction(*get_args(ToBackup), parts=(*_SLICE, Shared))
FROM_BACKUP: Direction[FromBackup] = Direction(*get_args(FromBackup), parts=(*_SLICE, HeldCopy))
