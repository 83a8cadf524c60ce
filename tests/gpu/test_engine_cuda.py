"""The engine on a GPU: kernels, graphs and running ahead give the tokens that any other way gives."""

from __future__ import annotations

import asyncio
import copy
import json

import numpy as np
import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from arborl.engines.local import LocalEngine
from arborl.types import FinishReason, Message, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=16)),
}


def random_prompts(sizes: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 99, size).tolist() for size in sizes]


def generate(engine: LocalEngine, prompts, samplings):
    async def run():
        calls = (engine.generate(p, s, session=str(i)) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True)))
        return await asyncio.gather(*calls)

    return asyncio.run(run())


def make(family: str):
    torch.manual_seed(2)
    return FAMILIES[family]().to("cuda").eval()


def by_transformers(model, prompts, count: int) -> list[list[int]]:
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
        out.append(model.generate(ids, max_new_tokens=count, min_new_tokens=count, **given)[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers_also_when_requests_are_put_back(family, monkeypatch):
    monkeypatch.setattr("arborl.engines.local.scheduler.HEADROOM", 0)
    model = make(family)
    prompts = random_prompts([3, 40, 25, 31, 12, 30])
    prompts += [[*prompts[1], 5, 6], prompts[1]]
    expected = by_transformers(model, prompts, 40)
    for kv_tokens, block_size in ((2000, 0), (160, 16)):
        engine = LocalEngine(model, max_context=96, max_requests=8, kv_tokens=kv_tokens, block_size=block_size)
        for _ in range(2):
            assert [list(c.tokens) for c in generate(engine, prompts, [Sampling(40, 0.0)] * 8)] == expected
        assert not engine.runner.is_broken
        assert len(engine.runner.graphs) > 0
    assert engine.metrics()["engine/preempted"] > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_conversations_out_of_step_get_the_tokens_of_transformers(family):
    """Replies and observations of unequal length, prompts that come late, and one that is longer than any graph."""
    model = make(family)
    engine = LocalEngine(model, max_context=250, max_requests=12, kv_tokens=8000, block_size=16)
    engine.runner.buckets = [b for b in engine.runner.buckets if b <= 96]
    completions: list[tuple[list[int], int, list[int]]] = []

    async def converse(number: int) -> None:
        own = np.random.default_rng(number)
        context = own.integers(0, 99, int(own.integers(1, 120))).tolist()
        for _ in range(3):
            count = int(own.integers(1, 25))
            done = await engine.generate(context, Sampling(count, 0.0), session=str(number))
            completions.append((list(context), count, list(done.tokens)))
            context += [*done.tokens, *own.integers(0, 99, int(own.integers(0, 20))).tolist()]
            await asyncio.sleep(0.001 * number)

    async def everyone() -> None:
        await asyncio.gather(*(converse(number) for number in range(16)))

    asyncio.run(everyone())
    assert not engine.runner.is_broken
    for context, count, tokens in completions[::4]:
        assert [tokens] == by_transformers(model, [context], count)


def test_sampled_tokens_are_those_of_the_cpu():
    model = make("qwen3")
    prompts, samplings = random_prompts([3, 40, 25, 31]), [Sampling(30, seed=i) for i in range(4)]
    samplings[1] = Sampling(30, 0.8, seed=1, top_k=20)
    here = generate(LocalEngine(model, max_context=96, kv_tokens=2000), prompts, samplings)
    there = generate(LocalEngine(copy.deepcopy(model).cpu(), max_context=96, kv_tokens=2000), prompts, samplings)
    assert [c.tokens for c in here] == [c.tokens for c in there]
    for a, b in zip(here, there, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


def test_siblings_that_share_their_prompt_get_the_tokens_they_would_get_alone():
    model = make("qwen2")
    prompts = random_prompts([50, 70])
    prompts = [prompts[0]] * 5 + [prompts[1]] * 6 + [[*prompts[0][:40], 7, 8, 9]]
    samplings = [Sampling(30, seed=i) for i in range(len(prompts))]
    engine = LocalEngine(model, max_context=128, kv_tokens=4000, block_size=16)
    together = generate(engine, prompts, samplings)
    assert engine.runner.prefix_grouping.last[0].blocks_M.max() >= 3
    alone = LocalEngine(model, max_context=128, kv_tokens=4000, block_size=16)
    for prompt, sampling, found in zip(prompts, samplings, together, strict=True):
        assert generate(alone, [prompt], [sampling])[0].tokens == found.tokens


def test_requests_stop_where_they_should_and_others_go_on():
    model = make("llama")
    prompts = random_prompts([10, 20])
    engine = LocalEngine(model, max_context=96, kv_tokens=2000)
    free, _ = generate(engine, prompts, [Sampling(20, 0.0)] * 2)
    stop = free.tokens[7]
    stopped, other = generate(engine, prompts, [Sampling(20, 0.0, stop=(stop,)), Sampling(20, 0.0)])
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert stopped.finish is FinishReason.STOP
    assert len(other.tokens) == 20
    assert engine.pool.num_used == 0


def test_graphs_use_weights_that_change_in_place():
    model = make("qwen2")
    engine = LocalEngine(model, max_context=96, kv_tokens=2000)
    prompts = random_prompts([20, 7])
    generate(engine, prompts, [Sampling(10, 0.0)] * 2)
    recorded = dict(engine.runner.graphs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    asyncio.run(engine.load(dict(model.state_dict()), version=1))
    done = generate(engine, prompts, [Sampling(10, 0.0)] * 2)
    assert [list(c.tokens) for c in done] == by_transformers(model, prompts, 10)
    assert engine.runner.graphs == recorded


def with_adapters(model, target):
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, target_modules=target), "default")
    stir(model)
    return model.eval()


def stir(model) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(torch.randn_like(p) * 0.2)


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "v_proj", "down_proj"]], ids=str)
def test_graphs_sample_through_adapters_and_see_their_updates(target):
    model = with_adapters(make("qwen2"), target)
    engine = LocalEngine(model, max_context=96, max_requests=8, kv_tokens=2000)
    prompts = random_prompts([20, 7, 33])
    first = generate(engine, prompts, [Sampling(12, 0.0)] * 3)
    assert [list(c.tokens) for c in first] == by_transformers(model, prompts, 12)
    recorded = dict(engine.runner.graphs)
    stir(model)
    asyncio.run(engine.load(dict(model.state_dict()), version=1))
    again = generate(engine, prompts, [Sampling(12, 0.0)] * 3)
    assert [list(c.tokens) for c in again] == by_transformers(model, prompts, 12)
    assert [c.tokens for c in again] != [c.tokens for c in first]
    assert engine.runner.graphs == recorded
    assert not engine.runner.is_broken


