"""verl's advantages, losses and penalties. A loss without counterpart is an error."""

from __future__ import annotations

from typing import Any

from arborl.convert.common_rules import Rule, choice, known, num, text, unless, when
from arborl.convert.draft import Draft
from arborl.convert.verl.verl_rules import A, M, R, answer_tokens

ESTIMATORS = {
    "grpo": "grpo", "grpo_vectorized": "grpo", "gae": "ppo", "rloo": "rloo", "rloo_vectorized": "rloo",
    "remax": "remax", "reinforce": "reinforce", "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "opo": "opo", "gigpo": "gigpo", "gpg": "grpo",
    "grpo_passk": "pass_k",
}  # fmt: skip
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "gpg": "pg", "geo_mean": "gmpo"}
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "mse", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
COMPARE = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gigpo", "pass_k")
GPG = (
    "the factor is batch / (batch - samples of groups with equal rewards), as in the paper, by leaving these groups "
    "out of the mean; there batch / samples with a reward other than 0"
)
ALONE = {"rloo": "reinforce", "opo": "reinforce", "reinforce_plus_plus_baseline": "reinforce_plus_plus"}
"""What an advantage that compares comes to there with one episode a task, which is compared with nothing."""
BY_SEQUENCE = ("gspo", "sapo", "gmpo")
"""Losses that verl averages over sequences, whatever `loss_agg_mode` says."""
GAE = known("algorithm.adv_estimator", "gae")
SAPO = known(f"{A}policy_loss.loss_mode", "sapo")
KL_LOSS = known(f"{A}use_kl_loss")


def estimator(draft: Draft, key: str, value: Any) -> None:
    ours = ESTIMATORS.get(str(value))
    if ours is None:
        own = "yours can then be named as algorithm.advantage=package.module:function."
        draft.refuse(key, value, f"there is no such advantage here. Put another into the script; {own}")
        return
    settings: dict[str, Any] = {"algorithm.skip_zero_variance": False} if ours in COMPARE else {}
    if value == "gpg":
        settings = {"algorithm.std": "none"}
    chains = any(f"agent.{layout}num_chains" in draft.source for layout in ("", "init_config.", "run_config."))
    if draft.number_or(f"{R}n", 1) == 1 and not chains and ours in COMPARE:
        settings = {"algorithm.args.baseline": "none", "algorithm.std": "none"} if ours == "grpo" else {}
        ours = ALONE.get(ours, ours)
    if ours == "ppo":
        settings = {"algorithm.args.gae_level": "token", "learner.critic": "separate", "algorithm.args.value_coef": 1.0}
    if ours in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        settings["algorithm.whiten"] = "token"
    for path, setting in {"algorithm.name": ours, **settings}.items():
        draft.set(key, value, path, setting, GPG if value == "gpg" and path == "algorithm.std" else "")


def by_std(draft: Draft, key: str, value: Any) -> None:
    if draft.settings.get("algorithm.args.baseline") == "none":
        draft.skip(key, value, "a group of one has no deviation")
    else:
        draft.set(key, value, "algorithm.std", "group" if value else "none")


def gamma(draft: Draft, key: str, value: Any) -> None:
    chosen = draft.known("algorithm.adv_estimator")
    if chosen == "gae":
        num("algorithm.gamma")(draft, key, value)
    elif chosen == "reinforce_plus_plus":
        unless((1, 1.0), "reinforce_plus_plus does not discount here")(draft, key, value)
    else:
        draft.skip(key, value, f"algorithm={chosen} does not read it")


def bare_gradient(draft: Draft) -> bool:
    """Whether `rollout_correction` puts REINFORCE in the place of the loss that is named."""
    at = "algorithm.rollout_correction."
    return bool(draft.known(f"{at}bypass_mode")) and draft.known(f"{at}loss_type") == "reinforce"


def loss(draft: Draft) -> str | None:
    return "pg" if bare_gradient(draft) else LOSSES.get(str(draft.known(f"{A}policy_loss.loss_mode")))


