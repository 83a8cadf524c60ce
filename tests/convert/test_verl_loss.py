"""A converted configuration computes what verl's formulas give: losses of every optimiser step, and the weights after.

The formulas are written here anew, row by row with masks, from what verl documents and its `core_algos` states.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from arborl.algorithms import make_algorithm
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import convert
from arborl.learner.core.learner import Learner
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Completion, Episode, FinishReason, Group, Sampling, Task

TASKS, EACH = 4, 3
COMMON = f"""
python3 -m verl.trainer.main_ppo data.train_files=rows.parquet data.train_batch_size={TASKS} \\
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.rollout.n={EACH} \\
"""


def episodes() -> list[Group]:
    """Four tasks of three episodes; some have two turns, a tool's words between; one task's rewards are all equal."""
    rng = np.random.default_rng(3)
    made = []
    for task in range(TASKS):
        prompt = rng.integers(0, 50, 4).tolist()
        several = []
        for number in range(EACH):
            context, calls = list(prompt), []
            for turn in range(1 + (number % 2)):
                sampled = rng.integers(0, 50, rng.integers(2, 6)).tolist()
                done = Completion(tuple(sampled), (-3.0,) * len(sampled), FinishReason.STOP)
                calls.append(Call(tuple(context), done, turn))
                context += sampled + rng.integers(0, 50, 3).tolist()
            reward = 1.0 if task == 2 else float(rng.integers(0, 3)) / 2 + 0.1 * number
            several.append(Episode(f"{task}.{number}", Task("t"), calls=calls, rewards={"score": reward}))
        made.append(Group(Task("t"), several))
    return made


@dataclass
class Rows:
    """The same as verl holds it: one row an episode, with a mask of what was sampled."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    mask: list[torch.Tensor] = field(default_factory=list)
    """Of tokens 1, 2, …: whether the model sampled them."""
    score: list[float] = field(default_factory=list)
    group: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, groups: list[Group]) -> Rows:
        rows = cls()
        for number, group in enumerate(groups):
            for episode in group.episodes:
                last = episode.calls[-1]
                tokens = [*last.prompt, *last.completion.tokens]
                mask = torch.zeros(len(tokens))
                for call in episode.calls:
                    mask[len(call.prompt) : len(call.prompt) + len(call.completion.tokens)] = 1
                rows.tokens.append(torch.tensor(tokens))
                rows.mask.append(mask[1:].bool())
                rows.score.append(episode.reward)
                rows.group.append(number)
        return rows


def logprobs(model, rows: Rows, chosen: list[int]) -> torch.Tensor:
    """Of all sampled tokens of these rows, one after another."""
    found = []
    for row in chosen:
        logits = model(rows.tokens[row][None]).logits[0, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(1, rows.tokens[row][1:, None])[:, 0]
        found.append(logprobs[rows.mask[row]])
    return torch.cat(found)


def values(model, head, rows: Rows, chosen: list[int]) -> torch.Tensor:
    found = []
    for row in chosen:
        hidden = model.model(rows.tokens[row][None]).last_hidden_state[0, :-1]
        found.append((hidden @ head[0].T + head[1])[:, 0][rows.mask[row]])
    return torch.cat(found)


def lengths(rows: Rows) -> list[int]:
    return [int(mask.sum()) for mask in rows.mask]


def group_advantages(rows: Rows, normalise: bool) -> list[torch.Tensor]:
    """(score - mean) / (sample deviation + 1e-6) of its group, at every token."""
    score, group = torch.tensor(rows.score, dtype=torch.float64), torch.tensor(rows.group)
    out = []
    for row, length in enumerate(lengths(rows)):
        own = score[group == group[row]]
        centred = score[row] - own.mean()
        out.append((centred / (own.std(unbiased=True) + 1e-6) if normalise else centred).expand(length))
    return out


def best_advantages(rows: Rows) -> list[torch.Tensor]:
    """Of the best of each group its lead over the second, divided by the sample deviation + 1e-6; else 0."""
    score, group = torch.tensor(rows.score, dtype=torch.float64), torch.tensor(rows.group)
    out = []
    for row, length in enumerate(lengths(rows)):
        own = score[group == group[row]]
        best, second = own.topk(2).values
        lead = (best - second) / (own.std(unbiased=True) + 1e-6) if score[row] == best else torch.tensor(0.0).double()
        out.append(lead.expand(length))
    return out


def whiten(advantage: torch.Tensor) -> torch.Tensor:
    """Over all tokens of the batch: mean 0, variance 1 with n - 1, 1e-8 beside the variance."""
    return (advantage - advantage.mean()) * torch.rsqrt(advantage.var(unbiased=True) + 1e-8)


def gae(rows: Rows, reward: torch.Tensor, value: torch.Tensor, gamma: float, lam: float):
    advantage, begin = torch.zeros_like(value), 0
    for length in lengths(rows):
        later, ahead = 0.0, 0.0
        for t in reversed(range(begin, begin + length)):
            delta = reward[t] + gamma * ahead - value[t]
            later = delta + gamma * lam * later
            advantage[t], ahead = later, value[t]
        begin += length
    return whiten(advantage), advantage + value


def to_go(rows: Rows, reward: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flip(0).cumsum(0).flip(0) for part in reward.split(lengths(rows))])


