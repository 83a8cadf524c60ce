"""Custom advantages and losses: inputs by name, equality with built-in ones, and their check."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from algorithm_batches import batch_of, episode, group, model_outputs, random_groups, terms_of

from arborl.algorithms import ADVANTAGES, LOSSES, Recipe, make_algorithm
from arborl.algorithms.custom_functions import small_groups, small_terms, term_batch
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.config_base import validate
from arborl.errors import ConfigError


def recipe(advantage=None, loss=None, check: bool = True, **settings) -> Recipe:
    """An algorithm of functions that are handed in."""
    objects = {"object:a": advantage, "object:l": loss}
    given = ({"advantage": "object:a"} if advantage else {}) | ({"loss": "object:l"} if loss else {})
    return make_algorithm(AlgorithmConfig(**settings | given), lambda name, kind: objects[name], check)


def leave_one_out(rewards, scale: float = 1.0):
    return [scale * (r - (r.sum() - r) / max(len(r) - 1, 1)) if len(r) > 1 else 0 * r for r in rewards]


def tanh_gate(new, old, advantage, tau: float = 1.0, tau_bad: float = 1.05):
    """SAPO's sigmoid gate, in tanh."""
    ratio = (new - old).exp()
    t = torch.where(advantage > 0, tau, tau_bad)
    return -2 / t * (1 + torch.tanh(t / 2 * (ratio - 1))) * advantage, {"gate": ratio.detach()}


def test_custom_functions_equal_to_built_in_ones_give_equal_numbers():
    groups = random_groups(2)
    terms = terms_of(groups)
    ours = recipe(leave_one_out, tanh_gate)
    theirs = Recipe(AlgorithmConfig(advantage="rloo", loss="sapo"))
    credited = ours.credit(groups, terms)
    np.testing.assert_allclose(credited.advantage, theirs.credit(groups, terms).advantage, atol=1e-12)
    batch = batch_of(credited)
    new = (batch.old_M + 0.3 * torch.sin(torch.arange(len(terms)))).requires_grad_()
    found, parts = ours.loss(model_outputs(new), batch)
    expected, _ = theirs.loss(model_outputs(new), batch)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert set(parts) == {"policy/gate"}
    ours_grad, theirs_grad = (torch.autograd.grad(loss.sum(), new)[0] for loss in (found, expected))
    torch.testing.assert_close(ours_grad, theirs_grad, atol=1e-6, rtol=0)


def test_every_documented_input_is_passed():
    seen = {}

    def advantage(groups, terms, rewards, memory, value, keep=3):
        seen.update(groups=groups, terms=terms, rewards=rewards, value=value)
        memory["steps"] = memory.get("steps", 0) + keep
        return terms.turn * 1.0, value + 1

    def loss(new, old, advantage, entropy, reference, episode, call, turn, group, version):
        seen.update(version=version, turn=turn)
        return -(new - reference) * advantage - 0.1 * entropy + 0 * (old + episode + call + group)

    made = recipe(advantage, loss, args={"keep": 5})
    needs = made.needs
    assert (needs.value, needs.reference, needs.entropy, needs.after) == (True, True, True, False)
    groups = random_groups(1)
    terms = terms_of(groups)
    found = made.credit(groups, terms)
    assert found.advantage.tolist() == terms.turn.tolist()
    assert found.target == pytest.approx(terms.value + 1)
    assert [len(r) for r in seen["rewards"]] == [len(g.valid_episodes) for g in groups]
    assert np.concatenate(seen["rewards"]) == pytest.approx([e.reward for g in groups for e in g.episodes])
    made.credit(groups, terms)
    assert made.state() == {"own": {"steps": 10}}
    again = recipe(advantage, loss, args={"keep": 5})
    again.load_state(made.state())
    again.credit(groups, terms)
    assert again.state() == {"own": {"steps": 15}}
    total, _ = made.loss(model_outputs(batch_of(found).old_M.clone().requires_grad_()), batch_of(found))
    assert torch.equal(seen["version"], batch_of(found).version_M)
    assert len(total) == len(terms)


def test_settings_of_the_algorithm_apply_to_custom_functions():
    groups = [group(episode(1.0), episode(1.0)), group(episode(2.0), episode(0.0, tokens=3))]
    terms = terms_of(groups)
    assert len(recipe(leave_one_out).keep(groups)) == 2  # unknown whether it compares episodes
    assert len(recipe(leave_one_out, skip_zero_variance=True).keep(groups)) == 1
    white = recipe(leave_one_out, whiten="token").credit(groups, terms).advantage
    assert white.mean() == pytest.approx(0.0, abs=1e-12)
    guarded = recipe(leave_one_out, importance_weights="tis")
    assert guarded.needs.proximal
    factor = np.minimum(np.exp(terms.proximal - terms.logprob), 2.0)
    plain = recipe(leave_one_out).credit(groups, terms).advantage
    assert guarded.credit(groups, terms).advantage == pytest.approx(plain * factor)
    with_kl = recipe(None, tanh_gate, kl={"coef": 0.5})
    assert with_kl.needs.reference
    assert "policy/kl" in with_kl.loss(model_outputs(batch_of(terms).old_M), batch_of(terms))[1]
    assert recipe(leave_one_out).credit([], terms_of([])).advantage.tolist() == []
    mixed = make_algorithm(
        AlgorithmConfig(by_source={"a": {"advantage": "object:a"}}), lambda name, kind: leave_one_out, check=True
    )
    assert mixed.parts["a"].custom[0].name == "object:a"


