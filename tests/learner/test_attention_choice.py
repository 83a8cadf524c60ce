"""A way of running the model is gone only once it has given the dense way's numbers."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from learner_fakes import SAMPLING, forest_of, random_groups

from arborl.config.run import LoraConfig
from arborl.learner import attention_choice, executor, score
from arborl.learner.attention_choice import Ways, agrees, sample
from arborl.learner.executor import DENSE, EXECUTORS, Executor, Way, hidden
from arborl.learner.packing import branches, split
from arborl.learner.tree_attention import DenseAttend
from arborl.models.lean import is_lean
from arborl.models.lora import add_lora
from arborl.types import TokenTree


@pytest.fixture
def model(tiny_llama):
    """A model nothing has been found out about."""
    return copy.deepcopy(tiny_llama)


@pytest.fixture
def batch():
    return split(*forest_of(random_groups(4)), 10_000)[0]


class Blind(DenseAttend):
    """Sees only the tokens before it, whatever branch they are on."""

    def _mask(self, end, depth, window):
        return torch.ones(len(end), len(end), dtype=torch.bool).tril()


class Halved(DenseAttend):
    """Right in value, wrong in gradient."""

    def __call__(self, *given):
        out = super().__call__(*given)
        return out.detach() + 0.5 * (out - out.detach())


@pytest.mark.parametrize("wrong", [Blind, Halved])
def test_an_executor_that_differs_in_value_or_gradient_is_left_with_a_warning(monkeypatch, caplog, model, batch, wrong):
    monkeypatch.setitem(EXECUTORS, "blocks", Executor(wrong))
    choose = Ways(attention="blocks")
    assert choose(model, batch) == DENSE
    assert "blocks attention is not used for LlamaForCausalLM: it differs" in caplog.text
    caplog.clear()
    assert choose(model, batch) == DENSE
    assert not caplog.text  # said once


def test_one_that_breaks_is_left_and_the_warning_says_how(caplog, model, batch):
    choose = Ways(attention="flex")  # which refuses gradients on a CPU
    assert choose(model, batch) == DENSE
    assert "flex attention is not used" in caplog.text
    assert "NotImplementedError" in caplog.text


def test_one_that_agrees_is_used_and_not_checked_again(monkeypatch, model, batch):
    checked = []
    monkeypatch.setattr(attention_choice, "agrees", lambda model, way: checked.append(way) or True)
    choose = Ways(attention="blocks", recompute=True)
    assert [choose(model, batch), choose(model, batch)] == [Way("blocks", recompute=True)] * 2
    assert checked == [Way("blocks")]


def test_a_compiled_way_that_fails_leaves_the_same_way_not_compiled(monkeypatch, model, batch):
    monkeypatch.setattr(attention_choice, "agrees", lambda model, way: not way.compiled)
    assert Ways(attention="flex", compiled="on")(model, batch) == Way("flex")


def test_one_that_fails_leaves_the_next_best(monkeypatch, model, batch):
    monkeypatch.setattr(attention_choice, "cheapest", lambda batch, device: ("kernel", "flex", "blocks"))
    monkeypatch.setattr(attention_choice, "agrees", lambda model, way: way.attend == "blocks")
    assert Ways()(model, batch) == Way("blocks")


@pytest.mark.parametrize(
    ("compiled", "expected"),
    [
        ("auto", [Way("flex", fused=True), Way("flex", compiled=True), Way("flex")]),
        ("on", [Way("flex", compiled=True), Way("flex")]),
        ("off", [Way("flex", fused=True), Way("flex")]),
    ],
)
def test_layers_are_fused_or_compiled_as_asked_and_plain_at_last(monkeypatch, model, batch, compiled, expected):
    assert is_lean(model)
    monkeypatch.setattr(attention_choice, "fusing_fits", lambda model: True)
    monkeypatch.setattr(attention_choice, "LAYERS_ON_GPU", ("fused", "compiled"))
    monkeypatch.setattr(attention_choice, "agrees", lambda model, way: tried.append(way))
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    tried = []
    assert Ways("flex", compiled)(model, batch) == DENSE
    assert tried == expected


def test_checking_leaves_gradients_and_the_random_state_alone(model):
    before = torch.get_rng_state()
    assert agrees(model, Way("blocks"))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("chain", [True, False])
def test_the_sample_is_a_tree_that_branches_twice_or_a_chain(model, chain):
    batch = sample(model, chain, 40)
    assert batch.is_chains == chain
    assert len(branches(TokenTree(batch.tokens, batch.depth, batch.end))) == (1 if chain else 4)


@pytest.mark.parametrize("kind", ["lean", "library"])
def test_recomputation_gives_the_same_gradients_and_keeps_less(model, batch, kind, monkeypatch):
    if kind == "library":
        monkeypatch.setattr(executor, "is_lean", lambda model: False)
    training = [module.training for module in model.modules()]
    kept, found = [], []
    for recompute in (False, True):
        count = [0]

        def pack(x, count=count):
            count[0] += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = hidden(model, batch, Way("dense", recompute=recompute))
        found.append(torch.autograd.grad(out.square().sum(), list(model.model.parameters())))
        kept.append(count[0])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert kept[1] < 0.5 * kept[0]
    assert [module.training for module in model.modules()] == training


@pytest.fixture
def compiled_anew():
    """Nothing compiled before, and nothing left for others."""
    made = (executor.compiled_layers, score.compiled_head)
    torch._dynamo.reset()
    for function in made:
        function.cache_clear()
    yield
    for function in made:
        function.cache_clear()
    torch._dynamo.reset()


def test_of_all_sizes_only_the_number_of_tokens_is_left_open_when_compiled(
    monkeypatch, flex_on_cpu, compiled_anew, model
):
    """A weight of unknown size makes code that does not compile on a GPU, or is slow."""
    seen = {}

    def look(module, inputs):
        for node in module.graph.nodes:
            if node.op == "placeholder" and hasattr(node.meta.get("example_value"), "shape"):
                seen[node.name] = [not str(size).isdigit() for size in node.meta["example_value"].shape]
        return module.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=look))
    with torch.no_grad():
        assert agrees(model, Way("flex", compiled=True))
    assert seen["l_x_ne_"] == [True, False]
    assert any("joined" in name for name in seen)
    assert not any(any(sizes) for name, sizes in seen.items() if "weight" in name or "bias" in name)


def test_layers_and_head_are_compiled_once_for_all_layers_and_sizes(monkeypatch, flex_on_cpu, compiled_anew, model):
    """Traced for real, run without code generation: what a GPU will compile has no breaks and few forms."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    assert agrees(model, Way("flex", compiled=True))
    counters = torch._dynamo.utils.counters["stats"]
    graphs = []
    for groups in (4, 8, 12):
        batch = split(*forest_of(random_groups(groups, groups=groups, longest=30)), 10_000)[0]
        both = []
        for way in (Way("flex", compiled=True), DENSE):
            said = score.score(model, batch, SAMPLING, way)
            both.append(torch.autograd.grad(said.logprob_M.sum(), list(model.parameters())))
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        graphs.append(counters["unique_graphs"])
    assert graphs[1] == graphs[2]  # by the third size nothing is new


@pytest.mark.parametrize("gradient", [pytest.param(True, marks=pytest.mark.slow), False])
def test_layers_with_adapters_can_be_compiled(monkeypatch, flex_on_cpu, compiled_anew, model, gradient):
    pytest.importorskip("peft")
    add_lora(model, LoraConfig(rank=2, alpha=4))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    with torch.set_grad_enabled(gradient):
        assert agrees(model, Way("flex", compiled=True))


def test_a_way_that_fails_without_gradients_is_not_gone_without_them(monkeypatch, model, batch):
    """Code for the two is compiled apart, and one may fail where the other does not."""

    def works(model, way):
        return not way.compiled or torch.is_grad_enabled()

    monkeypatch.setattr(attention_choice, "agrees", works)
    chosen = Ways(attention="flex", compiled="on")
    assert chosen(model, batch) == Way("flex", compiled=True)
    with torch.no_grad():
        assert chosen(model, batch) == Way("flex")


def test_a_way_is_checked_where_no_matrix_is_trained(model):
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    assert agrees(model, Way("blocks"))