def test_once_warm_nothing_is_compiled_or_recorded_any_more():
    """Steps of any number of rows, of one token or many, more than the largest graph has, greedy or not."""
    import triton

    engine = LocalEngine(make("qwen2"), max_context=250, max_requests=13, kv_tokens=8000, block_size=16)
    engine.runner.buckets = [1, 2, 4, 8, 13, 16, 32, 64, 96]
    engine.warm_up(Sampling())
    assert sorted(bucket for bucket, _ in engine.runner.graphs) == engine.runner.buckets
    recorded, compiled = dict(engine.runner.graphs), []
    triton.knobs.runtime.jit_post_compile_hook = lambda *given, **more: compiled.append(more.get("repr"))

    async def converse(number: int) -> None:
        own = np.random.default_rng(number)
        context = own.integers(0, 99, int(own.integers(1, 120))).tolist()
        for turn in range(3):
            sampling = Sampling(int(own.integers(1, 25)), float(number % 2), seed=turn)
            done = await engine.generate(context, sampling, session=str(number))
            context += [*done.tokens, *own.integers(0, 99, int(own.integers(0, 20))).tolist()]

    async def everyone() -> None:
        await engine.generate([5] * 201, Sampling(3), session="long")
        await asyncio.gather(*(converse(number) for number in range(17)))
        await asyncio.gather(*(engine.generate([i] * 120, Sampling(5, seed=i), session="at once") for i in range(13)))

    try:
        asyncio.run(everyone())
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert engine.runner.graphs == recorded
    assert compiled == []


