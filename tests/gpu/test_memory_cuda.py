"""The forecast of a GPU's memory beside what an update takes of it."""

from __future__ import annotations

import gc

import pytest
import torch
from test_learner_cuda import Simple, forest_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.learner.core.learner import Learner
from arborl.learner.core.memory_forecast import GIB, MemoryPlanner
from arborl.learner.core.memory_plan import model_sizes
from arborl.learner.core.tree_forward import max_logit_rows
from arborl.models.attention import ATTENTION_NAME
from arborl.models.lora import add_lora
from arborl.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("recompute", "rank", "offload"),
    [(False, 0, "none"), (True, 0, "none"), (False, 16, "none"), (True, 16, "none"), (True, 0, "optimizer"),
     (True, 0, "all")],
)  # fmt: skip
def test_an_update_takes_about_what_is_forecast_and_not_more(recompute, rank, offload):
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    if rank:
        add_lora(model, LoraConfig(rank=rank))
    learner_config = LearnerConfig(micro_batch_tokens=8_192, recompute=recompute, offload=offload)
    learner = Learner(model, learner_config, Sampling(), AlgorithmNeeds(reference=True))
    forest = forest_of(0, groups=10, prompt=2_000, answer=400)
    assert sum(map(len, forest.trees)) > 16_384  # the largest micro-batch is nearly full
    algorithm = Simple(AlgorithmNeeds(reference=True))
    for _ in range(2):
        terms = learner.score_terms(forest.trees, forest.terms, algorithm.needs)
        torch.cuda.reset_peak_memory_stats()
        learner.update(forest.trees, terms, algorithm)
    peak = torch.cuda.max_memory_allocated() - before
    sizes = model_sizes(model)
    rows = max_logit_rows(model.device, sizes.vocabulary, fused=True)
    planner = MemoryPlanner(sizes, learner_config, algorithm.needs, 2_500, 2**60, 0, 0, 0, 0, rows)
    forecast = planner.forecast(8_192, recompute, 0)
    expected = forecast.total - forecast.beside
    print(f"peak {peak / GIB:.2f} GiB, forecast {expected / GIB:.2f}: {forecast}")  # noqa: T201
    assert 0.5 * expected < peak < 1.15 * expected + 0.25 * GIB
