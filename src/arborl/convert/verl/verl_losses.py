"""verl's advantages, losses and penalties. A loss without counterpart is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arborl.convert.draft import Draft, Rule
from arborl.convert.verl.verl_defaults import A, R, known, number
from arborl.convert.verl.verl_rules import choice, num, text, unless

ESTIMATORS = {
    "grpo": "grpo", "grpo_vectorized": "grpo", "gae": "ppo", "rloo": "rloo", "rloo_vectorized": "rloo",
    "remax": "remax", "reinforce": "reinforce", "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "opo": "opo", "gigpo": "gigpo",
}  # fmt: skip
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "gpg": "pg"}
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "mse", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
COMPARE = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gigpo")
ALONE = {"rloo": "reinforce", "opo": "reinforce", "reinforce_plus_plus_baseline": "reinforce_plus_plus"}
"""What an advantage that compares comes to there with one episode a task, which is compared with nothing."""
BY_SEQUENCE = ("gspo", "sapo")
"""Losses that verl averages over sequences, whatever `loss_agg_mode` says."""
NO_CRITIC = "there is a critic with algorithm.adv_estimator=gae only"


def estimator(draft: Draft, key: str, value: Any) -> None:
    ours = ESTIMATORS.get(str(value))
    if ours is None:
        draft.refuse(
            key, value, "there is no such advantage here. Put another into the script; yours can then be named as "
            "algorithm.advantage=package.module:function."
        )  # fmt: skip
        return
    settings: dict[str, Any] = {}
    if ours in COMPARE:
        settings["algorithm.skip_zero_variance"] = False
    if number(draft, f"{R}n", 1) == 1 and "agent.num_chains" not in draft.source and ours in COMPARE:
        settings = {"algorithm.args.baseline": "none", "algorithm.std": "none"} if ours == "grpo" else {}
        ours = ALONE.get(ours, ours)
    draft.set(key, value, "algorithm.name", ours)
    if ours == "ppo":
        settings = {"algorithm.args.gae_level": "token", "learner.critic": "separate", "algorithm.args.value_coef": 1.0}
    if ours in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        settings["algorithm.whiten"] = "token"
    for path, setting in settings.items():
        draft.set(key, value, path, setting)


def by_std(draft: Draft, key: str, value: Any) -> None:
    if known(draft, "algorithm.adv_estimator") not in ("grpo", "grpo_vectorized"):
        draft.skip(key, value, "read with adv_estimator=grpo only")
    elif draft.settings.get("algorithm.args.baseline") == "none":
        draft.skip(key, value, "a group of one has no deviation")
    else:
        draft.set(key, value, "algorithm.std", "group" if value else "none")


def gamma(draft: Draft, key: str, value: Any) -> None:
    if known(draft, "algorithm.adv_estimator") == "gae":
        num("algorithm.gamma")(draft, key, value)
    elif known(draft, "algorithm.adv_estimator") == "reinforce_plus_plus":
        unless((1, 1.0), "reinforce_plus_plus does not discount here")(draft, key, value)
    else:
        draft.skip(key, value, f"algorithm={known(draft, 'algorithm.adv_estimator')} does not read it")


def loss_mode(draft: Draft, key: str, value: Any) -> None:
    if bare_gradient(draft):
        draft.set(key, value, "algorithm.loss", "pg")
        return
    remedy = "Put another into the script; yours can then be named as algorithm.loss=package.module:function."
    choice("algorithm.loss", LOSSES, remedy)(draft, key, value)
    if LOSSES.get(str(value)) in BY_SEQUENCE:
        draft.set(key, value, "algorithm.aggregation", "episode")
    if LOSSES.get(str(value)) in ("ppo", "gspo", "sapo", "cispo"):
        bypass = known(draft, "algorithm.rollout_correction.bypass_mode")
        draft.set(key, value, "algorithm.anchor", "rollout" if bypass else "proximal")


def bare_gradient(draft: Draft) -> bool:
    """Whether `rollout_correction` puts REINFORCE in the place of the loss that is named."""
    at = "algorithm.rollout_correction."
    return bool(known(draft, f"{at}bypass_mode")) and known(draft, f"{at}loss_type") == "reinforce"


def aggregation(draft: Draft, key: str, value: Any) -> None:
    mode = known(draft, f"{A}policy_loss.loss_mode")
    if LOSSES.get(str(mode)) in BY_SEQUENCE:
        draft.skip(key, value, f"{mode} is a mean over sequences there, whatever this says; a KL loss follows it here")
        return
    if value in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        length = 1 if value == "seq-mean-token-sum" else known(draft, f"{A}loss_scale_factor") or int(
            draft.source.get(f"{R}response_length") or number(draft, "data.max_response_length", 512)
        )  # fmt: skip
        why = (
            "verl's is not a mean over sequences, but a sum over those of a micro-batch" if value[-4:] == "norm" else ""
        )
        draft.set(key, value, "algorithm.aggregation", "fixed", why)
        draft.set(key, value, "algorithm.args.fixed_length", length)
        return
    ways = {"token-mean": "token", "seq-mean-token-mean": "episode"}
    choice("algorithm.aggregation", ways, f"Known: {', '.join(ways)}.")(draft, key, value)


def _loss(draft: Draft) -> str | None:
    return "pg" if bare_gradient(draft) else LOSSES.get(str(known(draft, f"{A}policy_loss.loss_mode")))


def clip(draft: Draft, key: str, value: Any) -> None:
    """Read where one of the other two is null; at verl's defaults neither is."""
    sides = [side for side in ("low", "high") if known(draft, f"{A}clip_ratio_{side}") is None]
    if not sides:
        draft.skip(key, value, "verl reads clip_ratio_low and clip_ratio_high in its place, 0.2 where not given")
    for side in sides:
        clip_side(side)(draft, key, value)


