"""Permutations that are a function of their key alone, for every version of numpy.

What is permuted (files' units, rows of a window) is plan.py's and reading.py's.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def permutation(count: int, *key: int | str) -> NDArray[np.int64]:
    """0 .. count - 1 in an order fixed by `key`.

    The raw words of a bit generator, sorted: numpy promises their values, and not those of
    Generator.permutation.
    """
    digest = blake2b(repr(key).encode(), digest_size=16, person=b"permutation").digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return np.argsort(words, kind="stable")
