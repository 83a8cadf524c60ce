"""ROLL's estimators, normalisation, clipping and penalties. What it does without a word is written out."""

from __future__ import annotations

from typing import Any

from arborl.convert.draft import Draft, names

ESTIMATORS = ("gae", "grpo", "reinforce", "gigpo", "step_reinforce", "agentic_reinforce")
GROUPINGS = {"traj_group_id": "group", "batch": "batch"}
AGGREGATION = {"token-mean": "token", "seq-mean-token-mean": "episode", "seq-mean-token-sum": "fixed"}
PENALTIES = {"kl": "k1", "abs": "abs", "mse": "mse"}
VARIANTS = {"ppo": "ppo", "vanilla": "pg", "topr": "topr", "cispo": "cispo"}


def estimator(draft: Draft, steps: bool, rows: bool) -> None:
    """The advantage. `steps`: each turn is a training row of its own; `rows`: the pipeline with rewards by domain."""
    chosen = draft.source.get("adv_estimator", "gae")
    if chosen not in ESTIMATORS:
        draft.refuse("adv_estimator", chosen, f"no such estimator in ROLL. Write one of {', '.join(ESTIMATORS)}.")
        return
    mean, std = normalisation(draft, str(chosen), rows)
    whiten = bool(draft.source.get("whiten_advantages", False))
    if chosen == "gae":
        _name(draft, chosen, "ppo")
        draft.put("lambd", 0.95, "algorithm.args.gae_lambda")
        draft.put("gamma", 1.0, "algorithm.gamma")
        draft.default("adv_estimator", chosen, "algorithm.args.gae_level", "token")
        _critic(draft)
    elif chosen in ("gigpo", "step_reinforce"):
        _name(draft, chosen, str(chosen))
        draft.put("step_reward_gamma", 0.95, "algorithm.gamma")
        _by_step(draft, str(chosen), mean, std)
    elif chosen == "agentic_reinforce":
        _name(draft, chosen, "turn_discounted")
        draft.put("gamma", 1.0, "algorithm.gamma")
        _normal(draft, "algorithm.std", std)
    else:
        _by_episode(draft, str(chosen), mean, std, whiten)
    _whiten(draft, str(chosen), whiten)
    for key in ("step_reward_gamma", "step_reward_weight", "episode_reward_weight", "gamma", "lambd"):
        if key in draft.source and key not in draft.accounted():
            draft.skip(key, draft.source[key], f"adv_estimator={chosen} does not read it")
    for key in NORMALISATION:
        if key in draft.source and key not in draft.accounted():
            draft.set(key, draft.source[key], "algorithm.name", draft.settings["algorithm.name"])
    aggregation(draft, steps)


def normalisation(draft: Draft, chosen: str, rows: bool) -> tuple[str, str]:
    """What is taken off a score and what it is divided by: `group`, `batch` or `none` each."""
    if rows:
        at, grouping, method = "", "traj_group_id", "identity"
        if chosen == "grpo":
            for key in ("norm_mean_type", "norm_std_type"):
                if key in draft.source:
                    draft.skip(key, draft.source[key], "adv_estimator=grpo always normalises by the group")
            return "group", "group"
    else:
        at = "reward_normalization."
        grouping = str(draft.source.get(f"{at}grouping", "batch"))
        method = str(draft.source.get(f"{at}method", "identity"))
    scope = GROUPINGS.get(grouping, "tags" if grouping == "tags" else grouping)
    mean = draft.source.get(f"{at}norm_mean_type") or (scope if method in ("mean", "mean_std", "asym_clip") else "none")
    std = draft.source.get(f"{at}norm_std_type") or (scope if method in ("mean_std", "asym_clip") else "none")
    found = []
    for key, value in (("norm_mean_type", mean), ("norm_std_type", std)):
        value = scope if value == "group" and scope != "batch" else value
        if value not in ("group", "batch", "none"):
            one = len(names(draft.source.get("train_env_manager.tags"))) == 1 and value == "tags"
            draft.drop(f"{at}{key}", value, "statistics of the batch, which is the same with one tag" if one else
                       f"no statistics by {value} here: those of the group are taken")  # fmt: skip
            value = "batch" if one else "group"
        found.append(str(value))
    return found[0], found[1]


