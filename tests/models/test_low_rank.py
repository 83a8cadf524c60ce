"""A layer under an adapter gives peft's numbers and gradients, and keeps its input once."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig as PeftConfig
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from arborl.config.run_config import LoraConfig
from arborl.models.attention import ATTENTION_NAME
from arborl.models.fused_linear import lora_linear
from arborl.models.lora import ADAPTER_NAME, add_lora


def model_of(dtype: torch.dtype = torch.float32, bias: bool = True, **lora):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=bias,
    )).to(dtype).eval()  # fmt: skip
    model.set_attn_implementation(ATTENTION_NAME)
    add_lora(model, LoraConfig(**{"rank": 4, "alpha": 8} | lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def one_of(model) -> nn.Module:
    return model.base_model.layers[0].self_attn.q_proj


def results(run, module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("bias", [True, False])
def test_a_layers_output_and_gradients_are_those_of_peft(bias):
    module = one_of(model_of(torch.float64, bias).double())
    x = torch.randn(7, 32, dtype=torch.float64)
    ours, theirs = results(lambda x: lora_linear(module, x), module, x), results(module, module, x)
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_in_bfloat16_the_factors_gradients_are_float32_and_near_those_of_peft():
    module = one_of(model_of(torch.bfloat16))
    x = torch.randn(64, 32).bfloat16()
    ours, theirs = results(lambda x: lora_linear(module, x), module, x), results(module, module, x)
    assert [one.dtype for one in ours] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine.float() - other.float()).norm() / other.float().norm()) < 0.02


def test_layers_that_read_one_input_keep_it_once_and_in_its_own_precision():
    attention = model_of(torch.bfloat16).base_model.layers[0].self_attn
    x = torch.randn(500, 32).bfloat16().requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = [lora_linear(module, x) for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
    long = [tensor for tensor in kept.values() if len(tensor) == len(x)]
    assert sum(tensor.nbytes for tensor in long) == x.nbytes + 3 * 500 * 4 * 2


def test_what_drops_and_what_is_not_plain_goes_through_pefts_own_module():
    module = one_of(model_of(dropout=0.5))
    x = torch.randn(5, 32)
    assert torch.allclose(lora_linear(module, x), module(x), atol=1e-6)
    module.train()
    torch.manual_seed(1)
    ours = lora_linear(module, x)
    torch.manual_seed(1)
    assert torch.equal(ours, module(x))
    module.eval()
    module.enable_adapters(False)
    assert torch.equal(lora_linear(module, x), module.base_layer(x))
    magnitude = PeftConfig(r=4, use_dora=True, target_modules=["q_proj"])
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                         num_attention_heads=4, num_key_value_heads=2)).eval()  # fmt: skip
    plain.add_adapter(magnitude, ADAPTER_NAME)
    assert torch.equal(lora_linear(one_of(plain), x), one_of(plain)(x))
    linear = nn.Linear(32, 3)
    assert torch.equal(lora_linear(linear, x), linear(x))
