"""Each fused kernel gives what torch gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def randn(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def pool(rows: int, longest: int, key_heads: int, page: int, size: int, dtype):
    """A cache with scattered pages and the table of who has which."""
    pages = -(-longest // page)
    order = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    return (
        randn(rows * pages, key_heads, page, size, dtype=dtype),
        randn(rows * pages, key_heads, page, size, dtype=dtype),
        order,
    )


def sharing(table: torch.Tensor, length: torch.Tensor, members: int, page: int):
    """Which rows share their first blocks, as an argument of the kernel."""
    from arborl.engines.local import engine_kernels
    from arborl.engines.local.shared_prefix import group_by_prefix, max_groups

    found = group_by_prefix(table.cpu().numpy(), ((length - 1) // page).cpu().numpy(), members)
    none = max_groups(len(table)) - len(found.blocks_M)
    pages, rows = np.pad(found.blocks_M, (0, none)), np.pad(found.rows_MB, ((0, none), (0, 0)))
    return engine_kernels.SharedPrefix(*(torch.from_numpy(x).cuda() for x in (pages, rows, found.shared_R)))


def sequence(cached: torch.Tensor, table: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """One row's keys as [K, L, D]."""
    return cached[table[row].long()].transpose(0, 1).flatten(1, 2)[:, :length]


SHAPES = [
    (14, 2, 64, torch.bfloat16), (8, 8, 128, torch.bfloat16), (16, 1, 256, torch.bfloat16), (14, 2, 64, torch.float32),
    (4, 2, 40, torch.float32),
]  # fmt: skip
"""Query heads, key heads, head size and precision: each is compiled by itself, which is what takes time here."""