def policy_loss(new, old, advantage, low=0.2, high=0.2, dual=3.0):
    """PPO's clip, and below 0 the second clip at `dual`."""
    ratio = (new - old).clamp(-20, 20).exp()
    first = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    held = torch.minimum(first, -advantage * dual)
    SEEN["clipped"] += int((ratio.clamp(1 - low, 1 + high) != ratio).sum())
    SEEN["twice"] += int(((first > held) & (advantage < 0)).sum())
    return torch.where(advantage < 0, held, first)


def geo_mean_loss(new, old, advantage, sizes, low=0.2, high=0.2):
    """Of each row: -A times the geometric mean of the ratios, whose logarithms are held on the side of A's sign."""
    rows = []
    for gap, a in zip((new - old).split(sizes), advantage.split(sizes), strict=True):
        sign = torch.sign(a)
        held = sign * torch.minimum(sign * gap, sign * gap.clamp(-low, high))
        SEEN["clipped"] += int((held != gap).sum())
        rows.append(-a.mean() * held.mean().exp())
    return torch.stack(rows).mean()


def k3(new, reference):
    gap = (reference - new).clamp(-20, 20)
    return (gap.exp() - gap - 1).clamp(-10, 10)


SEEN = {"clipped": 0, "twice": 0}


@dataclass
class Case:
    """What a script says beyond the common, and the same as numbers."""

    script: str
    estimator: str
    epochs: int = 2
    lr: float = 0.03
    kl_loss: float = 0.0
    kl_reward: float = 0.0
    normalise: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    aggregate: str = "token"
    dual: float = 3.0
    loss: str = "vanilla"


ACTOR = "actor_rollout_ref.actor."
CASES = {
    "grpo": Case(
        f"algorithm.adv_estimator=grpo {ACTOR}optim.lr=0.03 {ACTOR}ppo_epochs=2 {ACTOR}use_kl_loss=True "
        f"{ACTOR}kl_loss_coef=0.05",
        "grpo",
        kl_loss=0.05,
    ),
    "dr_grpo": Case(
        f"algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False {ACTOR}optim.lr=0.03 "
        f"{ACTOR}ppo_epochs=2 {ACTOR}loss_agg_mode=seq-mean-token-sum",
        "grpo",
        normalise=False,
        aggregate="sum",
    ),
    "ppo": Case(
        f"{ACTOR}optim.lr=0.03 {ACTOR}ppo_epochs=2 critic.optim.lr=0.02 algorithm.gamma=0.98 algorithm.lam=0.9 "
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05",
        "gae",
        kl_reward=0.05,
        gamma=0.98,
        lam=0.9,
    ),
    "ppo at verl's defaults": Case(
        f"{ACTOR}optim.lr=0.03 critic.optim.lr=0.02 {ACTOR}clip_ratio_c=1.1 {ACTOR}ppo_epochs=2", "gae", dual=1.1
    ),
    "reinforce++": Case(
        f"algorithm.adv_estimator=reinforce_plus_plus {ACTOR}optim.lr=0.03 {ACTOR}ppo_epochs=2", "reinforce_plus_plus"
    ),
    "reinforce++ baseline": Case(
        f"algorithm.adv_estimator=reinforce_plus_plus_baseline {ACTOR}optim.lr=0.03 {ACTOR}ppo_epochs=2 "
        f"{ACTOR}loss_agg_mode=seq-mean-token-mean",
        "reinforce_plus_plus_baseline",
        aggregate="mean",
    ),
    "gmpo": Case(
        f"algorithm.adv_estimator=grpo {ACTOR}optim.lr=0.03 {ACTOR}ppo_epochs=2 {ACTOR}policy_loss.loss_mode=geo_mean",
        "grpo",
        loss="geo_mean",
    ),
    "pass@k": Case(
        f"algorithm.adv_estimator=grpo_passk {ACTOR}optim.lr=0.03 {ACTOR}ppo_epochs=2",
        "passk",
    ),
}


def credited(case: Case, rows: Rows, old, reference, value) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages and returns of all tokens, as verl's estimators have them."""
    if case.estimator == "grpo":
        return torch.cat(group_advantages(rows, case.normalise)), None
    if case.estimator == "passk":
        return torch.cat(best_advantages(rows)), None
    reward = torch.zeros_like(old)
    ends = np.cumsum(lengths(rows)) - 1
    reward[ends] = torch.tensor(rows.score, dtype=torch.float64)
    reward = reward - case.kl_reward * (old - reference)
    if case.estimator == "gae":
        return gae(rows, reward, value, case.gamma, case.lam)
    if case.estimator == "reinforce_plus_plus":
        return whiten(to_go(rows, reward)), None
    return whiten(torch.cat(group_advantages(rows, normalise=False))), None


def summed(loss: torch.Tensor, case: Case, sizes: list[int]) -> torch.Tensor:
    if case.aggregate == "token":
        return loss.mean()
    parts = loss.split(sizes)
    return torch.stack([part.mean() if case.aggregate == "mean" else part.sum() for part in parts]).mean()