NORMALISATION = tuple(
    f"{at}{key}"
    for at in ("reward_normalization.", "")
    for key in ("grouping", "method", "norm_mean_type", "norm_std_type")
)


def _normal(draft: Draft, path: str, ours: str) -> None:
    """All keys of the normalisation say together what our `path` is."""
    written = [key for key in NORMALISATION if key in draft.source]
    for key in written:
        draft.set(key, draft.source[key], path, ours)
    if not written:
        draft.default("reward_normalization", "as it is", path, ours)


def _name(draft: Draft, theirs: Any, ours: str, why: str = "") -> None:
    if "adv_estimator" in draft.source:
        draft.set("adv_estimator", theirs, "algorithm.name", ours, why)
    else:
        draft.default("adv_estimator", theirs, "algorithm.name", ours, why)


def _by_episode(draft: Draft, chosen: str, mean: str, std: str, whiten: bool) -> None:
    """`grpo` and `reinforce` are the same there: what they are is in the normalisation and the whitening."""
    if mean == "batch" or (mean == "none" and whiten):
        same = std == "batch" or whiten
        why = "" if mean == "none" else "the batch's mean is taken off"
        _name(draft, chosen, "reinforce_plus_plus", why if same else f"{why}, and here it is divided by its deviation")
    elif mean == "group" and std == "none" and whiten:
        _name(draft, chosen, "reinforce_plus_plus_baseline")
    else:
        _name(draft, chosen, "grpo")
        _normal(draft, "algorithm.args.baseline", "mean" if mean == "group" else "none")
        _normal(draft, "algorithm.std", std)


def _by_step(draft: Draft, chosen: str, mean: str, std: str) -> None:
    _normal(draft, "algorithm.std", std)
    if chosen == "step_reinforce":
        _normal(draft, "algorithm.args.baseline", "mean" if mean == "group" else "none")
        if mean == "batch":
            draft.drop("reward_normalization", "batch", "the batch's mean is not taken off a step's return here")
        return
    whole = draft.number("episode_reward_weight", 1.0)
    step = draft.number("step_reward_weight", 1.0)
    if not whole:
        draft.drop(
            "episode_reward_weight", whole, "0 leaves the comparison by step alone: write adv_estimator=step_reinforce"
        )
        whole = 1.0
    why = "" if whole == 1 else "divided by episode_reward_weight, which scales all advantages alike"
    key = "step_reward_weight"
    (draft.set if key in draft.source else draft.default)(key, step, "algorithm.args.step_weight", step / whole, why)
    if "episode_reward_weight" in draft.source and "episode_reward_weight" not in draft.accounted():
        draft.set("episode_reward_weight", whole, "algorithm.args.step_weight", step / whole, why)
    if mean == "none":
        draft.drop("reward_normalization.method", "identity", "gigpo compares here: the group's mean is taken off")


def _whiten(draft: Draft, chosen: str, whiten: bool) -> None:
    """Whitening over all tokens of the batch; our `ppo` whitens by default."""
    if whiten:
        draft.set("whiten_advantages", True, "algorithm.whiten", "token")
    elif "whiten_advantages" in draft.source:
        draft.skip("whiten_advantages", False, "off")
    if not whiten and chosen == "gae":
        draft.default("whiten_advantages", False, "algorithm.whiten", False)


def _critic(draft: Draft) -> None:
    """A model of its own, from `reward_pretrain`, with a learning rate of its own."""
    draft.default("critic", "a model of its own", "learner.critic", "separate")
    if "reward_pretrain" in draft.source:
        draft.set(
            "reward_pretrain", draft.source["reward_pretrain"], "learner.critic_from", draft.source["reward_pretrain"]
        )
    draft.put("critic.training_args.learning_rate", 5e-5, "learner.critic_lr")
    if (clip := draft.source.get("value_clip")) is not None:
        draft.set("value_clip", clip, "algorithm.args.value_clip", clip)


