"""Law 2: loss and gradients do not depend on tree sharing, executor, micro-batch split, packing or order."""

from __future__ import annotations

import copy
import functools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import SAMPLING, Fake, assert_same, gradients, random_groups

from arborl.config.run_config import LearnerConfig
from arborl.learner.core.learner import Learner
from arborl.types import Group

KINDS = ["clip", "sequence", "value", "entropy"]


def learner_of(model, algorithm: Fake, budget: int = 10_000, **more) -> Learner:
    config = LearnerConfig(micro_batch_tokens=budget, **more)
    learner = Learner(model, config, SAMPLING, algorithm.needs)
    with torch.no_grad():
        if learner.reference is not None:  # one that differs, so that the penalty is not zero
            for parameter in learner.reference.parameters():
                parameter.mul_(1.01)
        if learner.critic is not None:  # one that says something
            for parameter in learner.critic.head.parameters():
                parameter.copy_(
                    torch.linspace(-0.1, 0.1, parameter.numel(), dtype=torch.float64).reshape(parameter.shape)
                )
    return learner


def by_rows(model, groups: list[Group], kind: str, reference: bool) -> tuple[float, list[torch.Tensor]]:
    """The same loss by the longest way: one plain Hugging Face forward pass per call, float64, written out by hand."""
    episodes = [episode for group in groups for episode in group.episodes]
    head = torch.linspace(-0.1, 0.1, 32, dtype=torch.float64).reshape(1, 32).requires_grad_()
    bias = torch.full((1,), -0.1, dtype=torch.float64, requires_grad=True)
    model.zero_grad()
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    total = 0.0
    for episode in episodes:
        rows = [_row(model, call, reference) for call in episode.calls]
        new, old = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
        advantage = episode.reward
        ratio = (new - old).exp()
        if kind == "sequence":
            ratio = ((new - old).mean().detach() + new - new.detach()).exp()
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if kind == "entropy":
            per_token = per_token - 0.1 * torch.cat([row[2] for row in rows])
        if kind == "value":
            values = torch.cat([row[3] for row in rows]) @ head[0] + bias
            per_token = per_token + 0.5 * (values - advantage) ** 2
        if reference:
            gap = torch.cat([row[4] for row in rows]) - new
            per_token = per_token + 0.1 * (gap.exp() - 1 - gap)
        loss = per_token.mean() / len(episodes)
        loss.backward()
        total += float(loss.detach())
    model.set_attn_implementation(attention)
    found = [p.grad.clone() for p in model.parameters()]
    return total, found + ([head.grad, bias.grad] if kind == "value" else [])


def _row(model, call, reference: bool):
    ids = torch.tensor([[*call.prompt, *call.completion.tokens]])
    begin, tokens = len(call.prompt) - 1, torch.tensor(call.completion.tokens)[:, None]

    def table(logits):
        return torch.log_softmax(logits[0, begin : begin + len(tokens)] / SAMPLING.temperature, -1)

    hidden = model.model(ids).last_hidden_state
    log = table(model.lm_head(hidden))
    old = torch.tensor(call.completion.logprobs, dtype=torch.float64)
    theirs = None
    if reference:
        weights = {name: value * 1.01 for name, value in model.named_parameters()}
        with torch.no_grad():
            theirs = table(torch.func.functional_call(model, weights, (ids,)).logits).gather(1, tokens)[:, 0]
    entropy = -(log.exp() * log).sum(-1)
    return log.gather(1, tokens)[:, 0], old, entropy, hidden[0, begin : begin + len(tokens)], theirs


@settings(max_examples=16)
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([1, 12, 30, 80, 10_000]),
    kind=st.sampled_from(KINDS),
    reference=st.booleans(),
    attention=st.sampled_from(["auto", "causal", "dense", "blocks"]),
)
def test_tree_loss_and_gradients_equal_those_of_one_row_per_call(tiny_llama, seed, budget, kind, reference, attention):
    groups, algorithm = random_groups(seed), Fake(kind, reference)
    ours = gradients(learner_of(tiny_llama, algorithm, budget, attention=attention), groups, algorithm)
    assert_same(ours, by_rows(tiny_llama, groups, kind, reference))


@settings(max_examples=10)
@given(
    seed=st.integers(0, 10_000),
    order=st.permutations(range(3)),
    budget=st.sampled_from([1, 25, 50, 10_000]),
    kind=st.sampled_from(KINDS),
)
def test_order_of_groups_and_episodes_and_the_split_do_not_matter(tiny_llama, seed, order, budget, kind):
    groups, algorithm = random_groups(seed), Fake(kind)
    shuffled = [Group(groups[i].task, groups[i].episodes[::-1]) for i in order]
    assert_same(
        gradients(learner_of(tiny_llama, algorithm), groups, algorithm),
        gradients(learner_of(tiny_llama, algorithm, budget), shuffled, algorithm),
    )


@functools.cache
def single_precision(model):
    return copy.deepcopy(model).float()


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([1, 25, 10_000]),
    attention=st.sampled_from(["auto", "causal", "blocks"]),
    recompute=st.booleans(),
)
def test_in_float32_they_agree_to_its_precision(tiny_llama, seed, budget, attention, recompute):
    model, groups, algorithm = single_precision(tiny_llama), random_groups(seed), Fake()
    assert_same(
        gradients(learner_of(model, algorithm, attention="dense"), groups, algorithm),
        gradients(learner_of(model, algorithm, budget, attention=attention, recompute=recompute), groups, algorithm),
        tolerance=1e-5,
    )


def test_a_separate_critic_gives_the_same_under_any_split(tiny_llama):
    groups, algorithm = random_groups(3), Fake("value")
    whole, parts = (
        gradients(learner_of(tiny_llama, algorithm, budget, critic="separate"), groups, algorithm)
        for budget in (10_000, 12)
    )
    assert_same(whole, parts)
    assert any(float(g.abs().max()) > 0 for g in whole[1][-20:-2])  # its own trunk is reached
