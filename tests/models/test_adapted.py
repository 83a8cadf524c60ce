"""Layers under adapters are two products that give what peft gives, and see every update without moving."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch
from cases import HAS_BFLOAT16, slow_cases
from safetensors.torch import load_file
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from arborl.config.load_config import load
from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.engines.local import LocalEngine
from arborl.learner.core.learner import Learner
from arborl.models.fused_linear import LoraProduct, make_product
from arborl.models.lora import add_lora, dropout_on
from arborl.models.model_loading import load_model, resolve
from arborl.rollout.token_trees import build_token_trees
from arborl.training_run import train
from arborl.types import Call, Episode, Group, Sampling, Task

peft = pytest.importorskip("peft")

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}
QKV = ("q_proj", "k_proj", "v_proj")
TARGETS = [("all-linear",), ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("o_proj", "down_proj"), ("gate_proj",)]


def made(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def stir(model: nn.Module, std: float = 0.3) -> None:
    """Adapters that do something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_magnitude" in name:
                parameter.add_(torch.randn_like(parameter) * std)


def adapted(family: str, target: tuple[str, ...] = ("all-linear",), dtype=torch.float64, **more) -> nn.Module:
    """With peft's own settings in `more`."""
    model = made(family, dtype)
    wanted = "all-linear" if target == ("all-linear",) else list(target)
    settings = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": wanted, **more})
    model.add_adapter(settings, "default")
    stir(model)
    return model.eval()


def sample(model: nn.Module, by_peft: bool = False, engine: LocalEngine | None = None) -> list[tuple]:
    engine = engine or LocalEngine(model, max_context=64, max_requests=8, block_size=16, compiled=not by_peft)
    if by_peft:
        engine.runner.forward.rope = None
        assert not engine.runner.forward.is_fused
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, size).tolist() for size in (1, 9, 20, 20)]

    async def run():
        sampling = [Sampling(12, temperature, seed=i) for i, temperature in enumerate((1.0, 0.0, 0.7, 1.0))]
        calls = (engine.generate(p, s, session=str(i)) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True)))
        return await asyncio.gather(*calls)

    return asyncio.run(run())


def products(engine: LocalEngine) -> list[LoraProduct]:
    found = [p for block in engine.runner.forward.layers for p in block.products]
    return [p for p in found if isinstance(p, LoraProduct)]


@pytest.mark.parametrize("target", TARGETS, ids="+".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_tokens_are_those_of_pefts_modules(family, target):
    model = adapted(family, target)
    engine = LocalEngine(model, max_context=64, max_requests=8, block_size=16)
    ours, theirs = sample(model, engine=engine), sample(copy.deepcopy(model), by_peft=True)
    assert engine.runner.forward.is_fused
    assert products(engine)
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-6)


@pytest.mark.parametrize("more", [{"use_rslora": True}, {"lora_dropout": 0.5}, {"r": 17}], ids=str)
def test_scale_dropout_and_rank_are_as_peft_has_them(more):
    model = adapted("qwen2", dtype=torch.float32, **more)
    engine = LocalEngine(model, max_context=64, max_requests=8, block_size=16)
    assert len(products(engine)) == 8
    assert all(p.ranks % 16 == 0 for p in products(engine))
    ours, theirs = sample(model, engine=engine), sample(copy.deepcopy(model), by_peft=True)
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_a_form_that_is_not_known_is_run_by_peft(more):
    model = adapted("llama", **more)
    engine = LocalEngine(model, max_context=64, max_requests=8, block_size=16)
    assert products(engine) == []
    ours, theirs = sample(model, engine=engine), sample(copy.deepcopy(model), by_peft=True)
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]


def test_one_odd_adapter_among_plain_ones_leaves_its_product_to_peft():
    model = adapted("qwen2")
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[0].mlp
    attention.k_proj.add_adapter = None  # a custom class
    attention.k_proj.__class__ = type("Own", (type(attention.k_proj),), {})
    mlp.down_proj.merge()
    engine = LocalEngine(model, max_context=64, max_requests=8, block_size=16)
    assert len(products(engine)) == 6
    assert [c.tokens for c in sample(model, engine=engine)] == [
        c.tokens for c in sample(copy.deepcopy(model), by_peft=True)
    ]


def test_updates_arrive_with_load_and_nothing_moves():
    model = adapted("qwen3")
    engine = LocalEngine(model, max_context=64, max_requests=8, block_size=16)
    before = sample(model, engine=engine)
    bound = [(p.weight.data_ptr(), p.second.data_ptr()) for p in products(engine)]
    stir(model)
    stale = sample(model, engine=engine)
    assert [c.tokens for c in stale] == [c.tokens for c in before]  # published, not shared
    asyncio.run(engine.load(dict(model.state_dict()), version=1))
    after = sample(model, engine=engine)
    assert [c.tokens for c in after] == [c.tokens for c in sample(copy.deepcopy(model), by_peft=True)]
    assert [c.tokens for c in after] != [c.tokens for c in before]
    assert [(p.weight.data_ptr(), p.second.data_ptr()) for p in products(engine)] == bound