def aggregation(draft: Draft, steps: bool) -> None:
    """How token losses become one: there the mean over rows, which are turns or whole episodes."""
    key, mode = "loss_agg_mode", draft.source.get("loss_agg_mode", "seq-mean-token-mean")
    say = draft.set if key in draft.source else draft.default
    if mode == "seq-mean-token-sum-norm":
        say(key, mode, "algorithm.aggregation", "fixed", "the mean over episodes; there their sum")
        draft.settings["algorithm.args.fixed_length"] = draft.whole("sequence_length", 1024)
    elif mode not in AGGREGATION:
        draft.refuse(key, mode, f"no such mode in ROLL. Write one of {', '.join(AGGREGATION)}.")
    elif mode == "seq-mean-token-sum":
        say(
            key,
            mode,
            "algorithm.aggregation",
            "fixed",
            "summed within an episode; there within a turn" if steps else "",
        )
        draft.settings["algorithm.args.fixed_length"] = 1
    else:
        say(key, mode, "algorithm.aggregation", "call" if steps and mode != "token-mean" else AGGREGATION[mode])
    draft.default("zero-variance groups", "count in the mean", "algorithm.skip_zero_variance", False)


def loss(draft: Draft, role: str) -> None:
    """The ratio, where it is clipped, and what it is taken against."""
    ratio = "ratio_type" if "ratio_type" in draft.source else "importance_sampling"
    kind = draft.source.get(ratio, "token")
    variant = draft.source.get(f"{role}.pg_variant")
    if variant is not None and str(draft.source.get(f"{role}.worker_cls", "")).find("pg_worker") < 0:
        draft.skip(
            f"{role}.pg_variant", variant, "not read without a worker_cls of agentic_actor_pg_worker or actor_pg_worker"
        )
        variant = None
    if variant is not None:
        variant = str(variant)
        if variant in VARIANTS:
            draft.set(f"{role}.pg_variant", variant, "algorithm.loss", VARIANTS[variant])
        else:
            draft.refuse(f"{role}.pg_variant", variant, f"no such loss here. Write one of {', '.join(VARIANTS)}.")
    elif kind in ("segment", "seq"):
        draft.set(ratio, kind, "algorithm.loss", "gspo")
        draft.settings["algorithm.args.sequence"] = "call" if kind == "segment" else "episode"
    elif ratio in draft.source:
        draft.set(ratio, kind, "algorithm.loss", "ppo")
    if draft.settings.get("algorithm.name") == "step_reinforce":
        draft.default("loss", "PPO's, clipped", "algorithm.loss", "ppo")
    clips(draft)
    correction(draft)
    draft.default("old_log_probs", "of the learner", "algorithm.anchor", "proximal")


def clips(draft: Draft) -> None:
    """The range of the ratio, the second clip, and bounds on advantages."""
    ranged = bool(draft.source.get("use_pg_clip_range", False))
    both = draft.source.get("pg_clip", 0.2)
    for side in ("low", "high"):
        key = f"pg_clip_{side}" if ranged else "pg_clip"
        draft.put(key, both if not ranged else 0.2, f"algorithm.clip_{side}", float)
        if not ranged and f"pg_clip_{side}" in draft.source:
            draft.skip(f"pg_clip_{side}", draft.source[f"pg_clip_{side}"], "not read without use_pg_clip_range")
    if draft.source.get("dual_clip_loss"):
        bound, high = 1 + 2 * float(both), float(draft.settings["algorithm.clip_high"])
        if bound > 1 + high:
            draft.set("dual_clip_loss", True, "algorithm.args.dual_clip", bound)
        else:
            draft.skip(
                "dual_clip_loss", True, f"its bound {bound:g} lies within clip_high={high:g}, where it never acts"
            )
    clip, most = draft.source.get("advantage_clip"), draft.source.get("reward_clip")
    if clip is not None:
        draft.set("advantage_clip", clip, "algorithm.advantage_clip", float(clip))
    if most is not None and clip is None and draft.source.get("adv_estimator", "gae") != "gae":
        draft.set(
            "reward_clip", most, "algorithm.advantage_clip", float(most), "there before whitening, here after all else"
        )
    elif most is not None:
        draft.drop("reward_clip", most, "advantages are clipped by advantage_clip; rewards are not clipped here")