@pytest.mark.parametrize(("heads", "key_heads", "size", "dtype"), SHAPES)
@pytest.mark.parametrize(("rows", "shared"), [(1, False), (7, True), (200, False), (200, True)])
def test_decode_attention(rows, shared, heads, key_heads, size, dtype):
    from arborl.engines.local import engine_kernels

    torch.manual_seed(0)
    keys, values, table = pool(rows, 300, key_heads, 16, size, dtype)
    if shared:  # rows in groups of eleven begin alike, some of them further than others
        host = table.cpu()
        for row in range(rows):
            host[row, : 5 + row % 3] = host[row - row % 11, : 5 + row % 3]
        table = host.cuda()
    length = torch.randint(1, 300, (rows,), device="cuda", dtype=torch.int32)
    q = randn(rows, heads, size, dtype=dtype)
    among = sharing(table, length, engine_kernels.max_group_rows(heads, key_heads), 16)
    assert bool(among.blocks_M.any()) == (shared and rows > 1 and heads // key_heads < 64)
    each = torch.arange(rows, device="cuda", dtype=torch.int32)
    out = engine_kernels.decode_attention(q, keys, values, table, each, length - 1, among, size**-0.5)
    for row in range(0, rows, max(1, rows // 7)):
        k, v = (sequence(x, table, row, int(length[row])).float() for x in (keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[row].float()[None, :, None], k[None], v[None], enable_gqa=True
        )[0, :, 0]
        torch.testing.assert_close(out[row].float(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize(("heads", "key_heads", "size", "dtype"), [SHAPES[1], SHAPES[3]])
def test_attention_of_a_step_in_which_some_sequences_bring_one_token_and_others_many(heads, key_heads, size, dtype):
    from arborl.engines.local import engine_kernels
    from arborl.engines.local.shared_prefix import PrefixGrouping, max_groups

    torch.manual_seed(0)
    start, counts = np.array([40, 250, 0, 100, 33, 0]), np.array([1, 1, 7, 150, 20, 64])
    keys, values, table = pool(6, 300, key_heads, 16, size, dtype)
    found = PrefixGrouping(engine_kernels.max_group_rows(heads, key_heads)).of_step(
        table.cpu().numpy(), start, counts, 16
    )
    none = max_groups(int(counts.sum())) - len(found.blocks_M)
    padded = np.pad(found.blocks_M, (0, none)), np.pad(found.rows_MB, ((0, none), (0, 0))), found.shared_R
    sequence_of = np.repeat(np.arange(6), counts)
    position = np.concatenate([np.arange(a, a + n) for a, n in zip(start, counts, strict=True)])
    given = [torch.from_numpy(x.astype(np.int32)).cuda() for x in (sequence_of, position)]
    q = randn(len(position), heads, size, dtype=dtype)
    among = engine_kernels.SharedPrefix(*(torch.from_numpy(x).cuda() for x in padded))
    out = engine_kernels.decode_attention(q, keys, values, table, *given, among, size**-0.5)
    for row in range(0, len(position), 3):
        k, v = (sequence(x, table, int(sequence_of[row]), int(position[row]) + 1).float() for x in (keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[row].float()[None, :, None], k[None], v[None], enable_gqa=True
        )[0, :, 0]
        torch.testing.assert_close(out[row].float(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize(("heads", "key_heads", "size", "dtype"), [SHAPES[1], SHAPES[3], SHAPES[4]])
def test_reading_attention_over_rows_of_any_length_with_and_without_a_past(heads, key_heads, size, dtype):
    from arborl.engines.local import engine_kernels

    torch.manual_seed(0)
    start, end = np.array([0, 5, 100, 33, 0]), np.array([1, 6, 300, 60, 150])
    counts = end - start
    keys, values, table = pool(5, 300, key_heads, 16, size, dtype)
    q = randn(int(counts.sum()), heads, size, dtype=dtype)
    tiles = [(r, t) for r in range(5) for t in range(0, int(counts[r]), engine_kernels.TILE_QUERIES)]
    first = np.cumsum(counts) - counts
    given = [
        torch.tensor(np.asarray(x), dtype=torch.int32, device="cuda")
        for x in ([r for r, _ in tiles], [t for _, t in tiles], first, start, end)
    ]
    out = engine_kernels.prefill_attention(q, keys, values, table, (given[0], given[1]), *given[2:], size**-0.5)
    for row in range(5):
        k, v = (sequence(x, table, row, int(end[row])).float() for x in (keys, values))
        own = slice(int(first[row]), int(first[row] + counts[row]))
        sees = torch.arange(end[row])[None] <= torch.arange(start[row], end[row])[:, None]
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[own].float().transpose(0, 1)[None], k[None], v[None], attn_mask=sees.cuda(), enable_gqa=True
        )[0].transpose(0, 1)
        torch.testing.assert_close(out[own].float(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize(("vocabulary", "temperature"), [(50, 1.0), (1024, 0.0), (1024, 0.7), (151936, 1.0)])
def test_the_sampler_draws_the_same_tokens_as_on_a_cpu(vocabulary, temperature):
    from arborl.engines.local import engine_kernels
    from arborl.engines.local.sampler import SamplingBatch, sample_tokens
    from arborl.types import Sampling

    torch.manual_seed(0)
    rows = 64
    logits = randn(rows, vocabulary) * 3
    draws = SamplingBatch.of([Sampling(temperature=temperature, seed=i) for i in range(rows)], [5] * rows)
    expected, logprob, _ = sample_tokens(logits.cpu(), draws)
    heat = torch.full((rows,), temperature or 1.0, device="cuda")
    greedy = torch.full((rows,), int(temperature == 0), dtype=torch.int32, device="cuda")
    token_B = torch.zeros(rows, dtype=torch.int64, device="cuda")
    logprob_B = torch.zeros(rows, device="cuda")
    engine_kernels.sample_logits(logits, heat, greedy, torch.from_numpy(draws.uniform_B).cuda(), token_B, logprob_B)
    same = token_B.cpu() == expected
    assert same.float().mean() >= 0.95  # a number next to a border may fall on its other side by rounding
    torch.testing.assert_close(logprob_B.cpu()[same], logprob[same], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gates(dtype):

    from arborl.engines.local import engine_kernels

    torch.manual_seed(0)
    x, y, w = randn(33, 896, dtype=dtype), randn(33, 896, dtype=dtype), randn(896, dtype=dtype)
    close = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype]}
    rms = torch.nn.functional.rms_norm
    torch.testing.assert_close(engine_kernels.norm(x, w, 1e-6), rms(x, (896,), w, 1e-6), **close)
    total = x + y
    both, normed = engine_kernels.add_norm(x.clone(), y, w, 1e-6)
    torch.testing.assert_close(both, total)
    torch.testing.assert_close(normed, rms(total, (896,), w, 1e-6), **close)
    wide = randn(9, 2 * 4864, dtype=dtype)
    a, b = wide.chunk(2, dim=-1)
    torch.testing.assert_close(engine_kernels.gate(wide), torch.nn.functional.silu(a) * b, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_product_in_parts_is_the_product(dtype, parts):
    from arborl.engines.local import engine_kernels

    torch.manual_seed(0)
    x, h, weight, scale = randn(7, 96), randn(7, 64), randn(96, 64), randn(96)
    x, h, weight, scale = (one.to(dtype) for one in (x, h, weight, scale))
    exact = x.double() + h.double() @ weight.double().T
    total, normed = engine_kernels.add_norm(
        x.clone(), engine_kernels.product_in_parts(h, weight, parts), scale, 1e-6
    )  # fmt: skip
    assert (total - exact).norm() <= DTYPES[dtype] * exact.norm()
    expected = torch.nn.functional.rms_norm(exact, (96,), scale.double(), 1e-6)
    assert (normed - expected).norm() <= DTYPES[dtype] * expected.norm()


def test_rows_that_are_parts_of_wider_ones_give_the_same():
    """As the products of layers under adapters leave them."""
    from arborl.engines.local import engine_kernels

    def wider(x: torch.Tensor) -> torch.Tensor:
        whole = torch.full((len(x), x.shape[1] + 16), float("nan"), device="cuda", dtype=x.dtype)
        whole[:, : x.shape[1]] = x
        return whole[:, : x.shape[1]]

    torch.manual_seed(0)
    x, y, w = (randn(*shape, dtype=torch.bfloat16) for shape in ((33, 896), (33, 896), (896,)))
    for a, b in zip(
        engine_kernels.add_norm(x.clone(), y, w, 1e-6),
        engine_kernels.add_norm(x.clone(), wider(y), w, 1e-6),
        strict=True,
    ):
        assert torch.equal(a, b)
    both = randn(9, 2 * 4864, dtype=torch.bfloat16)
    assert torch.equal(engine_kernels.gate(both), engine_kernels.gate(wider(both)))
    qkv, cos, sin = (randn(*shape, dtype=torch.bfloat16) for shape in ((5, 18 * 64), (99, 64), (99, 64)))
    place = torch.arange(5, device="cuda", dtype=torch.int32)
    found = []
    for rows in (qkv, wider(qkv)):
        keys, values = torch.zeros(2, 1, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
        found.append((engine_kernels.rotate_store(rows, cos, sin, place, place, keys, values, 14, None), keys, values))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