def test_weights_given_other_memory_and_adapters_merged_meanwhile_are_found_again():
    model = adapted("llama")
    engine = LocalEngine(model, max_context=64, max_requests=8, block_size=16)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 0.01
    model.model.layers[0].self_attn.q_proj.merge()
    asyncio.run(engine.load({}, version=1))
    assert len(products(engine)) == 7
    ours, theirs = sample(model, engine=engine), sample(copy.deepcopy(model), by_peft=True)
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]


def test_two_engines_on_one_model_share_what_they_are_bound_to():
    model = adapted("qwen2")
    one = LocalEngine(model, max_context=64, max_requests=8, block_size=16)
    two = LocalEngine(model, max_context=64, max_requests=8, block_size=16)
    assert products(one) == products(two)
    assert not any(p.has_moved for p in products(one))


def test_the_layers_keep_their_parameters_and_only_the_base_shares_memory():
    model = adapted("qwen2")
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    attention = model.model.layers[0].self_attn
    whole = make_product(attention, *QKV)
    assert isinstance(whole, LoraProduct)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: i for name, (i, _) in before.items()}
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    assert make_product(attention, *QKV) is whole
    with torch.no_grad():
        attention.k_proj.base_layer.weight.fill_(3.0)
    assert (whole.weight[32:48] == 3.0).all()


def test_a_copy_of_the_model_has_products_of_its_own():
    model = adapted("llama")
    make_product(model.model.layers[0].self_attn, "o_proj")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.o_proj.base_layer.weight.zero_()
    x = torch.randn(3, 32, dtype=torch.float64)
    for one in (model, other):
        layer = one.model.layers[0].self_attn
        torch.testing.assert_close(make_product(layer, "o_proj")(x), layer.o_proj(x))


def test_gradients_are_taken_through_peft_as_before(tmp_path):
    """The engine's products are for sampling; the learner goes through the modules, whose dropout drops."""
    model = adapted("llama", lora_dropout=0.5)
    x = torch.randn(3, 32, dtype=torch.float64)
    layer = model.model.layers[0].self_attn
    whole = make_product(layer, "o_proj")
    with dropout_on(model, 1):
        assert not torch.equal(layer.o_proj(x), layer.o_proj(x))
        torch.testing.assert_close(whole(x), whole(x))
    layer.o_proj(x).sum().backward()
    assert layer.o_proj.lora_A["default"].weight.grad is not None


@pytest.mark.parametrize("dtype", ["bfloat16"] if HAS_BFLOAT16 else slow_cases("bfloat16"))
def test_in_bfloat16_the_rollouts_logprobs_are_as_near_the_learners_as_those_of_pefts_modules(dtype):
    """Law 3. Factors are rounded once, as all weights of such a model are; the sum is rounded once more in both."""
    model = load_model(resolve("seedling"), dtype, "cpu")
    torch.manual_seed(1)
    add_lora(model, LoraConfig(rank=8, alpha=16))
    stir(model, 0.05)
    gaps = {}
    for by_peft in (False, True):
        engine = LocalEngine(model, max_context=128)
        if by_peft:
            engine.runner.forward.rope = None
        rng = np.random.default_rng(0)
        prompts = [tuple(rng.integers(0, 600, size).tolist()) for size in (5, 33, 60, 12)]

        async def run(engine=engine, prompts=prompts):
            return await asyncio.gather(
                *(engine.generate(p, Sampling(40, seed=i), session=str(i)) for i, p in enumerate(prompts))
            )

        calls = [Call(p, c, 0) for p, c in zip(prompts, asyncio.run(run()), strict=True)]
        forest = build_token_trees([Group(Task("t"), [Episode("e", Task("t"), calls=calls)])])
        scored = Learner(model, LearnerConfig(), Sampling()).logprobs(forest.trees, forest.terms).numpy()
        gaps[by_peft] = float(np.exp(np.abs(scored - forest.terms.logprob)).mean())
    assert gaps[False] < 1.05
    assert gaps[False] < 1 + 2 * (gaps[True] - 1), gaps


@pytest.mark.slow
def test_a_run_with_adapters_that_is_resumed_ends_as_the_one_that_was_not(tmp_path):
    """Law 7, through the engine's own copies of the factors."""
    small = [
        "deterministic=true", "threads=1", "model.device=cpu", "model.lora.rank=4", "learner.lr=0.01",
        "env.args.size=3", "env.args.max_steps=3", "rollout.tasks_per_step=2", "rollout.group_size=4",
        "trainer.save_every=1", "evaluation.tasks=2", "evaluation.every=0", "track.gifs=0", "learner.decay=none",
    ]  # fmt: skip
    whole = train(load(None, [*small, "trainer.steps=3", f"output_dir={tmp_path / 'whole'}"]))
    train(load(None, [*small, "trainer.steps=1", f"output_dir={tmp_path / 'cut'}"]))
    longer = load(tmp_path / "cut" / "config.yaml", ["trainer.steps=3", f"output_dir={tmp_path / 'cut'}"])
    resumed = train(longer, resume="latest")
    ours, theirs = (
        load_file(run.folder / "checkpoints/step-000003/model/adapter_model.safetensors") for run in (resumed, whole)
    )
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert any(float(value.abs().max()) > 0 for name, value in ours.items() if "lora_B" in name)
