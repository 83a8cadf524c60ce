"""The forecast of a run's memory: what is counted agrees with it, and plans are within their limits."""

from __future__ import annotations

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch
from learner_fakes import SAMPLING, Fake, batch_of, random_groups
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.config.load_config import load
from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.learner.attention.path_selection import ExecutionPath, hidden_states, sample_micro_batch
from arborl.learner.core.learner import Learner
from arborl.learner.core.memory_forecast import (
    GIB,
    MICRO_BATCH_SIZES,
    MemoryPlanner,
    ModelSizes,
    learner_sizes,
    logit_rows,
)
from arborl.learner.core.memory_plan import describe_plan, model_sizes, plan_memory, plan_warning
from arborl.learner.core.tree_forward import MicroBatcher
from arborl.models.attention import ATTENTION_NAME
from arborl.models.lora import add_lora
from arborl.models.model_loading import load_model, resolve

KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}
FOUR = ModelSizes(
    weights=8_045_000_000, parameters=4_022_468_096, trained=4_022_468_096, coarse=4_022_468_096, largest=388_956_160,
    item=2, layers=36, hidden=2560, queries=4096, keys=1024, inner=9728, vocabulary=151_936, head_norms=True,
)  # fmt: skip
"""Qwen3-4B in bfloat16."""


def model_of(kind: str, rank: int = 0, **more):
    model, config, own = KINDS[kind]
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = model(config(**sizes | heads | own | more)).eval()
    made.set_attn_implementation(ATTENTION_NAME)
    if rank:
        add_lora(made, LoraConfig(rank=rank))
    return made