def adam(parameters, lr: float) -> torch.optim.AdamW:
    """verl's: betas 0.9 and 0.999, decay 0.01; here on matrices alone, as a conversion says."""
    both = [{"params": [p for p in parameters if (p.ndim > 1) == (d > 0)], "weight_decay": d} for d in (0.01, 0.0)]
    return torch.optim.AdamW([group for group in both if group["params"]], lr=lr, betas=(0.9, 0.999))


def verl(case: Case, start, policy, head, rows: Rows) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of every step, and the weights after."""
    everything = list(range(len(rows.tokens)))
    critic = copy.deepcopy(start)
    with torch.no_grad():
        old, reference = logprobs(policy, rows, everything), logprobs(start, rows, everything)
        value = values(critic, head, rows, everything)
    advantage, target = credited(case, rows, old, reference, value)
    own = [p for p in policy.parameters() if p.requires_grad]
    optimizer = adam(own, case.lr)
    other = [*critic.model.parameters(), *head]
    second = adam(other, 0.02)
    at = torch.repeat_interleave(torch.arange(len(everything)), torch.tensor(lengths(rows)))
    losses = []
    for _ in range(case.epochs):
        for tasks in ((0, 1), (2, 3)):
            chosen = [row for row in everything if rows.group[row] in tasks]
            here = torch.isin(at, torch.tensor(chosen))
            sizes = [lengths(rows)[row] for row in chosen]
            new = logprobs(policy, rows, chosen)
            if case.loss == "geo_mean":
                loss = geo_mean_loss(new, old[here], advantage[here], sizes)
            else:
                loss = summed(policy_loss(new, old[here], advantage[here], dual=case.dual), case, sizes)
            loss = loss + case.kl_loss * summed(k3(new, reference[here]), case, sizes)
            if target is not None:
                now = values(critic, head, rows, chosen)
                held = torch.maximum(torch.minimum(now, value[here] + 0.5), value[here] - 0.5)
                loss = loss + 0.5 * summed(
                    torch.maximum((now - target[here]) ** 2, (held - target[here]) ** 2), case, sizes
                )
            losses.append(loss.item())
            optimizer.zero_grad()
            second.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            optimizer.step()
            if target is not None:
                torch.nn.utils.clip_grad_norm_(other, 1.0)
                second.step()
    return losses, [p.detach() for p in own]


def arbor(config: RunConfig, start, head, groups: list[Group], noise: list[torch.Tensor]):
    """The same through the converted configuration, our algorithm and our learner."""
    algorithm = make_algorithm(config.algorithm)
    drawn = config.sampling
    sampling = Sampling(drawn.max_tokens, drawn.temperature, top_k=drawn.top_k, top_p=drawn.top_p)
    learner = Learner(copy.deepcopy(start), config.learner, sampling, algorithm.needs, total_steps=1000)
    with torch.no_grad():
        for parameter, by in zip(learner.model.parameters(), noise, strict=True):
            parameter += by
        if learner.critic is not None:
            learner.critic.head.weight.copy_(head[0])
            learner.critic.head.bias.copy_(head[1])
    losses, gradients = [], learner._compute_gradients

    def watched(*given):
        tally = gradients(*given)
        losses.append(tally.metrics()["policy/loss"])
        return tally

    learner._compute_gradients = watched
    kept = algorithm.keep(groups)
    forest = build_token_trees(kept)
    terms = algorithm.credit(kept, learner.score_terms(forest.trees, forest.terms, algorithm.needs))
    learner.update(forest.trees, terms, algorithm)
    return losses, [p.detach() for p in learner.model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_a_converted_run_has_the_losses_and_the_weights_of_verls_formulas(name, tiny_llama, tmp_path):
    case = CASES[name]
    (tmp_path / "run.sh").write_text(COMMON + case.script)
    config = validate(RunConfig, convert("verl", [tmp_path / "run.sh"]).tree())
    torch.manual_seed(1)
    noise = [0.02 * torch.randn_like(p) for p in tiny_llama.parameters()]
    head = [torch.randn(1, 32).double() * 0.1, torch.zeros(1).double()]
    start = copy.deepcopy(tiny_llama)
    start.set_attn_implementation("eager")
    policy = copy.deepcopy(start)
    with torch.no_grad():
        for parameter, by in zip(policy.parameters(), noise, strict=True):
            parameter += by
    groups = episodes()
    SEEN.update(clipped=0, twice=0)
    mine, own = arbor(config, tiny_llama, head, groups, noise)
    trained = [part.clone().requires_grad_() for part in head]
    theirs, weights = verl(case, start, policy, trained, Rows.of(groups))
    assert SEEN["clipped"], "nothing was clipped, so nothing was shown"
    assert SEEN["twice"] or case.dual > 2
    assert mine == pytest.approx(theirs, abs=1e-6)
    assert len(set(theirs)) == len(theirs) == 4
    for ours, expected in zip(own, weights, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)  # they moved by 0.1
