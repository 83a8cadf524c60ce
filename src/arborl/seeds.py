"""One seed decides the run: run -> step -> task -> episode -> (environment, sampling).

A seed is a hash of its parent and a path of names. There is no shared random stream, so execution order, number of
workers and restarts do not change it.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, *path: str | int) -> int:
    """A 63-bit seed for this path, such as `derive(7, "step", 3, "task", 1)`; the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """A new NumPy generator for this path."""
    return np.random.Generator(np.random.Philox(derive(seed, *path)))
