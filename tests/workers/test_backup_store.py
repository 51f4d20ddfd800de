"""What a holder keeps: whole copies only, the right generations, and boxes by their place."""

import pytest

from elastic.protocol.backup_assignment import BackupAddress, holders_for
from elastic.protocol.layout import Box, TensorLayout, whole
from elastic.protocol.messages.backup import Slice
from workers.backup.store import BackupStore, Copy, DamagedCopy, Key, Stale, crc32


def copy(generation, rank, step, content=b"aabbccdd!"):
    """Rows 2..5 of a tensor of two bytes a row, and a replicated tensor of one byte."""
    slices = (
        Slice(TensorLayout("w", "uint8", (8, 2), (("dp_shard", 0),)), Box((2, 0), (4, 2)), 8),
        Slice(TensorLayout("n", "uint8", ()), whole(()), 1),
    )
    sums = (crc32(memoryview(b"aabbccdd")), crc32(memoryview(b"!")))
    key = Key(generation, rank, step)
    return Copy(key, generation, 2, {}, slices, bytearray(content), sums)


def keys(store):
    return [tuple(c.key) for c in store.copies()]


def test_a_copy_serves_boxes_by_their_place_in_the_whole():
    held = copy(1, 0, 5, b"aAbBcCdD!")
    found = [bytes(s) for s in held.stretches("w", Box((3, 0), (2, 2)))]
    assert found == [b"bBcC"], "rows lie one behind the other"
    assert [bytes(s) for s in held.stretches("w", Box((3, 1), (2, 1)))] == [b"B", b"C"]
    assert [bytes(s) for s in held.stretches("n", whole(()))] == [b"!"]
    for first, num in ((1, 1), (5, 2)):
        with pytest.raises(LookupError):
            held.stretches("w", Box((first, 0), (num, 2)))


def test_a_copy_that_is_not_what_was_sent_is_damaged():
    with pytest.raises(DamagedCopy, match="rank 0, step 5: w"):
        copy(1, 0, 5, b"aabbcXdd!").check()
    with pytest.raises(DamagedCopy, match="8 bytes for slices of 9"):
        copy(1, 0, 5, b"aabbccdd")


def test_a_copy_is_checked_where_it_is_asked_for():
    held = copy(1, 0, 5)
    held.content[8] ^= 1
    held.check({"w"})
    with pytest.raises(DamagedCopy, match="rank 0, step 5: n"):
        held.check({"n"})


def test_a_damaged_copy_is_gone_and_its_memory_is_not_used_again():
    store = BackupStore()
    store.put(copy(1, 0, 5))
    store.remove(Key(1, 0, 5))
    assert keys(store) == []
    with pytest.raises(LookupError):
        store.copy(Key(1, 0, 5))


def test_two_generations_of_a_rank_are_kept_until_all_hold_the_newer_one():
    store = BackupStore()
    for step in (1, 2, 3):
        store.put(copy(1, 0, step))
    store.put(copy(1, 1, 2))
    assert sorted(keys(store)) == [(1, 0, 2), (1, 0, 3), (1, 1, 2)]
    store.settle(1, 3)
    assert keys(store) == [(1, 0, 3)]


def test_an_older_membership_s_copies_stay_until_the_new_one_s_are_whole():
    store = BackupStore()
    store.put(copy(1, 0, 7))
    store.put(copy(2, 0, 7))
    with pytest.raises(Stale, match="generation 1, 2 has begun"):
        store.put(copy(1, 1, 8))
    assert keys(store) == [(1, 0, 7), (2, 0, 7)]
    store.settle(2, 7)
    assert keys(store) == [(2, 0, 7)]


def test_memory_is_used_again():
    store = BackupStore()
    first = copy(1, 0, 1)
    store.put(first)
    store.put(copy(1, 0, 2))
    store.settle(1, 2)
    assert store.room(9) is first.content
    assert store.room(9) is not first.content


def test_a_worker_s_copy_goes_to_the_next_node_and_to_its_own_only_if_there_is_no_other():
    a, b, c = (BackupAddress(name, "h", 1) for name in "abc")
    assert holders_for("a", [c, b, a]) == (b, c, a)
    assert holders_for("b", [c, b, a]) == (c, a, b)
    assert holders_for("c", [c, b, a]) == (a, b, c)
    assert holders_for("x", [c]) == (c,)
    assert holders_for("a", [a]) == (a,)
    assert holders_for("a", []) == ()