def correction(draft: Draft) -> None:
    """`train_infer_correction`: the gap between the engine that sampled and the model that learns."""
    at = "train_infer_correction."
    if draft.source.get(f"{at}is_weight.enabled"):
        weight = draft.source.get(f"{at}is_weight.weight_type", "token")
        draft.set(f"{at}is_weight.enabled", True, "algorithm.importance_weights.kind", "tis")
        draft.put(
            f"{at}is_weight.upper_bound", 1.2, "algorithm.importance_weights.high", lambda high: float(high or 1e6)
        )
        why = (
            "" if weight in ("token", "geometric") else f"{weight}: the geometric mean over an episode or call is taken"
        )
        draft.set(
            f"{at}is_weight.weight_type",
            weight,
            "algorithm.importance_weights.level",
            "token" if weight == "token" else "sequence",
            why,
        )
        if weight == "segment":
            draft.settings["algorithm.args.sequence"] = "call"
    filters = [one for one in draft.source.get(f"{at}filters") or [] if one.get("enabled")]
    if filters and "algorithm.importance_weights.kind" in draft.settings:
        draft.drop(f"{at}filters", filters, "one guard at a time: the weight is kept, the filters are not")
    elif filters:
        first = filters[0]
        why = "" if len(filters) == 1 and not first.get("diff_enabled") else "the first filter's ratios alone"
        draft.set(f"{at}filters", filters, "algorithm.importance_weights.kind", "mis", why)
        draft.settings["algorithm.importance_weights.low"] = float(first.get("ratio_low", 0.8))
        draft.settings["algorithm.importance_weights.high"] = float(first.get("ratio_high", 1.2))
        if first.get("agg_type", "token") != "token":
            draft.settings["algorithm.importance_weights.level"] = "sequence"
    for key in draft.below(at):
        if f"{at}{key}" not in draft.accounted():
            draft.skip(f"{at}{key}", draft.source[f"{at}{key}"], "off, or as it is here")


def penalties(draft: Draft) -> None:
    """KL in the loss (k3), or off the reward where `add_token_level_kl` says so; entropy."""
    source = draft.source
    coef = draft.number("kl_loss_coef", 0.0)
    in_loss = bool(source.get("use_kl_loss")) and coef > 0
    in_reward = bool(source.get("add_token_level_kl")) and draft.number("init_kl_coef", 0.2) > 0
    if in_loss:
        draft.set("kl_loss_coef", coef, "algorithm.kl.coef", coef)
        draft.set("use_kl_loss", True, "algorithm.kl.estimator", "k3")
    elif in_reward:
        draft.set("add_token_level_kl", True, "algorithm.kl.where", "reward")
        draft.put("init_kl_coef", 0.2, "algorithm.kl.coef", float)
        draft.put("kl_penalty", "kl", "algorithm.kl.estimator", lambda name: PENALTIES.get(str(name), "k1"))
        if source.get("target_kl") is not None:
            draft.set("target_kl", source["target_kl"], "algorithm.kl.target", float(source["target_kl"]),
                      "an episode's KL; there a token's")  # fmt: skip
            draft.put("kl_horizon", 10_000, "algorithm.kl.horizon")
    why = {
        "use_kl_loss": "off, or its kl_loss_coef is 0",
        "kl_loss_coef": "not read without use_kl_loss",
        "add_token_level_kl": "there is a penalty in the loss already" if in_loss else "off",
        "init_kl_coef": "there is a penalty in the loss already" if in_loss else
        "not read without add_token_level_kl: it only decides whether KL is measured",
        "kl_penalty": "not read without add_token_level_kl",
        "target_kl": "none, or not read without add_token_level_kl",
        "kl_horizon": "not read without target_kl",
    }  # fmt: skip
    for key, reason in why.items():
        if key in source and key not in draft.accounted():
            draft.skip(key, source[key], reason)
    if "entropy_loss_coef" in source:
        coef = source["entropy_loss_coef"]
        draft.set("entropy_loss_coef", coef, "algorithm.entropy_coef", float(coef))
