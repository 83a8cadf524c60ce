"""Numbers below 1e-38: zero where updates are computed, whole everywhere else."""

from __future__ import annotations

import asyncio

import torch

from arborl.models.c_library import run_parallel
from arborl.trainer.thread import LearnerThread

MANY = torch.full((1_000_000,), 1e-39)
"""Enough that torch computes with several threads where it has them."""


def kept() -> int:
    """How many of them a product by one leaves, read as bits: a comparison would take them for zero, too."""
    return int((MANY * 1.0).view(torch.int32).count_nonzero())


def test_an_update_does_not_wade_through_numbers_next_to_nothing_and_other_threads_still_have_them():
    async def both() -> tuple[int, int]:
        thread = LearnerThread()
        try:
            return await thread(kept), await thread.beside(kept)
        finally:
            thread.close()

    before = kept()
    assert asyncio.run(both()) == (0, 0)
    assert before == kept() == len(MANY)


def test_what_we_compiled_runs_beside_in_threads_that_take_them_for_zero():
    found = {}
    run_parallel(lambda part: found.update({part: kept()}), 3)
    assert found == {0: len(MANY), 1: 0, 2: 0}  # the first is the caller's own thread
