"""Whether the ranks still hold the same bits of what several of them hold: replicas that diverge
silently (a flipped bit, a bad core) are found by a cheap hash.

What follows from it is the controller's: with a majority the others are replaced.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elastic.protocol.errors import PeerLost
from elastic.protocol.layout import TensorLayout
from elastic.protocol.mesh import Axis, Mesh
from elastic.protocol.messages import to_controller
from workers.distributed.exchange import gather_json
from workers.tensors.local import local
from workers.train_state import serialization

if TYPE_CHECKING:
    from workers.membership.member import Member
    from workers.train_state.train_state import TrainState

ROW_WORDS = 4096
MASK = 2**64 - 1


class Diverged(RuntimeError):
    """The replicas differ and no majority says which are right."""


def verify(member: "Member", every: int) -> None:
    """Compare the state of the last committed step, if it is a multiple of `every`; before the
    next one is voted on, so that nothing computed from a diverged state is applied.

    A collective. Raises PeerLost if a majority agrees, after the controller was told who differs
    (by every rank that gets so far: the first report ends the generation); Diverged, on every
    rank, if none does.
    """
    train_state, group = member.train_state, member.group
    assert group is not None
    if group.size() == 1 or train_state.step == 0 or train_state.step % every:
        return
    found = fingerprints(train_state, member.layout, group.read)
    parts = sorted(found)
    hashes = [found[part] for part in parts]
    mine = torch.tensor([combined(part) for part in hashes])
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    group.control.all_gather(everyones, mine).wait()
    numbers = [one.tolist() for one in everyones]
    differing = [
        (part, ranks)
        for part, (axes, blocks) in enumerate(parts)
        for ranks in groups_alike(member.mesh, axes, blocks)
        if len({numbers[rank][part] for rank in ranks}) > 1
    ]
    if not differing:
        return
    part, ranks = differing[0]
    gathered = gather_json(group, [member.spec.worker, hashes])
    odd, tensor, count = compare([gathered[r][1][part] for r in ranks])
    others = f"{count} tensors" if count > 1 else "one tensor"
    what = f"after step {train_state.step} in {tensor!r} ({others} in all)"
    if not odd:
        named = " and ".join(map(str, ranks))
        raise Diverged(
            f"the replicas of ranks {named} differ {what}, and no majority says who is right; "
            "resume from the newest checkpoint, and suspect the hardware of these nodes"
        )
    theirs = " ".join(str(ranks[index]) for index in odd)
    why = f"its replica, rank {theirs}, differs from the majority's {what}"
    workers = tuple(gathered[ranks[index]][0] for index in odd)
    member.link.send(to_controller.Diverged(member.generation, workers, why))
    raise PeerLost(why)


def groups_alike(
    mesh: Mesh, axes: tuple[Axis, ...], blocks: tuple[int, ...] = ()
) -> list[list[int]]:
    """Ranks that must agree on what `axes` cut: who is in the same place on these; who holds one of
    `blocks`, on what these need, and if `axes` cut it, too, nobody; all, also the inactive,
    on what nothing cuts."""
    if blocks:
        return [] if axes else [mesh.ranks_with_blocks(blocks)]
    if not axes:
        return [list(range(mesh.world_size))]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in mesh.ranks()[: mesh.num_active]:
        found.setdefault(tuple(mesh.coordinate(axis, rank) for axis in axes), []).append(rank)
    return list(found.values())


def compare(found: Sequence[Mapping[str, int]]) -> tuple[list[int], str, int]:
    """(ranks that differ from a majority, empty if there is none; the first tensor that differs
    anywhere, in order of names; how many do)."""
    names = sorted({name for hashes in found for name in hashes})
    differing = [n for n in names if len({hashes.get(n) for hashes in found}) > 1]
    wholes = [tuple(sorted(hashes.items())) for hashes in found]
    common, count = Counter(wholes).most_common(1)[0]
    odd = [rank for rank, whole in enumerate(wholes) if whole != common]
    return odd if 2 * count > len(found) else [], differing[0], len(differing)


def fingerprints(
    train_state: "TrainState",
    layout_of: Callable[[str, Tensor], TensorLayout],
    read: Callable[[Tensor], Tensor] = Tensor.cpu,
) -> dict[tuple[tuple[Axis, ...], tuple[int, ...]], dict[str, int]]:
    """By the axes that cut them, or the blocks that need them: of parameters and optimizer state,
    by their names in a snapshot, what this rank has. Not of buffers, which a step in progress has
    changed. read: to the host; once for each device."""
    trained = serialization.trained_tensors(train_state.model, train_state.optimizer)
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in trained.items():
        sums.setdefault(local(tensor).device, {})[name] = fingerprint(local(tensor))
    numbers: dict[str, int] = {}
    for of_device in sums.values():
        found = read(torch.stack(list(of_device.values())))
        numbers |= zip(of_device, found.tolist(), strict=True)
    parts: dict[tuple[tuple[Axis, ...], tuple[int, ...]], dict[str, int]] = {}
    for name, tensor in trained.items():
        layout = layout_of(name, tensor)
        parts.setdefault((layout.axes, layout.blocks), {})[name] = numbers[name] & MASK
    return parts


def combined(hashes: Mapping[str, int]) -> int:
    """One signed 64-bit number for all."""
    total = 0
    for i, name in enumerate(sorted(hashes)):
        total = (total + (2 * i + 1) * hashes[name]) & MASK
    return total - 2**64 if total >= 2**63 else total


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit number that any single changed word changes: sums of 64-bit words by rows, the
    rows weighted by odd numbers. It stays on the device, and reads the tensor once and no more."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = plain.view(torch.uint8)
    num_words = flat.numel() // 8
    tail = flat[8 * num_words :].long()
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[: 8 * num_words].view(torch.int64)
    num_rows = num_words // ROW_WORDS
    rows = words[: num_rows * ROW_WORDS].view(num_rows, ROW_WORDS).sum(1)
    rest = words[num_rows * ROW_WORDS :].sum().reshape(1)
    sums = torch.cat([rows, rest])
    weights = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    shifts = 8 * torch.arange(len(tail), device=tail.device)
    return (sums * weights).sum() + (tail << shifts).sum()