def test_truncated_draws_replay_graphs_of_their_own_and_share_one_place_for_logits():
    model = make("llama")
    prompts, samplings = random_prompts([3, 40, 25]), [Sampling(12, 0.8, seed=i, top_p=0.7) for i in range(3)]
    engine = LocalEngine(model, max_context=96, max_requests=4, kv_tokens=2000)
    engine.runner.buckets = [1, 2, 4, 8, 64, 96]
    engine.warm_up(samplings[0])
    here = generate(engine, prompts, samplings)
    there = generate(LocalEngine(copy.deepcopy(model).cpu(), max_context=96, kv_tokens=2000), prompts, samplings)
    assert [c.tokens for c in here] == [c.tokens for c in there]
    assert {truncates for _, truncates in engine.runner.graphs} == {True}


def test_weights_moved_to_other_memory_are_found_again():
    model = make("qwen2")
    engine = LocalEngine(model, max_context=96, kv_tokens=2000)
    prompts = random_prompts([20, 7])
    generate(engine, prompts, [Sampling(10, 0.0)] * 2)
    for p in model.parameters():
        p.data = p.data.clone() + 0.01
    asyncio.run(engine.load({}, version=1))
    assert [list(c.tokens) for c in generate(engine, prompts, [Sampling(10, 0.0)] * 2)] == by_transformers(
        model, prompts, 10
    )


def test_a_live_conversation_of_many_turns_reads_only_what_is_new():
    engine = LocalEngine(make("qwen2"), max_context=200, kv_tokens=4000)

    async def run():
        context = random_prompts([20])[0]
        for turn in range(5):
            done = await engine.generate(context, Sampling(10, seed=turn), session="a")
            context += [*done.tokens, 1, 2, 3]

    asyncio.run(run())
    metrics = engine.metrics()
    assert metrics["engine/read"] == 20 + 9 * 5 + 4 * 4  # prompt, all sampled but each turn's last, that and 3 new


def test_schemas_and_penalties_in_graphs_and_the_requests_beside_them():
    """Constrained requests wait for their last token while the others run ahead, and all get the CPU's tokens."""
    pytest.importorskip("llguidance", reason="the extra 'json'")
    from arborl.chat import Renderer
    from arborl.chat.json_schema import schema_text
    from arborl.models.model_loading import load_model, resolve

    folder = resolve("seedling")
    renderer = Renderer.from_folder(folder)
    prompt = renderer.encode(renderer.render([Message("user", "An animal as JSON, please.")]))
    schema = schema_text({
        "type": "object", "required": ["kind", "legs"], "additionalProperties": False,
        "properties": {"kind": {"enum": ["cat", "dog", "fish"]}, "legs": {"enum": [0, 4, 8]}},
    })  # fmt: skip
    edits = [
        {"schema": schema},
        {},
        {"frequency_penalty": 1.0},
        {},
        {"schema": schema, "top_p": 0.8, "temperature": 1.5},
    ]
    samplings = [Sampling(80, seed=i, stop=renderer.stop, **edit) for i, edit in enumerate(edits * 3)]
    found = {}
    for device in ("cuda", "cpu"):
        model = load_model(folder, "float32", device)
        engine = LocalEngine(model, max_context=256, tokenizer=renderer.tokenizer)
        found[device] = generate(engine, [prompt] * len(samplings), samplings)
        if device == "cuda":
            assert not engine.runner.is_broken
            plain = [Sampling(80, seed=s.seed, stop=s.stop) for s in samplings]
            alone = generate(engine, [prompt] * len(samplings), plain)
            same = [a.tokens == b.tokens for a, b, e in zip(alone, found[device], edits * 3, strict=True) if not e]
            assert all(same)
    for completion, sampling in zip(found["cuda"], samplings, strict=True):
        if sampling.schema:
            assert json.loads(renderer.read(completion).content)["kind"] in ("cat", "dog", "fish")
    agree = [a.tokens == b.tokens for a, b in zip(found["cuda"], found["cpu"], strict=True)]
    assert np.mean(agree) > 0.7  # a number next to a border may fall on its other side by rounding
    for a, b, equal in zip(found["cuda"], found["cpu"], agree, strict=True):
        if equal:
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-3)
