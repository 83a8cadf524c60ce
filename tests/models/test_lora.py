"""Adapters: only they are trained and saved, engine and learner share them, and off, the model is the old one."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.config.load_config import load
from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.engines.local import LocalEngine
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.models.fast_forward import fast_hidden_states, has_fast_forward
from arborl.models.lora import adapter_copy, add_lora, dropout_on, export_merged, has_lora, load_4bit, with_adapter
from arborl.models.model_loading import load_model, resolve
from arborl.rollout.token_trees import build_token_trees
from arborl.training_run.build import build
from arborl.types import Call, Completion, Episode, FinishReason, Group, Sampling, Task

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def plain():
    return load_model(resolve("seedling"), device="cpu")


@pytest.fixture
def adapted(plain):
    """The embedded model with adapters that do something."""
    model = copy.deepcopy(plain)
    torch.manual_seed(1)
    add_lora(model, LoraConfig(rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        out = model(ids).logits
    model.set_attn_implementation("arbor")
    return out


IDS = torch.arange(1, 30)[None]


class Simple:
    """Makes what was sampled likelier."""

    trust_region = None
    whole = False

    def __init__(self, reference: bool = False):
        self.needs = AlgorithmNeeds(reference=reference)

    def count(self, terms):
        return float(len(terms))

    def loss(self, outputs, terms):
        return -outputs.logprob_M * terms.advantage_M, {}


def forest():
    rng = np.random.default_rng(0)
    prompt = tuple(rng.integers(0, 500, 12).tolist())
    calls = [
        Call(prompt, Completion(tuple(rng.integers(0, 500, 6).tolist()), (-5.0,) * 6, FinishReason.STOP), 0)
        for _ in range(3)
    ]
    made = build_token_trees([Group(Task("t"), [Episode("e", Task("t"), calls=calls)])])
    made.terms.advantage[:] = 1.0
    made.terms.weight[:] = 1.0 / len(made.terms)
    return made


def test_only_adapters_are_trained_and_the_rest_stays_bit_for_bit(plain, adapted):
    learner = Learner(adapted, LearnerConfig(lr=1e-2, decay="none"), Sampling())
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    made = forest()
    first = learner.update(made.trees, made.terms, Simple())
    second = learner.update(made.trees, made.terms, Simple())
    assert second["policy/loss"] < first["policy/loss"]
    for name, parameter in adapted.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert 0 < trained < 0.1 * plain.num_parameters()


def test_with_other_adapters_the_model_is_another_and_afterwards_itself(adapted):
    before, was = logits(adapted, IDS), adapter_copy(adapted)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05)
    after = logits(adapted, IDS)
    with with_adapter(adapted, was):
        assert torch.equal(logits(adapted, IDS), before)
    assert torch.equal(logits(adapted, IDS), after)
    assert float((after - before).abs().max()) > 0.01
    assert all(p.requires_grad == ("lora_" in name) for name, p in adapted.named_parameters())


@pytest.mark.parametrize("fresh", [True, False], ids=["from the base", "from adapters"])
def test_the_reference_is_the_policy_as_the_run_began_and_costs_no_copy_of_the_model(plain, adapted, tmp_path, fresh):
    """The base under adapters that do nothing yet; with them, where a run begins from some. And after resuming."""
    if fresh:
        adapted = copy.deepcopy(plain)
        add_lora(adapted, LoraConfig(rank=4, alpha=8))
    needs, made = AlgorithmNeeds(reference=True, proximal=True), forest()
    began = copy.deepcopy(adapted)
    start = Learner(began, LearnerConfig(), Sampling()).logprobs(made.trees, made.terms).numpy()
    base = Learner(plain, LearnerConfig(), Sampling()).logprobs(made.trees, made.terms).numpy()
    assert (np.abs(start - base).max() < 1e-4) == fresh
    learner = Learner(adapted, LearnerConfig(lr=1e-2, decay="none"), Sampling(), needs)
    assert learner.reference is None
    learner.update(made.trees, made.terms, Simple())
    found = learner.score_terms(made.trees, made.terms, needs)
    np.testing.assert_allclose(found.reference, start, atol=1e-5)
    assert np.abs(found.proximal - start).max() > 0.01
    learner.save(tmp_path)
    resumed = Learner(copy.deepcopy(adapted), LearnerConfig(lr=1e-2, decay="none"), Sampling(), needs)  # wherever it is
    resumed.load(tmp_path)
    again = resumed.score_terms(made.trees, made.terms, needs)
    assert (again.reference == found.reference).all()
    assert (again.proximal == found.proximal).all()


def test_the_engine_samples_from_the_adapted_model_and_sees_updates(adapted):
    """Law 3 under adapters: the rollout's log-probabilities are the learner's, before and after a step."""
    engine = LocalEngine(adapted, max_context=64)
    learner = Learner(adapted, LearnerConfig(lr=1e-2, decay="none"), Sampling())
    prompt = tuple(range(1, 12))
    for version in range(2):
        asyncio.run(engine.load(learner.weights(), version))
        done = asyncio.run(engine.generate(list(prompt), Sampling(8, seed=3), session="s"))
        made = build_token_trees([Group(Task("t"), [Episode("e", Task("t"), calls=[Call(prompt, done, 0)])])])
        scored = learner.logprobs(made.trees, made.terms).numpy()
        np.testing.assert_allclose(scored, done.logprobs, atol=1e-4)
        update = forest()
        learner.update(update.trees, update.terms, Simple())


def test_a_checkpoint_holds_the_adapters_alone_and_goes_on_bit_for_bit(plain, adapted, tmp_path):
    made = forest()
    learner = Learner(adapted, LearnerConfig(lr=1e-2, decay="none"), Sampling())
    learner.update(made.trees, made.terms, Simple())
    learner.save(tmp_path)
    size = sum(f.stat().st_size for f in (tmp_path / "model").iterdir())
    assert size < 0.2 * 4 * plain.num_parameters()
    other = copy.deepcopy(plain)
    add_lora(other, LoraConfig(rank=4, alpha=8))
    resumed = Learner(other, LearnerConfig(lr=1e-2, decay="none"), Sampling())
    resumed.load(tmp_path)
    for one in (learner, resumed):
        one.update(made.trees, made.terms, Simple())
    ours, theirs = other.state_dict(), adapted.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_dropout_is_the_same_after_a_restart(plain, tmp_path):
    """Law 7: what is dropped follows from the seed and the step, not from what was drawn before in this process."""
    made, config = forest(), LearnerConfig(lr=1e-2, decay="none")

    def fresh(seed: int = 3) -> Learner:
        torch.manual_seed(1)
        model = copy.deepcopy(plain)
        add_lora(model, LoraConfig(rank=4, alpha=8, dropout=0.3))
        return Learner(model, config, Sampling(), seed=seed)

    whole = fresh()
    whole.update(made.trees, made.terms, Simple())
    whole.save(tmp_path)
    whole.update(made.trees, made.terms, Simple())
    resumed = fresh()
    resumed.load(tmp_path)
    torch.manual_seed(77)
    resumed.update(made.trees, made.terms, Simple())
    ours, theirs = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    other = fresh(seed=4)
    other.update(made.trees, made.terms, Simple())
    assert not all(torch.equal(value, theirs[name]) for name, value in other.model.state_dict().items())


def test_plain_transformers_loads_the_checkpoint_and_adapters_are_not_added_twice(adapted, tmp_path):
    Learner(adapted, LearnerConfig(), Sampling()).save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    torch.testing.assert_close(loaded(IDS).logits.detach(), logits(adapted, IDS), rtol=1e-4, atol=1e-4)
    again = load_model(tmp_path / "model", device="cpu")
    assert has_lora(again)
    add_lora(again, LoraConfig(rank=4, alpha=8))
    assert all(p.requires_grad == ("lora_" in name) for name, p in again.named_parameters())
    torch.testing.assert_close(logits(again, IDS), logits(adapted, IDS), rtol=1e-4, atol=1e-4)


def test_a_run_from_a_folder_of_adapters_goes_on_with_them(adapted, tmp_path):
    Learner(adapted, LearnerConfig(), Sampling()).save(tmp_path)
    for file in resolve("seedling").iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, tmp_path / "model")
    parts = build(load(None, [f"model={tmp_path / 'model'}", "algorithm.kl.coef=0.1", "model.device=cpu"]))
    trained = {name for name, p in parts.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    start = {name: p.detach() for name, p in adapted.named_parameters() if "lora_" in name}
    assert all(torch.equal(value, start[name]) for name, value in parts.learner.reference_adapter.items())
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=3: the adapters of model\.name have"):
        build(load(None, [f"model={tmp_path / 'model'}", "model.lora.rank=3", "model.device=cpu"]))


def test_the_merged_export_is_an_ordinary_model_that_says_the_same(adapted, tmp_path):
    export_merged(adapted, tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not any("lora" in name for name in loaded.state_dict())
    torch.testing.assert_close(loaded(IDS).logits.detach(), logits(adapted, IDS), rtol=1e-4, atol=1e-4)
    assert has_lora(adapted)


def test_adapters_that_were_read_from_a_folder_are_merged_alike(adapted, tmp_path):
    Learner(adapted, LearnerConfig(), Sampling()).save(tmp_path)
    export_merged(load_model(tmp_path / "model", device="cpu"), tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(loaded(IDS).logits.detach(), logits(adapted, IDS), rtol=1e-4, atol=1e-4)


def test_adapters_of_a_coarse_model_are_float32(plain):
    model = copy.deepcopy(plain).bfloat16()
    add_lora(model, LoraConfig(rank=2, target=("q_proj", "v_proj")))
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    assert kinds == {torch.float32}
    assert {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad} == {"q_proj", "v_proj"}
    made = forest()
    metrics = Learner(model, LearnerConfig(lr=1e-3), Sampling()).update(made.trees, made.terms, Simple())
    assert metrics["learner/skipped"] == 0.0


def test_dropout_drops_only_while_gradients_are_taken(plain):
    model = copy.deepcopy(plain)
    add_lora(model, LoraConfig(rank=4, dropout=0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    assert torch.equal(logits(model, IDS), logits(model, IDS))
    rng = torch.get_rng_state()
    logits_by_seed = {}
    for seed in (1, 1, 2):
        with dropout_on(model, seed):
            first, second = logits(model, IDS), logits(model, IDS)
        assert not torch.equal(first, second)
        assert torch.equal(logits_by_seed.setdefault(seed, first), first)
    assert not torch.equal(logits_by_seed[1], logits_by_seed[2])
    assert torch.equal(torch.get_rng_state(), rng)  # the global generator is unchanged
    assert not any(module.training for module in model.modules())


def test_a_target_that_does_not_exist_names_those_that_do(plain):
    with pytest.raises(ConfigError, match=r"q_proj.*up_proj"):
        add_lora(copy.deepcopy(plain), LoraConfig(rank=4, target=("query",)))


@pytest.mark.parametrize("package", ["peft", "bitsandbytes"])
def test_a_missing_package_is_named_with_what_to_write_instead(plain, monkeypatch, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    ask = {
        "peft": lambda: add_lora(copy.deepcopy(plain), LoraConfig(rank=4)),
        "bitsandbytes": lambda: load_4bit(resolve("seedling"), "bfloat16", "cpu"),
    }
    with pytest.raises(ConfigError, match=package):
        ask[package]()


def test_four_bits_without_adapters_are_refused():
    with pytest.raises(ConfigError, match=r"model\.lora\.rank"):
        load(None, ["model.quantize=4bit"])


def test_the_lean_forward_goes_through_the_adapters(adapted, plain):
    from arborl.models.attention import CausalAttention

    assert has_fast_forward(adapted)
    tokens, positions = IDS[0], torch.arange(IDS.shape[1])
    with torch.no_grad():
        new, old = (fast_hidden_states(model, tokens, positions, CausalAttention()) for model in (adapted, plain))
    torch.testing.assert_close(adapted.lm_head(new)[None], logits(adapted, IDS), rtol=1e-4, atol=1e-4)
    assert float((new - old).abs().max()) > 0.01