def kept_bytes(model, way: ExecutionPath) -> tuple[int, int]:
    """Tokens, and bytes that a forward pass keeps for the backward pass, weights aside; counted by storage."""
    batch = sample_micro_batch(model, chain=True, size=192)
    hidden_states(model, batch, way)  # joins weights, which must not be counted
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_states(model, batch, way)
    return len(batch.tokens), sum(size for place, size in seen.items() if place not in weights)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_layers_keep_is_what_is_counted(kind, rank):
    model = model_of(kind, rank)
    tokens, counted = kept_bytes(model, ExecutionPath("causal"))
    sizes = model_sizes(model)
    assert counted == pytest.approx(
        tokens * sizes.layers * sizes.layer(uses_fused_layers=False, fused_norms=False), rel=0.08
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_with_recompute_only_what_goes_into_each_layer_is_kept(kind):
    model = model_of(kind)
    tokens, counted = kept_bytes(model, ExecutionPath("causal", recompute=True))
    sizes = model_sizes(model)
    edges = tokens * sizes.item * sizes.hidden * (sizes.layers + 2)
    assert counted == pytest.approx(edges, rel=0.15)


@pytest.mark.parametrize(
    ("dtype", "rank", "more"),
    [("float32", 0, {}), ("bfloat16", 0, {}), ("bfloat16", 4, {}), ("bfloat16", 0, {"master": "none"})],
)
def test_what_the_optimizer_holds_is_what_is_counted(dtype, rank, more):
    model = model_of("llama").to(getattr(torch, dtype))
    if rank:
        add_lora(model, LoraConfig(rank=rank))
    sizes, config = model_sizes(model), LearnerConfig(lr=1e-3, **more)
    learner = Learner(model, config, SAMPLING)
    master = config.master == "float32"
    assert sum(g.nbytes for g in learner.optimizer.gradients()) == sizes.gradients(master)
    learner.optimizer.step(1.0)
    state = learner.optimizer.state_dict()
    moments = [v for one in state["adam"]["state"].values() for name, v in one.items() if name != "step"]
    held = sum(t.nbytes for t in [*moments, *state["masters"]["policy"]])
    assert held == sizes.optimizer(master)
    assert sizes.weights == sum(p.nbytes for p in model.parameters())


def test_the_sizes_of_a_model_are_those_of_its_configuration():
    sizes = model_sizes(model_of("qwen3"))
    assert (sizes.layers, sizes.hidden, sizes.queries, sizes.keys, sizes.inner) == (12, 64, 64, 32, 160)
    assert sizes.head_norms
    assert sizes.lean
    assert not model_sizes(model_of("qwen2")).head_norms


def planner(limit: float, sizes: ModelSizes = FOUR, reference: bool = False, **more) -> MemoryPlanner:
    """For one GPU, with a context of 1,024 tokens; `more` are the learner's settings."""
    token = 2 * sizes.layers * sizes.keys * 2
    kv = {"kv_token": token, "kv_wanted": 262_144, "kv_least": 65_536, "kv_floor": 1_024}
    config, needs = LearnerConfig(**more), AlgorithmNeeds(reference=reference)
    return MemoryPlanner(sizes, config, needs, context=1_024, limit=int(limit * GIB), logit_rows=14_000, **kv)


def test_with_enough_memory_nothing_is_recomputed_and_the_kv_cache_has_its_full_size():
    plan = planner(190).plan()
    assert (plan.tokens, plan.recompute, plan.kv_tokens) == (16_384, False, 262_144)
    assert plan.fits


@pytest.mark.parametrize(
    ("limit", "kv_wanted", "tokens"),
    [(118, 262_144, 65_536), (80, 262_144, 32_768), (50, 262_144, 16_384), (118, 4_000_000, 32_768), (40, 0, 16_384)],
)
def test_a_small_model_has_large_micro_batches_if_the_kv_cache_keeps_its_full_size(limit, kv_wanted, tokens):
    sizes = ModelSizes(
        weights=988_000_000, parameters=494_000_000, trained=494_000_000, coarse=494_000_000, largest=136_134_656,
        item=2, layers=24, hidden=896, queries=896, keys=128, inner=4864, vocabulary=151_936,
    )  # fmt: skip
    plan = dataclasses.replace(planner(limit, sizes), kv_wanted=kv_wanted, kv_least=min(kv_wanted, 65_536)).plan()
    assert (plan.tokens, plan.recompute, plan.kv_tokens) == (tokens, False, kv_wanted)
    assert plan.fits


@pytest.mark.parametrize("settings", [{"micro_batch_tokens": 16_384}, {"recompute": True}, {"attention": "blocks"}])
def test_large_micro_batches_are_tried_only_by_default_and_with_fused_layers(settings):
    assert planner(500).plan().tokens == 65_536
    assert planner(500, **settings).plan().tokens == 16_384
    assert planner(500, sizes=learner_sizes(FOUR, sharded=True)).plan().tokens == 16_384


def test_micro_batches_whose_attention_keeps_squares_stay_small():
    forest, terms = batch_of(random_groups(3, groups=8), Fake())
    batcher = MicroBatcher(model_of("llama"), LearnerConfig(micro_batch_tokens=65_536))
    large = batcher.split(forest.trees, terms)
    assert len(large) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arborl.learner.core.tree_forward.MAX_SQUARE_TOKENS", len(large[0]) // 2)
        assert len(batcher.split(forest.trees, terms, square=True)) > 1
        assert len(batcher.split(forest.trees, terms)) == 1


def test_the_logits_of_a_chunk_can_be_indexed_by_32_bits():
    assert logit_rows(1_000 * GIB, 151_936, True) * 151_936 < 2**31


@pytest.mark.parametrize("limit", [180, 140, 120, 110, 100, 90])
@pytest.mark.parametrize("reference", [False, True])
def test_a_plan_is_within_its_limit(limit, reference):
    plan = planner(limit, reference=reference).plan()
    assert plan.fits
    assert plan.forecast.total <= limit * GIB
    assert plan.tokens in MICRO_BATCH_SIZES
    assert plan.kv_tokens >= 1_024


def test_explicit_settings_are_never_changed():
    plan = planner(90, micro_batch_tokens=8_192, recompute=False).plan()
    assert (plan.tokens, plan.recompute) == (8_192, False)
    fixed = dataclasses.replace(planner(90), kv_wanted=200_000, kv_least=200_000, kv_floor=200_000)
    assert fixed.plan().kv_tokens == 200_000
    assert planner(300, recompute=True).plan().recompute


def test_a_model_in_parts_runs_by_the_librarys_layers_which_keep_more():
    """On an H200 a body of 7B by fsdp2 ran out of memory with a plan for fused layers, and did not with this one."""
    whole, apart = (learner_sizes(FOUR, sharded) for sharded in (False, True))
    ours, theirs = (
        planner(140, sizes, strategy="fsdp2", offload="optimizer").forecast(8_192, False, 0) for sizes in (whole, apart)
    )
    assert theirs.activations > 1.1 * ours.activations
    assert theirs.logits > 4 * ours.logits
    assert logit_rows(140 * GIB, FOUR.vocabulary, False) * 20 <= logit_rows(140 * GIB, FOUR.vocabulary, True) * 5


def test_what_does_not_fit_says_so_and_takes_the_least():
    plan = planner(40).plan()
    assert not plan.fits
    assert (plan.tokens, plan.recompute, plan.kv_tokens) == (2_048, True, 1_024)
    for words, better in (
        ([], "offload=optimizer"),
        (["learner.offload=all"], "lora"),
        (["model.lora.rank=8"], "4bit"),
    ):
        assert better in plan_warning(plan, load(None, words))


def test_the_longest_branch_counts_though_micro_batches_are_shorter():
    long = dataclasses.replace(planner(300), context=40_000)
    assert long.plan().tokens == 32_768
    assert long.forecast(2_048, False, 0) == long.forecast(16_384, False, 0)


def test_adapters_need_no_copy_of_the_model_as_reference():
    adapted = dataclasses.replace(FOUR, trained=30_000_000, coarse=0, largest=10**6, rank=16)
    made = planner(60, sizes=adapted, reference=True)
    assert made.forecast(4_096, True, 0).others == 0
    assert planner(60, reference=True).forecast(4_096, True, 0).others == FOUR.weights
    assert planner(60, reference=True, offload="all").forecast(4_096, True, 0).others == 0
    assert made.plan().fits


def test_memory_that_the_engine_lends_is_counted_once_and_spares_running_layers_twice():
    apart, kv_freed = planner(94).plan(), dataclasses.replace(planner(94), can_free_kv=True).plan()
    assert apart.fits
    assert kv_freed.fits
    assert (apart.recompute, kv_freed.recompute) == (True, False)
    assert kv_freed.forecast.kv_freed
    assert kv_freed.kv_tokens >= apart.kv_tokens
    assert kv_freed.forecast.total == kv_freed.forecast.staying + max(kv_freed.forecast.learning, kv_freed.forecast.kv)
    assert "tokens (freed during updates)" in describe_plan(kv_freed, FOUR, 139 * GIB)
    roomy = dataclasses.replace(planner(190), can_free_kv=True).plan()
    assert not roomy.forecast.kv_freed  # it costs time


def test_the_plan_is_described_in_one_line():
    line = describe_plan(planner(92).plan(), FOUR, 139 * GIB)
    assert line.startswith("4.02B parameters, all trained: weights 7.5, optimizer state 45.0, gradients 15.0, activat")
    assert "tokens with recompute" in line
    assert line.endswith("of 139.0 GiB")
    config = load(None, ["model.device=cpu", "sampling.max_context=256"])
    plan = plan_memory(load_model(resolve("seedling"), device="cpu"), config, AlgorithmNeeds())
    assert plan.summary.startswith("2.1M parameters, all trained: weights 0.01")
    assert plan.warning == ""
    assert (plan.tokens, plan.recompute) == (4_096, False)


def test_a_learner_goes_by_the_plan(tiny_llama):
    plan = dataclasses.replace(planner(92).plan(), tokens=40)
    algorithm = Fake()
    learner = Learner(copy.deepcopy(tiny_llama), plan.settings(LearnerConfig()), SAMPLING, algorithm.needs)
    assert learner.micro_batcher.budget == 40
    assert learner.path_selector.recompute is plan.recompute is True
    forest, terms = batch_of(random_groups(0), algorithm)
    assert learner.update(forest.trees, terms, algorithm)["learner/steps"] == 1.0


def test_with_less_memory_a_plan_takes_less_of_it_in_an_order_that_costs_little():
    found = [planner(limit).plan() for limit in (190, 125, 115, 105, 92)]
    totals = [plan.forecast.total for plan in found]
    assert totals == sorted(totals, reverse=True)
    assert found[0].recompute is False
    assert found[-1].recompute is True
    for before, after in pairwise(found):
        assert (after.recompute, -after.tokens) >= (before.recompute, -before.tokens)


def test_a_body_of_4b_trains_within_100_gib_and_with_offload_within_60():
    plain = planner(100).plan()
    assert plain.fits
    assert plain.kv_tokens >= 65_536
    away = planner(60, offload="optimizer").plan()
    assert away.fits
    assert planner(45, offload="all").plan().fits
    assert not planner(45).plan().fits
