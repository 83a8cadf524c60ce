"""Steps by compiled code on a CPU: torch's numbers, whatever stands beside a token and on however many threads."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import peft
import pytest
import torch
from cases import IS_ARM
from forked import Forked
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arborl.engines.local import LocalEngine, cpu_runner
from arborl.engines.local.cpu_runner import SOURCE, CpuModelRunner, library
from arborl.engines.local.model_runner import TorchModelRunner
from arborl.models.c_library import load_c_library
from arborl.types import Sampling

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

ODD = {
    "vocab_size": 101, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES = {
    "llama, one key head": lambda: LlamaForCausalLM(LlamaConfig(**ODD, num_key_value_heads=1, head_dim=10)),
    "llama, many to a key": lambda: LlamaForCausalLM(
        LlamaConfig(**(ODD | {"num_attention_heads": 18}), num_key_value_heads=2, head_dim=4, mlp_bias=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**ODD, num_key_value_heads=6)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**ODD, num_key_value_heads=3, head_dim=40)),
}  # fmt: skip
SAMPLING = [
    {"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 4}
]  # fmt: skip


def made(family: str) -> torch.nn.Module:
    torch.manual_seed(3)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "bias" in name or "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def converse(engine: LocalEngine, shapes=SAMPLING, sizes=(1, 30, 7, 61, 13)):
    """Two turns each, of prompts of these lengths."""
    rng = np.random.default_rng(0)

    async def one(number: int, context: list[int], shape: dict):
        done = []
        for turn in range(2):
            done.append(
                await engine.generate(context, Sampling(9, seed=10 * number + turn, **shape), session=str(number))
            )
            context = [*context, *done[-1].tokens, 5, 6, 7]
        return done

    async def everyone():
        prompts = [rng.integers(0, engine.vocabulary, size).tolist() for size in sizes]
        return await asyncio.gather(*(one(i, p, s) for i, (p, s) in enumerate(zip(prompts, shapes, strict=True))))

    return [call for calls in asyncio.run(everyone()) for call in calls]


def same(ours, theirs, tolerance: float):
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=0)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["tokens", "columns"])
def divided_by(request, monkeypatch):
    """What the threads of a step divide: its tokens, or the columns of its products."""
    monkeypatch.setattr(cpu_runner, "COLUMN_MODE_BYTES", 0 if request.param == "columns" else 2**60)
    use_many_threads(monkeypatch)
    return request.param


def use_many_threads(monkeypatch) -> None:
    """However little work there is, and however few cores."""
    monkeypatch.setattr(cpu_runner, "available_cores", lambda: 64)
    monkeypatch.setattr(cpu_runner, "COLUMN_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(cpu_runner, "WORK_PER_THREAD", 1)


def numbers(calls):
    return [(call.tokens, call.logprobs) for call in calls]


@pytest.mark.parametrize("block_size", [0, 7, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_torchs(family, block_size, divided_by, threads):
    model = made(family)
    ours = LocalEngine(model, 100, 8, 900, block_size)
    theirs = LocalEngine(model, 100, 8, 900, block_size, compiled=False)
    assert isinstance(ours.runner, CpuModelRunner)
    assert isinstance(theirs.runner, TorchModelRunner)
    same(converse(ours), converse(theirs), 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_that_share_columns_compute_the_same_bits_as_threads_with_their_own_tokens(family, monkeypatch):
    model, found = made(family), []
    use_many_threads(monkeypatch)
    before = torch.get_num_threads()
    try:
        for size, count in ((2**60, 1), (2**60, 3), (0, 2), (0, 3), (0, 16)):
            torch.set_num_threads(count)
            monkeypatch.setattr(cpu_runner, "COLUMN_MODE_BYTES", size)
            engine = LocalEngine(model, 100, 8, 900)
            assert engine.runner.shares_columns(5) == (size == 0)
            found.append(numbers(converse(engine)))
    finally:
        torch.set_num_threads(before)
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize(
    ("size", "tokens", "threads", "parts"),
    [
        (8, 8, 16, 1),
        (8, 64, 16, 8),
        (25, 8, 16, 2),
        (25, 64, 16, 16),
        (154, 8, 16, 9),
        (513, 1, 16, 16),
        (513, 1, 4, 4),
    ],
)  # fmt: skip
def test_a_step_uses_no_more_threads_than_its_work_is_worth(size, tokens, threads, parts, seedling, monkeypatch):
    """Megabytes of weights, tokens of the step, threads of torch; the numbers are measured (docs/results/engine.md)."""
    monkeypatch.setattr(cpu_runner, "available_cores", lambda: 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = LocalEngine(seedling[0], 100).runner
        runner.weight_bytes = size * 2**20
        assert len(runner._partition(np.arange(1, tokens + 1), runner.shares_columns(tokens))) - 1 == parts
    finally:
        torch.set_num_threads(before)


def test_threads_share_columns_only_of_large_weights_and_in_steps_of_few_tokens(seedling, threads):
    runner = LocalEngine(seedling[0], 100).runner
    assert not runner.shares_columns(8)
    runner.weight_bytes = 500 * 2**20
    assert runner.shares_columns(8) == (torch.get_num_threads() > 1)
    assert not runner.shares_columns(5000)


def test_a_tokens_numbers_depend_neither_on_its_neighbours_nor_on_threads(seedling, threads, divided_by):
    model, _ = seedling
    together = converse(LocalEngine(model, 200))
    alone = converse(LocalEngine(model, 200, deterministic=True))
    same(together, alone, 0.0)


def test_a_prompt_in_the_hands_of_several_threads_is_read_as_by_one(seedling, threads, divided_by):
    model, _ = seedling
    ours = converse(LocalEngine(model, 400), [{}], [333])
    same(ours, converse(LocalEngine(model, 400, compiled=False), [{}], [333]), 5e-5)


MANY_THREADS = """
import asyncio, torch
from arborl.engines.local import LocalEngine, cpu_runner
from arborl.engines.local.cpu_runner import CpuModelRunner
from arborl.models.model_loading import load_model, resolve
from arborl.types import Sampling

