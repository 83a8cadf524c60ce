"""How many tokens' keys and values an engine keeps where nobody has said. Needs no torch."""

from __future__ import annotations

SHARE = {"cpu": 0.1, "cuda": 0.3}
"""Part of the memory (of a GPU, of what is free) that pages take when no size is given."""
SEQUENCES = {"cpu": 128, "cuda": 1024}
"""Sequences of full length that pages hold at most when no size is given."""


def usual_tokens(kind: str, memory: int, token: int, context: int) -> int:
    """A share of the device's memory, and no more than some hundreds of sequences can use.

    Args:
        kind: of the device: `cpu`, `cuda`, …
        memory: bytes that it has, of a GPU those that are free.
        token: bytes of a token's keys and values.
        context: tokens of the longest sequence.
    """
    share = int(memory * SHARE.get(kind, 0.1)) // token
    return max(context, min(share, SEQUENCES.get(kind, 128) * context))
