"""The local engine: exact tokens, exact log-probabilities (law 3), and neighbours that do not matter (law 6)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import slow_cases
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from arborl.config.run_config import LearnerConfig
from arborl.engines.local import LocalEngine
from arborl.engines.local.sampler import SamplingBatch, sample_tokens, uniform_numbers
from arborl.errors import EngineError
from arborl.learner.core.learner import Learner
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Episode, FinishReason, Group, Sampling, Task


def random_prompts(sizes: list[int], vocabulary: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, size).tolist() for size in sizes]


def greedy_by_transformers(model, prompts: list[list[int]], count: int) -> list[list[int]]:
    own, end = model.config._attn_implementation, model.generation_config.eos_token_id
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = (
        None  # min_new_tokens would forbid the end of turn, which the engine may draw
    )
    out = [
        model.generate(
            torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), max_new_tokens=count,
            min_new_tokens=count, do_sample=False, pad_token_id=0,
        )[0, len(p) :].tolist()
        for p in prompts
    ]  # fmt: skip
    model.set_attn_implementation(own)
    model.generation_config.eos_token_id = end
    return out


def generate(engine: LocalEngine, prompts: list[list[int]], samplings: list[Sampling]):
    async def run():
        calls = (engine.generate(p, s, session=str(i)) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True)))
        return await asyncio.gather(*calls)

    return asyncio.run(run())


SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama, wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers_for_every_family(family):
    torch.manual_seed(2)
    model = FAMILIES[family]().eval()
    prompts = random_prompts([3, 40, 77, 1], 99)
    prompts += [[*prompts[1], 5, 6], prompts[1]]
    expected = greedy_by_transformers(model, prompts, 10)
    engine = LocalEngine(model, max_context=128, max_requests=3, kv_tokens=384)
    for _ in range(2):
        assert [list(c.tokens) for c in generate(engine, prompts, [Sampling(10, 0.0)] * len(prompts))] == expected


def test_a_model_whose_attention_we_do_not_follow_is_refused_by_name():
    sizes = {**SIZES, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    with pytest.raises(EngineError, match="s_aux"):
        LocalEngine(GptOssForCausalLM(GptOssConfig(**sizes)).eval(), max_context=128, max_requests=1, kv_tokens=128)


@pytest.fixture(scope="module")
def kindred(qwen3):
    """Prompts of which some begin alike, and what transformers says to them."""
    prompts = random_prompts([3, 40, 77, 9, 25], 99)
    prompts += [[*prompts[1], 5, 6], [*prompts[1][:30], 1], prompts[2]]
    return prompts, greedy_by_transformers(qwen3, prompts, 12)


BLOCK_CASES = [(1, 0), (1, 8), (3, 1), (3, 16), (16, 0), (16, 1), (16, 8)]
OTHER_BLOCK_CASES = [(1, 1), (1, 16), (3, 0), (3, 8), (16, 16)]


@pytest.mark.parametrize(("sequences", "block_size"), [*BLOCK_CASES, *slow_cases(*OTHER_BLOCK_CASES)])
def test_greedy_tokens_equal_those_of_transformers_with_and_without_prefix_hits(qwen3, kindred, sequences, block_size):
    prompts, expected = kindred
    engine = LocalEngine(qwen3, max_context=128, kv_tokens=128 * sequences, block_size=block_size)
    for _ in range(2):  # the second time everything may be found in the cache
        assert [list(c.tokens) for c in generate(engine, prompts, [Sampling(12, 0.0)] * len(prompts))] == expected
    if sequences == 16:
        assert engine.metrics()["engine/hit_rate"] > 0.3


@pytest.mark.parametrize("read_at_once", [1, 8, 9, *slow_cases(2, 41)])
def test_a_prompt_of_which_one_token_is_read_in_a_step_is_read_rightly(qwen3, read_at_once):
    prompts = random_prompts([7, 5, 40, 3], 99)
    expected = greedy_by_transformers(qwen3, prompts, 4)
    engine = LocalEngine(qwen3, max_context=128, kv_tokens=1024)
    engine.runner.max_tokens = read_at_once
    assert [list(c.tokens) for c in generate(engine, prompts, [Sampling(4, 0.0)] * 4)] == expected


PREEMPTED = ("llama", "qwen3", "gemma")


@pytest.mark.parametrize("family", [*PREEMPTED, *slow_cases(*(name for name in FAMILIES if name not in PREEMPTED))])
def test_preempted_requests_continue_with_the_same_tokens(family, monkeypatch):
    monkeypatch.setattr("arborl.engines.local.scheduler.HEADROOM", 0)  # admit as soon as they fit: blocks run out
    torch.manual_seed(3)
    model = FAMILIES[family]().eval()
    prompts = random_prompts([3, 40, 25, 31, 12, 30], 99)
    expected = greedy_by_transformers(model, prompts, 24)
    engine = LocalEngine(model, max_context=96, kv_tokens=120, block_size=4)
    assert [list(c.tokens) for c in generate(engine, prompts, [Sampling(24, 0.0)] * len(prompts))] == expected
    assert engine.metrics()["engine/preempted"] >= 3


def test_seedlings_greedy_tokens_equal_those_of_transformers_with_hits_and_when_put_back(seedling, monkeypatch):
    monkeypatch.setattr("arborl.engines.local.scheduler.HEADROOM", 0)
    model, _ = seedling
    prompts = random_prompts([5, 33, 60, 12], 600)
    prompts += [[*prompts[1], 7], prompts[2]]
    expected = greedy_by_transformers(model, prompts, 16)
    plain, paged, tight = (
        LocalEngine(model, max_context=96, kv_tokens=kv_tokens, block_size=block_size)
        for kv_tokens, block_size in ((96 * 8, 0), (96 * 8, 8), (128, 8))
    )
    for engine in (plain, plain, paged, paged, tight):
        assert [list(c.tokens) for c in generate(engine, prompts, [Sampling(16, 0.0)] * len(prompts))] == expected
    assert min(engine.metrics()["engine/hit_rate"] for engine in (plain, paged)) > 0.3
    assert tight.metrics()["engine/preempted"] > 0


def test_a_request_put_back_draws_the_tokens_it_would_have_drawn(qwen3, monkeypatch):
    monkeypatch.setattr("arborl.engines.local.scheduler.HEADROOM", 0)
    prompts, samplings = random_prompts([3, 40, 25, 31], 99), [Sampling(40, seed=i) for i in range(4)]
    roomy, tight = (LocalEngine(qwen3, max_context=96, kv_tokens=kv, block_size=4) for kv in (1000, 120))
    free, held = generate(roomy, prompts, samplings), generate(tight, prompts, samplings)
    assert tight.metrics()["engine/preempted"] > 0
    assert [c.tokens for c in held] == [c.tokens for c in free]
    for a, b in zip(held, free, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


async def test_ten_thousand_requests_through_a_pool_that_holds_two_hundred_lose_no_page(qwen3):
    engine = LocalEngine(qwen3, max_context=32, max_requests=128, kv_tokens=200 * 8, block_size=8)
    rng = np.random.default_rng(0)

    async def episode(number: int) -> int:
        prompt = rng.integers(0, 5, int(rng.integers(1, 7))).tolist()
        for turn in range(4):
            done = await engine.generate(prompt, Sampling(2, seed=number * 4 + turn), session=str(number))
            prompt += done.tokens
        return len(prompt)

    assert len(await asyncio.gather(*(episode(i) for i in range(2500)))) == 2500
    pages = engine.pool
    assert (pages.num_used, pages.num_available) == (0, 200)
    assert engine.metrics()["engine/sampled"] == 20_000
    path = pages.match_prefix(np.array([98], dtype=np.int32))
    assert pages.extend(path, 200 * 8)  # every page can be handed out again
    assert sorted(block.id for block in path.blocks) == list(range(200))


def test_a_pool_too_small_for_one_sequence_is_refused(qwen3):
    with pytest.raises(ValueError, match="kv_tokens=100 holds no sequence of max_context=128"):
        LocalEngine(qwen3, max_context=128, kv_tokens=100)


async def test_new_weights_while_requests_are_live_are_used_from_the_next_token_on(qwen3):
    import copy

    model = copy.deepcopy(qwen3)
    engine = LocalEngine(model, max_context=128, kv_tokens=1024)
    (prompt,) = random_prompts([20], 99)
    request = asyncio.create_task(engine.generate(prompt, Sampling(40, 0.0), session="a"))
    while engine.batch.known.max() < 25:
        await asyncio.sleep(0)
    (row,) = engine.scheduler.running
    before = engine.batch.tokens[row, 20:25].tolist()
    other = {name: torch.randn_like(value) * 0.05 for name, value in model.state_dict().items()}
    await engine.load(other, version=1)
    before, done = before, await request
    assert list(done.tokens[:5]) == before
    assert list(done.tokens[5:]) == greedy_by_transformers(model, [[*prompt, *before]], 35)[0]


def test_a_later_turn_reads_only_what_is_new(qwen3):
    engine = LocalEngine(qwen3, max_context=128, max_requests=4, kv_tokens=512)
    (first,) = generate(engine, [[1, 2, 3, 4, 5]], [Sampling(4, seed=0)])
    engine.metrics()
    generate(engine, [[1, 2, 3, 4, 5, *first.tokens, 7, 8]], [Sampling(1)])
    assert engine.metrics()["engine/read"] == 3  # the last sampled token, 7 and 8


def test_siblings_read_their_prompt_once(qwen3):
    engine = LocalEngine(qwen3, max_context=128, max_requests=8, kv_tokens=1024)
    (prompt,) = random_prompts([60], 99)
    generate(engine, [prompt] * 8, [Sampling(1, seed=i) for i in range(8)])
    assert engine.metrics()["engine/read"] == 60 + 7


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(20),
        Sampling(20, 0.7),
        Sampling(20, 1.5, top_k=5),
        Sampling(20, top_p=0.8),
        Sampling(20, 2.0, min_p=0.1),
    ],
    ids=["plain", "cool", "top-k", "top-p", "min-p"],
)
def test_the_rollouts_logprobs_equal_the_learners(seedling, sampling):
    model, _ = seedling
    engine = LocalEngine(model, max_context=256, max_requests=8, kv_tokens=2048)
    prompts = random_prompts([5, 33, 80, 80, 12], 600)
    done = generate(engine, prompts, [dataclasses.replace(sampling, seed=i) for i in range(5)])
    calls = [Call(tuple(p), c, 0) for p, c in zip(prompts, done, strict=True)]
    forest = build_token_trees([Group(Task("t"), [Episode("e", Task("t"), calls=calls)])])
    learner = Learner(model, LearnerConfig(), sampling)
    gap = (learner.logprobs(forest.trees, forest.terms) - torch.from_numpy(forest.terms.logprob)).abs().max()
    assert gap < 1e-4


def test_deterministic_mode_gives_bit_equal_logprobs_alone_and_in_company(seedling):
    model, _ = seedling
    prompts = random_prompts([30, 11, 47, 5], 600)
    samplings = [Sampling(10, seed=i) for i in range(4)]
    engine = LocalEngine(model, max_context=256, max_requests=4, kv_tokens=1024, deterministic=True)
    together = generate(engine, prompts, samplings)
    alone = [generate(engine, [p], [s])[0] for p, s in zip(prompts, samplings, strict=True)]
    assert [(c.tokens, c.logprobs) for c in together] == [(c.tokens, c.logprobs) for c in alone]


def test_a_stop_token_ends_the_completion_and_is_part_of_it(qwen3):
    engine = LocalEngine(qwen3, max_context=128, max_requests=4, kv_tokens=512)
    (prompt,) = random_prompts([10], 99)
    (free,) = generate(engine, [prompt], [Sampling(8, 0.0)])
    (stopped,) = generate(engine, [prompt], [Sampling(8, 0.0, stop=(free.tokens[3],))])
    cut = free.tokens.index(free.tokens[3]) + 1
    assert stopped.tokens == free.tokens[:cut]
    assert stopped.finish is FinishReason.STOP


def test_a_stop_text_ends_the_completion_as_soon_as_it_is_written(seedling):
    model, renderer = seedling
    engine = LocalEngine(model, max_context=128, max_requests=4, kv_tokens=512, decode=renderer.tokenizer.decode)
    prompt = renderer.tokenizer.encode("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n")
    (free,) = generate(engine, [prompt], [Sampling(30, 0.0)])
    text = renderer.tokenizer.decode(free.tokens)
    wanted = text[4:7]
    (cut,) = generate(engine, [prompt], [Sampling(30, 0.0, stop_texts=(wanted, "never written"))])
    assert cut.finish is FinishReason.STOP
    assert cut.tokens == free.tokens[: len(cut.tokens)]
    assert wanted in renderer.tokenizer.decode(cut.tokens)
    assert wanted not in renderer.tokenizer.decode(cut.tokens[:-1])


def test_a_deadline_ends_a_request_with_what_has_been_sampled(qwen3):
    engine = LocalEngine(qwen3, max_context=250, max_requests=4, kv_tokens=1000)
    launch = engine.runner.launch
    engine.runner.launch = lambda step: (time.sleep(0.002), launch(step))[1]  # else sampling ends before the deadline
    late, free = generate(engine, [[1, 2], [3]], [Sampling(200, 0.0, seconds=0.1), Sampling(200, 0.0)])
    assert late.finish is FinishReason.ABORT
    assert 0 < len(late.tokens) < 200
    assert len(free.tokens) == 200


@pytest.mark.parametrize(
    ("prompt", "sampling", "complaint"),
    [
        ([], Sampling(), "empty"),
        ([1] * 128, Sampling(), "no room"),
        ([99], Sampling(), "outside the vocabulary"),
        ([-1], Sampling(), "outside the vocabulary"),
        ([1], Sampling(temperature=-1.0), "temperature=-1.0"),
        ([1], Sampling(max_tokens=0), "at least 1"),
        ([1], Sampling(top_p=0.0), "top_p"),
        ([1], Sampling(top_k=-1), "top_k"),
        ([1], Sampling(stop_texts=("x",)), "decode"),
    ],
)
async def test_a_bad_request_is_refused_alone(qwen3, prompt, sampling, complaint):
    engine = LocalEngine(qwen3, max_context=128, max_requests=2, kv_tokens=256)
    bad, good = await asyncio.gather(
        engine.generate(prompt, sampling, session="bad"),
        engine.generate([1, 2], Sampling(3), session="good"),
        return_exceptions=True,
    )
    assert isinstance(bad, EngineError)
    assert complaint in str(bad)
    assert len(good.tokens) == 3


async def test_a_cancelled_request_leaves_and_the_others_go_on(qwen3):
    engine = LocalEngine(qwen3, max_context=128, max_requests=4, kv_tokens=512)
    slow = asyncio.create_task(engine.generate([1, 2], Sampling(100), session="slow"))
    quick = asyncio.create_task(engine.generate([3], Sampling(30), session="quick"))
    await asyncio.sleep(0.02)
    slow.cancel()
    assert len((await quick).tokens) == 30
    until = time.monotonic() + 60
    while engine.scheduler.running and time.monotonic() < until:  # it leaves in the step after the one under way
        await asyncio.sleep(0.01)
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert slow.cancelled()


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2, 0.0]])).expand(20_000, 4)
    tokens, logprobs, _ = sample_tokens(
        logits, SamplingBatch.of([Sampling(seed=i) for i in range(20_000)], [0] * 20_000)
    )
    shares = np.bincount(tokens, minlength=4) / 20_000
    assert shares == pytest.approx([0.5, 0.3, 0.2, 0.0], abs=0.015)
    assert np.exp(logprobs[:5]) == pytest.approx([[0.5, 0.3, 0.2][t] for t in tokens[:5]])


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions():
    for numbers in (uniform_numbers(range(50_000), [3] * 50_000), uniform_numbers([3] * 50_000, range(50_000))):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert np.histogram(numbers, 10, (0, 1))[0] == pytest.approx([5000] * 10, abs=350)
        assert np.corrcoef(numbers[:-1], numbers[1:])[0, 1] == pytest.approx(0, abs=0.02)


def test_adapters_are_applied_in_sampling_and_change_the_tokens():
    pytest.importorskip("peft")
    from arborl.config.run_config import LoraConfig
    from arborl.models.lora import add_lora

    torch.manual_seed(4)
    model = FAMILIES["qwen2"]().eval()
    prompts = random_prompts([5, 30], 99)
    bare = greedy_by_transformers(model, prompts, 12)
    add_lora(model, LoraConfig(rank=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    expected = greedy_by_transformers(model, prompts, 12)
    engine = LocalEngine(model, max_context=64, kv_tokens=512, block_size=8)
    assert engine.runner.forward.is_fused
    assert [list(c.tokens) for c in generate(engine, prompts, [Sampling(12, 0.0)] * 2)] == expected
    assert expected != bare


def test_pages_take_no_memory_before_they_are_written(tiny_llama):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    engine = LocalEngine(tiny_llama, max_context=256, kv_tokens=2_000_000)
    assert engine.runner.cache.keys.nbytes + engine.runner.cache.values.nbytes > 5e8
    assert resident() - before < 3e8
    completion = asyncio.run(engine.generate([1, 2, 3], Sampling(4), session="one"))
    assert len(completion.tokens) == 4
