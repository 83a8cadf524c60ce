"""Which generated problems are held out: one in ten, by a hash of the problem itself.

A held-out problem is then never trained on, whatever the seed that drew it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from arborl.types import Task

SPLITS = ("train", "held_out")


def split_of(problem: Any) -> str:
    """`train` or `held_out`; the same on every machine, for equal problems of plain values."""
    digest = hashlib.blake2b(repr(problem).encode(), digest_size=2).digest()
    return "held_out" if int.from_bytes(digest, "big") % 10 == 0 else "train"


def wanted_split(task: Task, env: str) -> str:
    """The split a task asks for; `train` where it says nothing."""
    return check_split(str(task.fields.get("split", "train")), env)


def check_split(split: str, env: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: {env} has 'train' and 'held_out'")
    return split