def loss_mode(draft: Draft, key: str, value: Any) -> None:
    if bare_gradient(draft):
        draft.set(key, value, "algorithm.loss", "pg")
        return
    remedy = "Put another into the script; yours can then be named as algorithm.loss=package.module:function."
    choice("algorithm.loss", LOSSES, remedy)(draft, key, value)
    ours = LOSSES.get(str(value))
    if ours in BY_SEQUENCE:
        draft.set(key, value, "algorithm.aggregation", "episode")
    if ours in ("ppo", "gspo", "gmpo", "sapo", "cispo"):
        bypass = draft.known("algorithm.rollout_correction.bypass_mode")
        draft.set(key, value, "algorithm.anchor", "rollout" if bypass else "proximal")


def aggregation(draft: Draft, key: str, value: Any) -> None:
    mode = draft.known(f"{A}policy_loss.loss_mode")
    if LOSSES.get(str(mode)) in BY_SEQUENCE:
        draft.skip(key, value, f"{mode} is a mean over sequences there, whatever this says; a KL loss follows it here")
    elif value == "seq-mean-token-sum":
        draft.set(key, value, "algorithm.aggregation", "fixed")
        draft.set(key, value, "algorithm.args.fixed_length", 1)
    elif value == "seq-mean-token-sum-norm":
        why = "verl's is not a mean over sequences, but a sum over those of a micro-batch"
        draft.set(key, value, "algorithm.aggregation", "fixed", why)
        length = draft.known(f"{A}loss_scale_factor") or answer_tokens(draft)
        draft.set(key, value, "algorithm.args.fixed_length", length)
    else:
        ways = {"token-mean": "token", "seq-mean-token-mean": "episode"}
        choice("algorithm.aggregation", ways, f"Known: {', '.join(ways)}.")(draft, key, value)


def clip(draft: Draft, key: str, value: Any) -> None:
    """Read where one of the other two is null; at verl's defaults neither is."""
    sides = [side for side in ("low", "high") if draft.known(f"{A}clip_ratio_{side}") is None]
    if not sides:
        draft.skip(key, value, "verl reads clip_ratio_low and clip_ratio_high in its place, 0.2 where not given")
    for side in sides:
        clip_side(side)(draft, key, value)


def clip_side(side: str) -> Rule:
    def rule(draft: Draft, key: str, value: Any) -> None:
        chosen = loss(draft)
        if value is None:
            draft.skip(key, value, "null: clip_ratio is read in its place")
        elif chosen not in ("ppo", "gspo", "gmpo", "cispo"):
            draft.skip(key, value, "this loss does not clip")
        elif side == "high":
            num("algorithm.clip_high")(draft, key, value)
        elif chosen != "cispo":
            num("algorithm.clip_low", lambda low: min(low, 1 - 1e-6))(draft, key, value)
        elif value >= 1:
            draft.skip(key, value, "as it is here anyway")
        else:
            draft.lose(key, value, "cispo has no lower bound here")

    return rule


def kl_reward(draft: Draft, key: str, value: Any) -> None:
    """`algorithm.kl_ctrl.kl_coef` and `algorithm.kl_penalty`."""
    if KL_LOSS(draft):
        draft.lose(key, value, "there is a penalty in the loss already, and only one of both here")
    elif key == "algorithm.kl_penalty":
        choice("algorithm.kl.estimator", KL, "Write kl, abs, mse or low_var_kl.")(draft, key, value)
    else:
        num("algorithm.kl.coef")(draft, key, value)
        draft.set(key, value, "algorithm.kl.where", "reward")


def kl_control(draft: Draft, key: str, value: Any) -> None:
    why = "the coefficient stays: algorithm.kl.target, which moves it, is the KL of an episode here, there of a token"
    if draft.known("algorithm.kl_ctrl.type") == "adaptive" and draft.known("algorithm.use_kl_in_reward"):
        draft.lose(key, value, why)
    else:
        draft.skip(key, value, "the coefficient stays, as here")