def clip_side(side: str) -> Rule:
    def rule(draft: Draft, key: str, value: Any) -> None:
        loss = _loss(draft)
        if value is None:
            draft.skip(key, value, "null: clip_ratio is read in its place")
        elif loss not in ("ppo", "gspo", "cispo"):
            draft.skip(key, value, "this loss does not clip")
        elif side == "high":
            num("algorithm.clip_high")(draft, key, value)
        elif loss == "cispo":
            unless(tuple([value] if value >= 1 else []), "cispo has no lower bound here")(draft, key, value)
        else:
            num("algorithm.clip_low", lambda low: min(low, 1 - 1e-6))(draft, key, value)

    return rule


def second_clip(draft: Draft, key: str, value: Any) -> None:
    if _loss(draft) != "ppo":
        draft.skip(key, value, "read with loss_mode=vanilla only")
    else:
        num("algorithm.args.dual_clip")(draft, key, value)


def kl_part(path: str, table: Mapping[str, str] | None = None) -> Rule:
    """Of a penalty in the loss."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if not known(draft, f"{A}use_kl_loss"):
            draft.skip(key, value, "not read without use_kl_loss")
        elif table is not None:
            choice(path, table, "Write low_var_kl, kl, abs or mse.")(draft, key, value)
        else:
            num(path)(draft, key, value)

    return rule


def kl_loss(draft: Draft, key: str, value: Any) -> None:
    there = "a KL penalty in the loss; see kl_loss_coef and kl_loss_type"
    draft.skip(key, value, there if value else "no KL penalty in the loss, as here without algorithm.kl.coef")


def kl_reward(draft: Draft, key: str, value: Any) -> None:
    """`algorithm.kl_ctrl.kl_coef` and `algorithm.kl_penalty`."""
    if not known(draft, "algorithm.use_kl_in_reward"):
        draft.skip(key, value, "not read without use_kl_in_reward")
    elif known(draft, f"{A}use_kl_loss"):
        draft.drop(key, value, "there is a penalty in the loss already, and only one of both here")
    elif key == "algorithm.kl_penalty":
        choice("algorithm.kl.estimator", KL, "Write kl, abs, mse or low_var_kl.")(draft, key, value)
    else:
        num("algorithm.kl.coef")(draft, key, value)
        draft.set(key, value, "algorithm.kl.where", "reward")


def kl_control(draft: Draft, key: str, value: Any) -> None:
    moves = known(draft, "algorithm.kl_ctrl.type") == "adaptive" and known(draft, "algorithm.use_kl_in_reward")
    why = "the coefficient stays: algorithm.kl.target, which moves it, is the KL of an episode here, there of a token"
    (draft.drop if moves else draft.skip)(key, value, why if moves else "the coefficient stays, as here")


def correction(draft: Draft, key: str, value: Any) -> None:
    """`rollout_is` and `rollout_is_threshold`, of `algorithm.rollout_correction` or, in 0.6, of `algorithm` itself."""
    at = key.rpartition(".")[0]
    level = known(draft, f"{at}.rollout_is_level") if at == "algorithm" else known(draft, f"{at}.rollout_is")
    mode = known(draft, f"{at}.rollout_is_mode") or "truncate"
    if not known(draft, f"{at}.rollout_is") or (known(draft, f"{at}.bypass_mode") and not bare_gradient(draft)):
        draft.skip(key, value, "no importance weights")
        return
    high = number(draft, f"{at}.rollout_is_threshold", 2.0)
    draft.set(key, value, "algorithm.importance_weights.kind", "tis" if mode == "truncate" else "mis")
    draft.set(key, value, "algorithm.importance_weights.high", high)
    if mode != "truncate":
        draft.set(
            key,
            value,
            "algorithm.importance_weights.low",
            number(draft, f"{at}.rollout_is_threshold_lower") or 1 / high,
        )
    if level in ("sequence", "geometric"):
        why = "the geometric mean of a sequence's ratios, there their product" if level == "sequence" else ""
        draft.set(key, value, "algorithm.importance_weights.level", "sequence", why)


def rejection(draft: Draft, key: str, value: Any) -> None:
    rejection = known(draft, "algorithm.rollout_correction.rollout_rs")
    why = "tokens far from the sampling policy are not masked; algorithm.importance_weights=mis masks them by ratio"
    (draft.drop if rejection else draft.skip)(key, value, why if rejection else "nothing is rejected")


def group_filter(draft: Draft, key: str, value: Any) -> None:
    """`filter_groups.enable`, and `data.gen_batch_size` beside it."""
    if not known(draft, "algorithm.filter_groups.enable"):
        draft.skip(key, value, "no groups are filtered")
        return
    draft.set(key, value, "rollout.group_filter", "varied")
    tasks = number(draft, "data.train_batch_size", 1024)
    spare = int(number(draft, "data.gen_batch_size", tasks) - tasks)
    if spare > 0:
        why = "there batch after batch is played until enough are left, here those of one"
        draft.set(key, value, "rollout.spare_groups", spare, why)


def overlong_buffer(draft: Draft, key: str, value: Any) -> None:
    """`overlong_buffer` of the DAPO recipe, `reward_kwargs.overlong_buffer_cfg` elsewhere."""
    at = key.rpartition(".")[0]
    if not known(draft, f"{at}.enable"):
        draft.skip(key, value, "the penalty for length is off")
        return
    longest = draft.source.get("reward_model.reward_kwargs.max_resp_len") or number(
        draft, "data.max_response_length", 512
    )
    ours = {
        "enable": ("algorithm.overlong.max_tokens", longest),
        "len": ("algorithm.overlong.buffer", value),
        "penalty_factor": ("algorithm.overlong.penalty", value),
    }
    part = key.rpartition(".")[2]
    if part in ours:
        draft.set(key, value, *ours[part])
    else:
        draft.skip(key, value, "the penalty is a reward of its own, `overlong`, and always logged")


def gate(path: str) -> Rule:
    """A temperature of SAPO's."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if known(draft, f"{A}policy_loss.loss_mode") == "sapo":
            num(path)(draft, key, value)
        else:
            draft.skip(key, value, "read with loss_mode=sapo only")

    return rule


def of_gae(rule: Rule) -> Rule:
    """A key that only GAE reads."""

    def checked(draft: Draft, key: str, value: Any) -> None:
        if known(draft, "algorithm.adv_estimator") == "gae":
            rule(draft, key, value)
        else:
            draft.skip(key, value, "read with adv_estimator=gae only")

    return checked


def of_critic(rule: Rule) -> Rule:
    """A key of the critic, where there is one."""

    def checked(draft: Draft, key: str, value: Any) -> None:
        if known(draft, "algorithm.adv_estimator") == "gae":
            rule(draft, key, value)
        else:
            draft.skip(key, value, NO_CRITIC)

    return checked


def as_the_actor(theirs: str) -> Rule:
    """A setting of the critic that is the policy's here."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        unless(known(draft, theirs), f"the critic has the policy's: {known(draft, theirs)}")(draft, key, value)

    return rule


def critic_model(draft: Draft, key: str, value: Any) -> None:
    if value == known(draft, "actor_rollout_ref.model.path"):
        draft.skip(key, value, "the policy's own model, which a critic begins as anyway")
    else:
        text("learner.critic_from")(draft, key, value)
