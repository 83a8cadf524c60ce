"""The optimiser's numbers in the host's memory: the GPU holds less, and the weights become the same."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.config.run_config import LearnerConfig
from arborl.learner.core import offload
from arborl.learner.core.learner import Learner
from arborl.models.attention import ATTENTION_NAME
from arborl.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    made = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    made.set_attn_implementation(ATTENTION_NAME)
    return made


def trained(model, mode: str, seed: int, folder=None) -> tuple[Learner, int]:
    """A learner after four steps of random gradients and its device memory; through a file if `folder` is given."""

    def fresh() -> Learner:
        config = LearnerConfig(lr=1e-3, decay="none", weight_decay=0.1, max_grad_norm=1e9, offload=mode)
        return Learner(copy.deepcopy(model), config, Sampling(), AlgorithmNeeds(reference=True))

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    learner = fresh()
    rng = torch.Generator("cuda").manual_seed(seed)
    for number in range(4):
        for parameter in learner.optimizer.parts["policy"].parameters:
            parameter.grad = torch.randn(parameter.shape, generator=rng, device="cuda").to(parameter.dtype)
            for hook in parameter._post_accumulate_grad_hooks.values():
                hook(parameter)
        learner.optimizer.step(1.0)
        learner.optimizer.zero_grad()
        if number == 1 and folder is not None:
            learner.save(folder)
            learner = fresh()
            learner.load(folder)
    torch.cuda.synchronize()
    return learner, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("mode", ["optimizer", "all"])
def test_weights_are_those_of_a_run_that_keeps_everything_on_the_device(model, mode, monkeypatch, tmp_path):
    monkeypatch.setattr(offload, "OFFLOAD_CHUNK", 10**6)
    plain, all_of_it = trained(model, "none", 1)
    away, less = trained(model, mode, 1)
    for one, other in zip(away.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(
        away.optimizer.parts["policy"].copies(), plain.optimizer.parts["policy"].copies(), strict=True
    ):
        assert torch.equal(one.cuda(), other)
    numbers = sum(p.numel() for p in model.parameters())
    assert all_of_it - less > (12 if mode == "optimizer" else 14) * numbers * 0.95
    again, _ = trained(model, mode, 1, tmp_path)
    for one, other in zip(again.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_reference_in_the_hosts_memory_comes_and_goes(model):
    learner, _ = trained(model, "all", 1)
    held = torch.cuda.memory_allocated()
    weights = sum(p.nbytes for p in model.parameters())
    with learner.with_reference():
        assert torch.cuda.memory_allocated() - held > 0.95 * weights
        for one, other in zip(learner.reference.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
    assert abs(torch.cuda.memory_allocated() - held) < 2**20
