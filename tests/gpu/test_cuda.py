"""The same laws on a GPU."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import arborl
from arborl.config.run_config import LearnerConfig
from arborl.engines.local import LocalEngine
from arborl.learner.core.learner import Learner
from arborl.models.model_loading import load_model, resolve
from arborl.rollout.token_trees import build_token_trees
from arborl.track.jsonl import read_metrics
from arborl.types import Call, Episode, Group, Sampling, Task

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def sample(model, prompts: list[list[int]], temperature: float):
    engine = LocalEngine(model, max_context=256, max_requests=16, kv_tokens=4096)

    async def run():
        return await asyncio.gather(
            *(engine.generate(p, Sampling(20, temperature, seed=i), session=str(i)) for i, p in enumerate(prompts))
        )

    return asyncio.run(run())


def random_prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 600, size).tolist() for size in (5, 33, 80, 80, 12, 1)]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_the_rollouts_logprobs_equal_the_learners(dtype, bound):
    model = load_model(resolve("seedling"), dtype, "cuda")
    prompts = random_prompts()
    calls = [Call(tuple(p), c, 0) for p, c in zip(prompts, sample(model, prompts, 1.0), strict=True)]
    forest = build_token_trees([Group(Task("t"), [Episode("e", Task("t"), calls=calls)])])
    scored = Learner(model, LearnerConfig(), Sampling()).logprobs(forest.trees, forest.terms)
    gap = (scored - torch.from_numpy(forest.terms.logprob)).abs()
    assert float(gap.exp().mean()) - 1 < bound


def test_greedy_tokens_equal_those_of_transformers():
    model = load_model(resolve("seedling"), "float32", "cuda")
    prompts = random_prompts()
    ours = [list(c.tokens) for c in sample(model, prompts, 0.0)]
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None  # go on past the end of turn, as ours does without a stop token
    for prompt, mine in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        mask = torch.ones_like(ids)
        theirs = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert mine == theirs[0, len(prompt) :].tolist()


def test_a_short_run_trains_on_the_gpu(tmp_path):
    done = arborl.run(
        output_dir=tmp_path / "run", steps=4, **{"model.device": "cuda", "evaluation.tasks": 20, "track.gifs": 0}
    )
    _, *rows = read_metrics(done.folder / "metrics.jsonl")
    assert len(rows) == 4
    assert all(row["policy/logprob_diff"] < 0.05 for row in rows)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] - 0.2
