"""The order in which a run's stream uses the rows of its dataset.

A function of (number of rows, seed) alone: no world size, no history, no files.
"""

from hashlib import blake2b
from math import isqrt

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))


class SampleOrder:
    """Stream position p is place p % num_rows of epoch p // num_rows; each epoch is a permutation.

    The permutation is the generalised Feistel network with cycle walking of Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002): a place is a pair of digits below
    about sqrt(num_rows), each round shifts one digit by a keyed hash of the other. Any place is
    found by itself, so memory is O(count), never O(num_rows).
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise ValueError(f"a sample order needs at least 1 row, got {num_rows}")
        self.num_rows = num_rows
        self.seed = seed
        self._num_left = isqrt(num_rows - 1) + 1
        self._num_right = -(-num_rows // self._num_left)

    def rows(self, first_position: int, count: int) -> NDArray[np.int64]:
        """The row ids of stream positions first_position, first_position + 1, ..."""
        epoch, place = divmod(first_position, self.num_rows)
        places = np.arange(place, place + count, dtype=np.uint64)
        epochs = (places // np.uint64(self.num_rows)).astype(np.int64)
        places %= np.uint64(self.num_rows)
        last = (first_position + max(count, 1) - 1) // self.num_rows
        keys = np.array([self._keys(e) for e in range(epoch, last + 1)], dtype=np.uint64).T
        if last > epoch:
            keys = keys[:, epochs]
        rows = self._permuted(places, keys)
        outside = np.flatnonzero(rows >= self.num_rows)
        while outside.size:  # cycle walking: a place outside is permuted again until it is inside
            rows[outside] = self._permuted(
                rows[outside], keys if last == epoch else keys[:, outside]
            )
            outside = outside[rows[outside] >= self.num_rows]
        return rows.astype(np.int64)

    def _keys(self, epoch: int) -> NDArray[np.uint64]:
        digest = blake2b(f"{self.seed}:{epoch}".encode(), digest_size=8 * ROUNDS, person=b"order")
        return np.frombuffer(digest.digest(), dtype="<u8")

    def _permuted(self, places: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        num_left, num_right = np.uint64(self._num_left), np.uint64(self._num_right)
        left, right = places // num_right, places % num_right
        for i in range(0, ROUNDS, 2):
            left = (left + _hashed(right, keys[i])) % num_left
            right = (right + _hashed(left, keys[i + 1])) % num_right
        return left * num_right + right


def _hashed(digits: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """40 well mixed bits of each digit under its key; additions to a digit cannot overflow."""
    mixed = (digits ^ key) * _MULTIPLIERS[0]
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MULTIPLIERS[1]
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIERS[0]
    return mixed >> np.uint64(24)
