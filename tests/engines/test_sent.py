"""What a step is sent lies where kernels compiled once can read it, whatever the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arborl.engines.local.step_buffers import BUCKETS, StepInputs, copy_to_device, reachable_buckets


@pytest.mark.parametrize("requests", [1, 5, 13, 256, 2000])
@pytest.mark.parametrize(("members", "pages"), [(1, 1), (8, 3), (16, 17)])
def test_every_part_begins_at_16_bytes_in_every_bucket_and_no_two_overlap(requests, members, pages):
    largest = max(*BUCKETS, requests)
    flat = np.zeros(StepInputs.size(largest, min(largest, requests), members, pages), dtype=np.int32)
    for rows in sorted({*BUCKETS, requests, 7}):
        given = (rows, min(rows, requests), members, pages)
        assert StepInputs.size(*given) <= len(flat)
        flat[:] = 0
        for part in StepInputs.of(flat, *given):
            assert (part.__array_interface__["data"][0] - flat.__array_interface__["data"][0]) % 16 == 0
            part += 1
        assert flat.max() == 1
        assert flat.sum() == sum(part.size for part in StepInputs.of(flat, *given))


def test_vectors_of_any_length_arrive_whole_and_begin_at_16_bytes():
    columns = [np.arange(size) for size in (1, 3, 4, 5, 0, 17)]
    found = copy_to_device(columns, torch.device("cpu"))
    for column, there in zip(columns, found, strict=True):
        assert there.tolist() == column.tolist()
        assert there.dtype == torch.int32
        assert (there.data_ptr() - found[0].data_ptr()) % 16 == 0


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (9, [1, 2, 4, 8]), (99, [1, 2, 4, 8])]
)
def test_only_buckets_that_some_step_can_take_are_prepared(tokens, expected):
    assert reachable_buckets([1, 2, 4, 8], tokens) == expected
