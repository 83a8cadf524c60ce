"""One seed decides the run: run -> step -> task -> episode -> (environment, sampling).

A seed is derived from its parent and a path of names, by hashing; nothing draws from a shared stream, so no order of
execution, number of workers or restart can change it.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, *path: str | int) -> int:
    """A seed for this place in the tree, 63 bits.

    Example:
        derive(7, "step", 3, "task", 1)      # the same on every machine, in every process
    """
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """A fresh NumPy generator for this place in the tree."""
    return np.random.Generator(np.random.Philox(derive(seed, *path)))
