"""An execution path is used only after it has given the numbers of dense attention."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from learner_fakes import forest_of, random_groups
from transformers import LlamaConfig, LlamaForCausalLM

from arborl.learner.attention import path_selection
from arborl.learner.attention.cpu_kernels import supports_cpu_attention
from arborl.learner.attention.path_selection import (
    ATTENTION_BACKENDS,
    DENSE,
    AttentionBackend,
    ExecutionPath,
    PathSelector,
    hidden_states,
    path_error,
    sample_micro_batch,
)
from arborl.learner.attention.tree_attention import DenseAttention
from arborl.learner.core.packing import branch_starts, split
from arborl.models.fast_forward import has_fast_forward
from arborl.models.fused_linear import FUSED_ATTRIBUTE
from arborl.models.model_loading import compute_device, set_compute_device
from arborl.types import TokenTree


@pytest.fixture
def model(tiny_llama):
    """A model nothing has been found out about."""
    return copy.deepcopy(tiny_llama)


@pytest.fixture
def batch():
    return split(*forest_of(random_groups(4)), 10_000)[0]


class Blind(DenseAttention):
    """Sees only the tokens before it, whatever branch they are on."""

    def _mask(self, end, depth, window):
        return torch.ones(len(end), len(end), dtype=torch.bool).tril()


class Halved(DenseAttention):
    """Right in value, wrong in gradient."""

    def __call__(self, *given):
        out = super().__call__(*given)
        return out.detach() + 0.5 * (out - out.detach())


@pytest.mark.parametrize("wrong", [Blind, Halved])
def test_a_backend_with_wrong_values_or_gradients_is_not_used_and_reported(monkeypatch, caplog, model, batch, wrong):
    monkeypatch.setitem(ATTENTION_BACKENDS, "blocks", AttentionBackend(wrong))
    choose = PathSelector(attention="blocks")
    assert choose(model, batch) == DENSE
    assert "learner runs LlamaForCausalLM without tree kernels" in caplog.text
    assert "as far off as rounding explains" in caplog.text
    caplog.clear()
    assert choose(model, batch) == DENSE
    assert not caplog.text  # the warning appears once


class Broken(DenseAttention):
    def __call__(self, *given):
        raise NotImplementedError("no such device")


def test_a_backend_that_raises_is_not_used_and_the_warning_has_the_error(monkeypatch, caplog, model, batch):
    monkeypatch.setitem(ATTENTION_BACKENDS, "blocks", AttentionBackend(Broken))
    assert PathSelector(attention="blocks")(model, batch) == DENSE
    assert "blocks attention: NotImplementedError: no such device" in caplog.text


def test_a_correct_backend_is_used_and_checked_once(monkeypatch, model, batch):
    checked = []
    monkeypatch.setattr(path_selection, "path_error", lambda model, way: checked.append(way))
    choose = PathSelector(attention="blocks", recompute=True)
    assert [choose(model, batch), choose(model, batch)] == [ExecutionPath("blocks", recompute=True)] * 2
    assert checked == [ExecutionPath("blocks")]


def test_block_attention_replaces_kernels_that_fail(monkeypatch, model, batch):
    monkeypatch.setattr(path_selection, "cheapest_attention", lambda batch, device: "kernel")
    monkeypatch.setitem(ATTENTION_BACKENDS, "kernel", AttentionBackend(DenseAttention))
    monkeypatch.setattr(path_selection, "path_error", lambda model, way: None if way.attention == "blocks" else "so")
    assert PathSelector()(model, batch) == ExecutionPath("blocks")


def test_layers_are_fused_where_they_can_be_and_plain_at_last(monkeypatch, model, batch):
    assert has_fast_forward(model)
    monkeypatch.setattr(path_selection, "supports_fused_layers", lambda model: True)
    monkeypatch.setattr(path_selection, "path_error", lambda model, way: tried.append(way) or "so")
    tried = []
    assert PathSelector("blocks")(model, batch) == DENSE
    assert tried == [ExecutionPath("blocks", fused=True), ExecutionPath("blocks")]


def test_checking_leaves_gradients_and_the_random_state_alone(model):
    before = torch.get_rng_state()
    assert path_error(model, ExecutionPath("blocks")) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["fast", "library"])
def test_recomputation_gives_the_same_gradients_and_keeps_less(model, batch, kind, monkeypatch):
    if kind == "library":
        monkeypatch.setattr(path_selection, "has_fast_forward", lambda model: False)
    training = [module.training for module in model.modules()]
    kept, found = [], []
    for recompute in (False, True):
        count = [0]

        def pack(x, count=count):
            count[0] += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = hidden_states(model, batch, ExecutionPath("dense", recompute=recompute))
        found.append(torch.autograd.grad(out.square().sum(), list(model.model.parameters())))
        kept.append(count[0])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert kept[1] < 0.5 * kept[0]
    assert [module.training for module in model.modules()] == training


def test_a_path_that_fails_with_gradients_may_be_used_without(monkeypatch, model, batch):
    def why(model, way):
        return "gradients" if way.fused and torch.is_grad_enabled() else None

    monkeypatch.setattr(path_selection, "supports_fused_layers", lambda model: True)
    monkeypatch.setattr(path_selection, "path_error", why)
    chosen = PathSelector(attention="blocks")
    assert chosen(model, batch) == ExecutionPath("blocks")
    with torch.no_grad():
        assert chosen(model, batch) == ExecutionPath("blocks", fused=True)


def test_a_way_is_checked_where_no_matrix_is_trained(model):
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    assert path_error(model, ExecutionPath("blocks")) is None


def test_a_model_that_is_left_to_the_library_lets_go_of_joined_weights(model):
    """A body of 7B kept 20 GiB of a GPU for products that it no longer ran."""
    assert has_fast_forward(model)
    joined = weakref.ref(model.model.layers[0].self_attn.__dict__[FUSED_ATTRIBUTE].weight)
    PathSelector.check_all(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    gc.collect()
    assert joined() is None


def test_paths_are_selected_for_the_precision_of_a_sharded_model():
    """Its own parts are float32, and to ask them what fits bfloat16 would run it in the middle of an update."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=2)).bfloat16()  # fmt: skip
    set_compute_device(model, compute_device(model))
    model.float()
    assert not supports_cpu_attention(model)


@pytest.mark.parametrize("chain", [True, False])
def test_the_sample_is_a_tree_that_branches_twice_or_a_chain(model, chain):
    batch = sample_micro_batch(model, chain, 40)
    assert batch.is_unbranched == chain
    assert len(branch_starts(TokenTree(batch.tokens, batch.depth, batch.end))) == (1 if chain else 4)
