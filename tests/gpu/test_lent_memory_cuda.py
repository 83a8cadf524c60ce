"""Memory of a GPU that is given back and taken again under the tensors and graphs that use it."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from arborl.engines.local import LocalEngine
from arborl.engines.local.sleepable_memory import SleepableMemory
from arborl.models.attention import ATTENTION_NAME
from arborl.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GIB = 2**30


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_what_is_given_back_is_free_and_comes_again_at_the_same_address():
    before = free()
    memory = SleepableMemory(2 * GIB + 5, torch.device("cuda"))
    tensor = memory.tensor()
    assert tensor.shape == (2 * GIB + 5,)
    tensor.fill_(7)
    address = tensor.data_ptr()
    assert before - free() >= 2 * GIB
    memory.sleep()
    assert before - free() < 0.1 * GIB
    memory.wake_up()
    tensor.fill_(8)
    assert int(tensor[-1]) == 8
    assert tensor.data_ptr() == address
    del tensor, memory
    assert before - free() < 0.1 * GIB


def test_what_torch_keeps_for_later_is_given_up_for_it():
    memory = SleepableMemory(4 * GIB, torch.device("cuda"))
    memory.sleep()
    held = torch.empty(torch.cuda.mem_get_info()[0] - 2 * GIB, dtype=torch.uint8, device="cuda")
    del held  # torch keeps it
    assert torch.cuda.mem_get_info()[0] < 3 * GIB
    memory.wake_up()
    memory.tensor().zero_()
    torch.cuda.synchronize()


def test_graphs_recorded_before_sample_the_same_afterwards():
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    engine = LocalEngine(model, max_context=128, max_requests=8, kv_tokens=2000, sleep_mode=True)

    async def generate_all():
        prompts = [list(range(3 + i, 30 + 2 * i)) for i in range(6)]
        return await asyncio.gather(
            *(engine.generate(p, Sampling(20, seed=i), session=str(i)) for i, p in enumerate(prompts))
        )

    async def twice():
        first = await generate_all()
        graphs = len(engine.runner.graphs)
        await engine.pause()
        await engine.sleep()
        other = torch.full((2**28,), float("nan"), device="cuda")
        await engine.load({}, 1)
        engine.resume()
        del other
        second = await generate_all()
        assert graphs
        assert len(engine.runner.graphs) == graphs
        return first, second

    first, second = asyncio.run(twice())
    assert [one.tokens for one in first] == [one.tokens for one in second]
    assert [one.logprobs for one in first] == [one.logprobs for one in second]
