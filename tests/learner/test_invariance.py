"""Law 2: loss and gradients do not depend on tree sharing, micro-batch split, packing or order."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.algorithms.algorithm import Grpo
from arborl.config.run import AlgorithmConfig, KLConfig, LearnerConfig
from arborl.learner.learner import Learner
from arborl.rollout.tree import plant
from arborl.types import Call, Completion, Episode, Finish, Group, Sampling, Task

TEMPERATURE = 0.7
SAMPLING = Sampling(temperature=TEMPERATURE)


def random_groups(seed: int, groups: int = 3) -> list[Group]:
    """Episodes that share prompts, extend them, and sometimes edit them."""
    chance = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        prompt = chance.integers(0, 50, chance.integers(1, 8)).tolist()
        episodes = []
        for e in range(int(chance.integers(2, 5))):
            context, calls = list(prompt), []
            for turn in range(int(chance.integers(1, 4))):
                sampled = chance.integers(0, 50, chance.integers(1, 5)).tolist()
                logprobs = tuple(chance.uniform(-4.5, -3.0, len(sampled)).tolist())
                calls.append(Call(tuple(context), Completion(tuple(sampled), logprobs, Finish.STOP), turn))
                context = context + sampled + chance.integers(0, 50, 3).tolist()
                if chance.random() < 0.3:
                    context = context[: len(prompt)] + chance.integers(0, 50, 2).tolist()
            episodes.append(Episode(f"{e}", Task("t"), calls=calls, rewards={"r": float(chance.normal())}))
        made.append(Group(Task("t"), episodes))
    return made


def tree_gradients(model, groups: list[Group], algorithm: Grpo, budget: int) -> tuple[float, list[torch.Tensor]]:
    learner = Learner(model, LearnerConfig(micro_batch_tokens=budget), SAMPLING, reference=algorithm.needs_reference)
    if learner.reference is not None:  # a reference that differs, so that the penalty is not zero
        with torch.no_grad():
            for parameter in learner.reference.parameters():
                parameter.mul_(1.01)
    forest = plant(groups)
    terms = algorithm.credit(groups, forest.terms)
    model.zero_grad()
    value = learner.backward(forest.trees, terms, algorithm.loss)["policy/loss"]
    return value, [p.grad.clone() for p in model.parameters()]


def row_gradients(model, groups: list[Group], config: AlgorithmConfig) -> tuple[float, list[torch.Tensor]]:
    """The same loss by the longest way: one plain Hugging Face forward pass per call, float64, written out by hand."""
    rows = [(episode, g, c) for g, group in enumerate(groups) for episode in group.episodes for c in episode.calls]
    tokens_in = {id(e): e.sampled for group in groups for e in group.episodes}
    all_tokens, all_episodes = sum(tokens_in.values()), len(tokens_in)
    reference = {name: value * 1.01 for name, value in model.state_dict().items()}
    model.zero_grad()
    total = 0.0
    old_attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    for episode, g, c in rows:
        rewards = np.array([e.reward for e in groups[g].episodes])
        advantage = episode.reward - rewards.mean()
        if config.std == "group":
            advantage /= rewards.std(ddof=1) + 1e-6
        ids = torch.tensor([[*c.prompt, *c.completion.tokens]])
        new = token_logprobs(model(ids).logits[0], c)
        ratio = (new - torch.tensor(c.completion.logprobs, dtype=torch.float64)).exp()
        per_token = -torch.minimum(
            ratio * advantage, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
        )
        if config.kl.coef:
            with torch.no_grad():
                logits = torch.func.functional_call(model, reference, (ids,)).logits[0]
            gap = token_logprobs(logits, c) - new
            per_token = per_token + config.kl.coef * (gap.exp() - 1 - gap)
        share = 1 / all_tokens if config.aggregation == "token" else 1 / (all_episodes * tokens_in[id(episode)])
        loss = (per_token * share).sum()
        loss.backward()
        total += float(loss.detach())
    model.set_attn_implementation(old_attention)
    return total, [p.grad.clone() for p in model.parameters()]


def token_logprobs(logits: torch.Tensor, c: Call) -> torch.Tensor:
    begin = len(c.prompt) - 1
    table = torch.log_softmax(logits[begin : begin + len(c.completion.tokens)] / TEMPERATURE, -1)
    return table.gather(1, torch.tensor(c.completion.tokens)[:, None])[:, 0]


def assert_same(one: tuple[float, list[torch.Tensor]], other: tuple[float, list[torch.Tensor]]) -> None:
    assert abs(one[0] - other[0]) < 1e-9
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([1, 30, 80, 10_000]),
    aggregation=st.sampled_from(["token", "episode"]),
    std=st.sampled_from(["none", "group"]),
    kl=st.sampled_from([0.0, 0.1]),
)
def test_tree_loss_and_gradients_equal_those_of_one_row_per_call(tiny_llama, seed, budget, aggregation, std, kl):
    config = AlgorithmConfig(aggregation=aggregation, std=std, kl=KLConfig(coef=kl), skip_zero_variance=False)
    groups = random_groups(seed)
    assert_same(tree_gradients(tiny_llama, groups, Grpo(config), budget), row_gradients(tiny_llama, groups, config))


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(3)), budget=st.sampled_from([1, 50, 10_000]))
def test_order_of_groups_and_episodes_and_the_split_do_not_matter(tiny_llama, seed, order, budget):
    groups = random_groups(seed)
    shuffled = [Group(groups[i].task, groups[i].episodes[::-1]) for i in order]
    algorithm = Grpo(AlgorithmConfig(aggregation="episode", skip_zero_variance=False))
    assert_same(
        tree_gradients(tiny_llama, groups, algorithm, 10_000), tree_gradients(tiny_llama, shuffled, algorithm, budget)
    )


def test_minibatches_see_every_term_once_and_average_to_the_whole_gradient(tiny_llama):
    groups = random_groups(5, groups=4)
    algorithm = Grpo(AlgorithmConfig(skip_zero_variance=False))
    whole = tree_gradients(tiny_llama, groups, algorithm, 10_000)[1]
    learner = Learner(tiny_llama, LearnerConfig(minibatches=2), SAMPLING)
    forest = plant(groups)
    terms = algorithm.credit(groups, forest.terms)
    halves = []
    for numbers in ([0, 1], [2, 3]):
        tiny_llama.zero_grad()
        learner.backward(forest.trees, terms.pick(np.flatnonzero(np.isin(terms.tree, numbers))), algorithm.loss)
        halves.append([p.grad.clone() for p in tiny_llama.parameters()])
    for full, a, b in zip(whole, *halves, strict=True):
        torch.testing.assert_close((a + b) / 2, full, rtol=1e-9, atol=1e-11)


def test_a_loss_that_is_not_finite_leaves_the_weights_untouched(tiny_llama):
    import copy

    model = copy.deepcopy(tiny_llama)
    groups = random_groups(1)
    algorithm = Grpo(AlgorithmConfig(skip_zero_variance=False))
    forest = plant(groups)
    terms = algorithm.credit(groups, forest.terms)
    poisoned = dataclasses.replace(terms, advantage=np.full(len(terms), np.nan))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    metrics = Learner(model, LearnerConfig(), SAMPLING).update(forest.trees, poisoned, algorithm.loss)
    assert metrics["learner/skipped"] == 1.0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