def correction(draft: Draft, key: str, value: Any) -> None:
    """`rollout_is` and `rollout_is_threshold`, of `algorithm.rollout_correction` or, in 0.6, of `algorithm` itself."""
    at, weights = key.rpartition(".")[0], "algorithm.importance_weights."
    level = draft.known(f"{at}.rollout_is_level" if at == "algorithm" else f"{at}.rollout_is")
    mode = draft.known(f"{at}.rollout_is_mode") or "truncate"
    if not draft.known(f"{at}.rollout_is") or (draft.known(f"{at}.bypass_mode") and not bare_gradient(draft)):
        draft.skip(key, value, "no importance weights")
        return
    high = draft.number_or(f"{at}.rollout_is_threshold", 2.0)
    draft.set(key, value, f"{weights}kind", "tis" if mode == "truncate" else "mis")
    draft.set(key, value, f"{weights}high", high)
    if mode != "truncate":
        draft.set(key, value, f"{weights}low", draft.number_or(f"{at}.rollout_is_threshold_lower") or 1 / high)
    if level in ("sequence", "geometric"):
        why = "the geometric mean of a sequence's ratios, there their product" if level == "sequence" else ""
        draft.set(key, value, f"{weights}level", "sequence", why)


def rejection(draft: Draft, key: str, value: Any) -> None:
    if draft.known("algorithm.rollout_correction.rollout_rs"):
        why = "tokens far from the sampling policy are not masked; algorithm.importance_weights=mis masks them by ratio"
        draft.lose(key, value, why)
    else:
        draft.skip(key, value, "nothing is rejected")


def group_filter(draft: Draft, key: str, value: Any) -> None:
    """`filter_groups.enable`, and `data.gen_batch_size` beside it."""
    draft.set(key, value, "rollout.group_filter", "varied")
    tasks = draft.number_or("data.train_batch_size", 1024)
    spare = int(draft.number_or("data.gen_batch_size", tasks) - tasks)
    if spare > 0:
        why = "there batch after batch is played until enough are left, here those of one"
        draft.set(key, value, "rollout.spare_groups", spare, why)


def overlong_buffer(draft: Draft, key: str, value: Any) -> None:
    """`overlong_buffer` of the DAPO recipe, `reward_kwargs.overlong_buffer_cfg` elsewhere."""
    at, _, part = key.rpartition(".")
    longest = draft.source.get("reward_model.reward_kwargs.max_resp_len")
    ours = {
        "enable": ("max_tokens", longest or draft.number_or("data.max_response_length", 512)),
        "len": ("buffer", value),
        "penalty_factor": ("penalty", value),
    }
    if part not in (*ours, "log"):
        draft.lose(key, value, "unknown key")
    elif not draft.known(f"{at}.enable"):
        draft.skip(key, value, "the penalty for length is off")
    elif part in ours:
        draft.set(key, value, f"algorithm.overlong.{ours[part][0]}", ours[part][1])
    else:
        draft.skip(key, value, "the penalty is a reward of its own, `overlong`, and always logged")


def of_critic(rule: Rule) -> Rule:
    return when(GAE, rule, "there is a critic with algorithm.adv_estimator=gae only")


USUAL = {
    "optim.num_cycles": 0.5, "optim.optimizer": "AdamW", "optim.optimizer_impl": "torch.optim", "optim.clip_grad": 1.0,
    "optim.lr_decay_style": "constant", "shuffle": False,
}  # fmt: skip
"""verl's defaults of keys of the policy's section that need no rule."""


def as_the_actor(name: str) -> Rule:
    """A setting of the critic that is the policy's here."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        policy = draft.known(f"{A}{name}")
        policy = USUAL.get(name) if policy is None else policy
        unless(policy, f"the critic has the policy's: {policy}")(draft, key, value)

    return of_critic(rule)


def critic_model(draft: Draft, key: str, value: Any) -> None:
    if value == draft.known(f"{M}path"):
        draft.skip(key, value, "the policy's own model, which a critic begins as anyway")
    else:
        text("learner.critic_from")(draft, key, value)