def test_a_method_and_an_object_that_can_be_called_are_functions_too():
    class Shifted:
        def __init__(self, by):
            self.by = by

        def __call__(self, rewards):
            return [r - self.by for r in rewards]

    groups = random_groups(1)
    terms = terms_of(groups)
    plain = np.array([e.reward for g in groups for e in g.episodes])[terms.episode]
    for made in (Shifted(2.0), Shifted(2.0).__call__):
        assert recipe(made).credit(groups, terms).advantage == pytest.approx(plain - 2.0)


def no_gradient(new, advantage):
    return new.detach() * advantage


WRONG_ADVANTAGES = {
    "too short": (lambda rewards: [r[:-1] for r in rewards], "an array of shape (2,) instead of 3 numbers"),
    "a group too few": (lambda rewards: rewards[:-1], "returns 3 arrays for 4 groups"),
    "one number": (lambda terms: 1.0, "an object of type float instead"),
    "two dimensions": (lambda terms: np.zeros((len(terms), 1)), "1) instead of"),
    "not finite": (lambda rewards: [r / 0.0 for r in rewards], "not finite"),
    "nothing but 0 / 0": (lambda rewards: [r / r.std() for r in rewards], "equal rewards"),
    "alone": (lambda rewards: [r - (r.sum() - r) / (len(r) - 1) for r in rewards], "one episode"),
    "nothing": (lambda terms: None, "NoneType"),
    "no target": (lambda value: value, "not two arrays (advantage, target)"),
    "changes what it is given": (lambda terms: np.copyto(terms.logprob, 0.0), "read-only"),
    "raises": (lambda rewards: rewards["x"], "failed on a small batch: TypeError"),
    "unknown name": (lambda reward: reward, "needs a value for 'reward'. Did you mean 'rewards'?"),
    "positional": (eval("lambda rewards, /: rewards"), "cannot be filled by name"),
    "stars": (lambda *rewards: rewards, "cannot be filled by name"),
    "a class": (dict, "is a class"),
    "text": ("text", "an object of type str"),
}
WRONG_LOSSES = {
    "a mean": (lambda new, advantage: (new * advantage).mean(), "an array of shape () instead of a tensor of"),
    "no gradient": (no_gradient, "without a gradient"),
    "a gradient of 0": (lambda new: 0 * new, "a gradient of 0"),
    "not finite": (lambda new: new / 0.0, "not finite"),
    "gradient not finite": (lambda new: (new - new.detach()).abs().sqrt(), "gradient that is not finite"),
    "whitens": (lambda new, advantage: -new * (advantage - advantage.mean()), "depends on other tokens"),
    "numpy": (lambda new: new.detach().numpy(), "instead of a tensor of"),
    "a metric of one number": (lambda new: (new, {"x": new.mean()}), "as 'x' instead of a tensor"),
    "raises": (lambda new: new @ new @ new, "failed on a small batch"),
    "unknown": (lambda new, olds: new, "Did you mean 'old'?"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_ADVANTAGES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_wrong_advantage_is_refused_with_the_expected_signature(what):
    function, complaint = WRONG_ADVANTAGES[what]
    with pytest.raises(ConfigError) as error:
        recipe(function)
    assert complaint in str(error.value)
    assert "algorithm.advantage=object:a" in str(error.value)
    assert "def advantage(rewards" in str(error.value)


@pytest.mark.parametrize("what", WRONG_LOSSES)
def test_a_wrong_loss_is_refused_with_the_expected_signature(what):
    function, complaint = WRONG_LOSSES[what]
    with pytest.raises(ConfigError) as error:
        recipe(None, function)
    assert complaint in str(error.value)
    assert "def loss(new, old, advantage" in str(error.value)


def test_settings_are_checked_against_both_signatures():
    both = recipe(leave_one_out, tanh_gate, args={"scale": 2.0, "tau": 0.5})
    assert (both.custom[0].args, both.custom[1].args) == ({"scale": 2.0}, {"tau": 0.5})
    with pytest.raises(ConfigError, match=r"algorithm.args.tua: unknown setting. Did you mean 'tau'\?"):
        recipe(leave_one_out, tanh_gate, args={"tua": 1})
    with pytest.raises(ConfigError, match=r"'power'.*Write algorithm.args.power=VALUE"):
        recipe(lambda rewards, power: rewards)
    assert recipe(lambda rewards, **more: [r * more["power"] for r in rewards], args={"power": 2}).custom[0].accepts_any
    with pytest.raises(ConfigError, match=r"args\.x: unknown key"):
        validate(AlgorithmConfig, {"args": {"x": 1}})
    with pytest.raises(
        ConfigError, match=r"or your own as package\.module:function; given 'grop'\. Did you mean 'grpo'"
    ):
        validate(AlgorithmConfig, {"advantage": "grop"})
    with pytest.raises(ConfigError, match="std=group is not read"):
        validate(AlgorithmConfig, {"advantage": "mine:f", "std": "group"})


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("gspo", "gmpo", "dpo", "ipo", "kto")])
def test_the_small_batch_is_one_that_the_librarys_own_losses_pass(name):
    """Or the check would ask for more than is due."""
    terms = term_batch(small_terms(small_groups()))
    loss, _ = LOSSES[name](model_outputs(terms.old_M.clone().requires_grad_()), terms, AlgorithmConfig(loss=name, **{
        "advantage": "gae"} if name == "a2c" else {}))  # fmt: skip
    assert torch.isfinite(loss).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_small_batch_is_one_that_the_librarys_own_advantages_pass(name):
    groups = [dataclasses.replace(one, greedy=0.5) for one in small_groups()]
    terms = small_terms(groups)
    found, _ = ADVANTAGES[name](groups, terms, AlgorithmConfig(advantage=name), {})
    assert np.isfinite(found).all()
    assert found.any()