cpu_runner.available_cores = lambda: 64  # more threads than cores
model = load_model(resolve("seedling"), device="cpu")
engines = [LocalEngine(model, 450), LocalEngine(model, 450)]
assert all(isinstance(engine.runner, CpuModelRunner) for engine in engines)
first = {}
for threads in (1, 2, 7, 8, 33, 64, 2, 40):
    torch.set_num_threads(threads)
    for engine in engines:
        asyncio.run(engine.load({}, threads))  # so that nothing of the prompt is known
        completion = asyncio.run(engine.generate([3 + n % 90 for n in range(400)], Sampling(3, seed=7), session="a"))
        assert completion.tokens == first.setdefault("tokens", completion.tokens), threads
    print(threads, flush=True)
"""


def test_a_long_prompt_is_read_on_more_threads_than_cores_and_their_number_may_change(tmp_path):
    script = tmp_path / "many_threads.py"
    script.write_text(MANY_THREADS)
    output, _ = Forked([str(script)]).communicate(timeout=120)  # a process that can be killed where it hangs
    assert output.split()[-8:] == ["1", "2", "7", "8", "33", "64", "2", "40"], output


def test_where_the_system_starts_no_more_threads_fewer_read_the_prompt(seedling, monkeypatch):
    use_many_threads(monkeypatch)
    model, _ = seedling
    alone = converse(LocalEngine(model, 400), [{}], [333])
    start, started = threading.Thread.start, []

    def refusing(thread):
        if thread.name.startswith("sampling") and len(started) >= 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        same(converse(LocalEngine(model, 400), [{}], [333]), alone, 1e-4 if IS_ARM else 0.0)
    finally:
        torch.set_num_threads(before)
    assert len(started) == 2


def test_adapters_are_in_what_is_sampled_and_follow_an_update():
    model = made("qwen2")
    model.add_adapter(peft.LoraConfig(r=3, lora_alpha=7, target_modules="all-linear"), "default")
    ours, theirs = LocalEngine(model, 100), LocalEngine(model, 100, compiled=False)
    assert isinstance(ours.runner, CpuModelRunner)
    before = converse(ours)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name or "layernorm" in name:
                p.add_(torch.randn_like(p) * 0.2)
    for engine in (ours, theirs):
        asyncio.run(engine.load({}, 1))
    after = converse(ours)
    same(after, converse(theirs), 2e-5)
    assert [c.tokens for c in after] != [c.tokens for c in before]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_it_samples_from_the_weights_it_was_given_last_while_a_learner_writes_into_its_own(family):
    model = made(family)
    engine = LocalEngine(model, 100)
    assert not engine.shares_weights
    asyncio.run(engine.load({}, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    same(converse(engine), converse(LocalEngine(made(family), 100)), 0.0)
    asyncio.run(engine.load({}, 2))
    same(converse(engine), converse(LocalEngine(model, 100)), 0.0)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"torch_dtype": torch.float64}], ids=["another activation", "another precision"]
)
def test_a_model_it_cannot_run_goes_torchs_way(change):
    dtype = change.pop("torch_dtype", torch.float32)
    model = LlamaForCausalLM(LlamaConfig(**ODD, num_key_value_heads=3, **change)).to(dtype)
    assert isinstance(LocalEngine(model.eval(), 64).runner, TorchModelRunner)


def test_without_a_compiler_that_works_there_is_none_and_nothing_breaks(monkeypatch, tmp_path, caplog):
    for compiler in (str(tmp_path / "nowhere"), "false"):
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert load_c_library.__wrapped__(SOURCE) is None
        assert compiler in caplog.text


def test_a_user_without_a_home_samples_torchs_way(monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert load_c_library.__wrapped__(SOURCE) is None
    assert "home directory" in caplog.text


def test_what_is_compiled_is_kept_and_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "two.c"
    source.write_text("int two(void) { return 2; }")
    assert load_c_library.__wrapped__(source).two() == 2
    (kept,) = (tmp_path / "arborl").iterdir()
    made_at = kept.stat().st_mtime_ns
    assert load_c_library.__wrapped__(source).two() == 2
    assert kept.stat().st_mtime_ns == made_at
