"""Denormal numbers (below 1e-38) are flushed to zero in the learner's thread only."""

from __future__ import annotations

import asyncio

import torch

from arborl.models.c_library import run_parallel
from arborl.trainer.trainer import LearnerThread

MANY = torch.full((1_000_000,), 1e-39)
"""Enough that torch computes with several threads where it has them."""


def num_kept() -> int:
    """Numbers that a product by one keeps, read as bits: a comparison would flush them too."""
    return int((MANY * 1.0).view(torch.int32).count_nonzero())


def test_the_learner_thread_flushes_denormals_and_other_threads_do_not():
    async def both() -> tuple[int, int]:
        thread = LearnerThread()
        try:
            return await thread.run(num_kept), await thread.run_beside_engine(num_kept)
        finally:
            thread.close()

    before = num_kept()
    assert asyncio.run(both()) == (0, 0)
    assert before == num_kept() == len(MANY)


def test_threads_of_compiled_code_flush_denormals():
    found = {}
    run_parallel(lambda part: found.update({part: num_kept()}), 3)
    assert found == {0: len(MANY), 1: 0, 2: 0}  # the first is the caller's own thread
