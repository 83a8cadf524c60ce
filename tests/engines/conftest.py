"""Every step of every engine in these tests keeps the invariants of `InputBatch`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from arborl.engines.local import LocalEngine


@pytest.fixture(scope="session")
def qwen3():
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def batch_is_checked(monkeypatch):
    step = LocalEngine._step

    def checked(self):
        step(self)
        check_rows(self.batch, np.fromiter(self.scheduler.running, np.int64), self.pool.block_size)

    monkeypatch.setattr(LocalEngine, "_step", checked)


def check_rows(batch, rows, block_size):
    """Raise AssertionError where these running rows violate an invariant."""
    prompt, known, length = batch.prompt[rows], batch.known[rows], batch.length[rows]
    assert ((prompt >= 1) & (prompt <= known) & (prompt < batch.limit[rows])).all(), "prompt"
    assert (known <= batch.limit[rows]).all(), "known"
    assert ((known <= length) & (length <= known + 1)).all(), "length"
    assert (batch.computed[rows] <= np.minimum(length, batch.num_blocks[rows] * block_size)).all(), "computed"
    for row in rows.tolist():
        blocks = batch.tables[row, : batch.num_blocks[row]].tolist()
        assert len(set(blocks)) == len(blocks), "blocks"
    assert not set(rows.tolist()) & set(batch.free), "a running row is free"
