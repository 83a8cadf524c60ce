"""ROLL's estimators, normalisation, clipping and penalties. Its defaults are written out."""

from __future__ import annotations

from arborl.convert.draft import Draft, names

ESTIMATORS = ("gae", "grpo", "reinforce", "gigpo", "step_reinforce", "agentic_reinforce")
GROUPINGS = {"traj_group_id": "group", "batch": "batch"}
AGGREGATION = {"token-mean": "token", "seq-mean-token-mean": "episode", "seq-mean-token-sum": "fixed"}
PENALTIES = {"kl": "k1", "abs": "abs", "mse": "mse"}
VARIANTS = {"ppo": "ppo", "vanilla": "pg", "topr": "topr", "cispo": "cispo"}
NORMALISATION = tuple(
    f"{at}{key}"
    for at in ("reward_normalization.", "")
    for key in ("grouping", "method", "norm_mean_type", "norm_std_type")
)


def estimator(draft: Draft, steps: bool, rows: bool) -> None:
    chosen = draft.source.get("adv_estimator", "gae")
    if chosen not in ESTIMATORS:
        draft.refuse("adv_estimator", chosen, f"no such estimator in ROLL. Write one of {', '.join(ESTIMATORS)}.")
        return
    mean, std = normalisation(draft, str(chosen), rows)
    whiten = bool(draft.source.get("whiten_advantages", False))
    if chosen == "gae":
        _name(draft, "ppo")
        draft.put("lambd", 0.95, "algorithm.args.gae_lambda")
        draft.put("gamma", 1.0, "algorithm.gamma")
        draft.default("adv_estimator", chosen, "algorithm.args.gae_level", "token")
        _critic(draft)
    elif chosen in ("gigpo", "step_reinforce"):
        _name(draft, str(chosen))
        draft.put("step_reward_gamma", 0.95, "algorithm.gamma")
        _by_step(draft, str(chosen), mean, std)
    elif chosen == "agentic_reinforce":
        _name(draft, "turn_discounted")
        draft.put("gamma", 1.0, "algorithm.gamma")
        _normal(draft, "algorithm.std", std)
    else:
        _by_episode(draft, mean, std, whiten)
    if whiten:
        draft.set("whiten_advantages", True, "algorithm.whiten", "token")
    else:
        draft.skip_rest(["whiten_advantages"], "off")
        if chosen == "gae":  # our `ppo` whitens by default
            draft.default("whiten_advantages", False, "algorithm.whiten", False)
    unread = ("step_reward_gamma", "step_reward_weight", "episode_reward_weight", "gamma", "lambd")
    draft.skip_rest(unread, f"adv_estimator={chosen} does not read it")
    for key in NORMALISATION:
        if key in draft.source and key not in draft.accounted():
            draft.set(key, draft.source[key], "algorithm.name", draft.settings["algorithm.name"])
    aggregation(draft, steps)


def normalisation(draft: Draft, chosen: str, rows: bool) -> tuple[str, str]:
    """What is subtracted from a score and what it is divided by: `group`, `batch` or `none` each."""
    if rows and chosen == "grpo":
        draft.skip_rest(("norm_mean_type", "norm_std_type"), "adv_estimator=grpo always normalises by the group")
        return "group", "group"
    at, grouping, method = "", "traj_group_id", "identity"
    if not rows:
        at = "reward_normalization."
        grouping = str(draft.source.get(f"{at}grouping", "batch"))
        method = str(draft.source.get(f"{at}method", "identity"))
    scope = GROUPINGS.get(grouping, grouping)
    mean = draft.source.get(f"{at}norm_mean_type") or (scope if method in ("mean", "mean_std", "asym_clip") else "none")
    std = draft.source.get(f"{at}norm_std_type") or (scope if method in ("mean_std", "asym_clip") else "none")
    found = []
    for key, value in (("norm_mean_type", mean), ("norm_std_type", std)):
        value = scope if value == "group" and scope != "batch" else value
        if value not in ("group", "batch", "none"):
            one = len(names(draft.source.get("train_env_manager.tags"))) == 1 and value == "tags"
            why = f"no statistics by {value} here: those of the group are taken"
            draft.lose(f"{at}{key}", value, "statistics of the batch, which is the same with one tag" if one else why)
            value = "batch" if one else "group"
        found.append(str(value))
    return found[0], found[1]


def _normal(draft: Draft, path: str, ours: str) -> None:
    """All keys of the normalisation together decide our `path`."""
    written = [key for key in NORMALISATION if key in draft.source]
    for key in written:
        draft.set(key, draft.source[key], path, ours)
    if not written:
        draft.default("reward_normalization", "as it is", path, ours)


def _name(draft: Draft, ours: str, why: str = "") -> None:
    draft.say("adv_estimator", "gae", "algorithm.name", ours, why)


def _by_episode(draft: Draft, mean: str, std: str, whiten: bool) -> None:
    """`grpo` and `reinforce` are the same there: normalisation and whitening decide."""
    if mean == "batch" or (mean == "none" and whiten):
        why = "" if mean == "none" else "the batch's mean is taken off"
        same = std == "batch" or whiten
        _name(draft, "reinforce_plus_plus", why if same else f"{why}, and here it is divided by its deviation")
    elif mean == "group" and std == "none" and whiten:
        _name(draft, "reinforce_plus_plus_baseline")
    else:
        _name(draft, "grpo")
        _normal(draft, "algorithm.args.baseline", "mean" if mean == "group" else "none")
        _normal(draft, "algorithm.std", std)


def _by_step(draft: Draft, chosen: str, mean: str, std: str) -> None:
    _normal(draft, "algorithm.std", std)
    if chosen == "step_reinforce":
        _normal(draft, "algorithm.args.baseline", "mean" if mean == "group" else "none")
        if mean == "batch":
            draft.lose("reward_normalization", "batch", "the batch's mean is not taken off a step's return here")
        return
    whole, step = draft.number("episode_reward_weight", 1.0), draft.number("step_reward_weight", 1.0)
    if not whole:
        why = "0 leaves the comparison by step alone: write adv_estimator=step_reinforce"
        draft.lose("episode_reward_weight", whole, why)
        whole = 1.0
    why = "" if whole == 1 else "divided by episode_reward_weight, which scales all advantages alike"
    draft.say("step_reward_weight", step, "algorithm.args.step_weight", step / whole, why)
    if "episode_reward_weight" in draft.source and "episode_reward_weight" not in draft.accounted():
        draft.set("episode_reward_weight", whole, "algorithm.args.step_weight", step / whole, why)
    if mean == "none":
        draft.lose("reward_normalization.method", "identity", "gigpo compares here: the group's mean is taken off")


def _critic(draft: Draft) -> None:
    """A model of its own, from `reward_pretrain`, with a learning rate of its own."""
    draft.default("critic", "a model of its own", "learner.critic", "separate")
    if "reward_pretrain" in draft.source:
        draft.put("reward_pretrain", None, "learner.critic_from")
    draft.put("critic.training_args.learning_rate", 5e-5, "learner.critic_lr")
    if draft.source.get("value_clip") is not None:
        draft.put("value_clip", None, "algorithm.args.value_clip")


def aggregation(draft: Draft, steps: bool) -> None:
    """How token losses become one: there the mean over rows, which are turns or whole episodes."""
    key, mode = "loss_agg_mode", draft.source.get("loss_agg_mode", "seq-mean-token-mean")
    if mode == "seq-mean-token-sum-norm":
        draft.say(key, mode, "algorithm.aggregation", "fixed", "the mean over episodes; there their sum")
        draft.settings["algorithm.args.fixed_length"] = draft.whole("sequence_length", 1024)
    elif mode not in AGGREGATION:
        draft.refuse(key, mode, f"no such mode in ROLL. Write one of {', '.join(AGGREGATION)}.")
    elif mode == "seq-mean-token-sum":
        why = "summed within an episode; there within a turn" if steps else ""
        draft.say(key, mode, "algorithm.aggregation", "fixed", why)
        draft.settings["algorithm.args.fixed_length"] = 1
    else:
        ours = "call" if steps and mode != "token-mean" else AGGREGATION[mode]
        draft.say(key, mode, "algorithm.aggregation", ours)
    draft.default("zero-variance groups", "count in the mean", "algorithm.skip_zero_variance", False)


def loss(draft: Draft, role: str) -> None:
    """The ratio, its clipping, and the policy that it is taken against."""
    ratio = "ratio_type" if "ratio_type" in draft.source else "importance_sampling"
    kind = draft.source.get(ratio, "token")
    key = f"{role}.pg_variant"
    variant = draft.source.get(key)
    if variant is not None and "pg_worker" not in str(draft.source.get(f"{role}.worker_cls", "")):
        why = "not read without a worker_cls of agentic_actor_pg_worker or actor_pg_worker"
        draft.skip(key, variant, why)
        variant = None
    if variant is not None and str(variant) not in VARIANTS:
        draft.refuse(key, variant, f"no such loss here. Write one of {', '.join(VARIANTS)}.")
    elif variant is not None:
        draft.set(key, variant, "algorithm.loss", VARIANTS[str(variant)])
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
    both = draft.source.get("pg_clip", 0.2)
    for side in ("low", "high"):
        if draft.source.get("use_pg_clip_range"):
            draft.put(f"pg_clip_{side}", 0.2, f"algorithm.clip_{side}", float)
        else:
            draft.put("pg_clip", both, f"algorithm.clip_{side}", float)
            draft.skip_rest([f"pg_clip_{side}"], "not read without use_pg_clip_range")
    loss = str(draft.settings.get("algorithm.loss", "ppo"))
    if draft.source.get("dual_clip_loss"):
        bound, high = 1 + 2 * float(both), float(draft.settings["algorithm.clip_high"])
        if loss == "gspo":
            draft.lose("dual_clip_loss", True, "loss=gspo has no second clip")
        elif loss != "ppo":
            draft.skip("dual_clip_loss", True, f"not read there with loss {loss}")
        elif bound > 1 + high:
            draft.set("dual_clip_loss", True, "algorithm.args.dual_clip", bound)
        else:
            why = f"its bound {bound:g} lies within clip_high={high:g}, where it never acts"
            draft.skip("dual_clip_loss", True, why)
    clip, most = draft.source.get("advantage_clip"), draft.source.get("reward_clip")
    if clip is not None:
        draft.set("advantage_clip", clip, "algorithm.advantage_clip", float(clip))
    if most is not None and clip is None and draft.source.get("adv_estimator", "gae") != "gae":
        why = "there before whitening, here after all else"
        draft.set("reward_clip", most, "algorithm.advantage_clip", float(most), why)
    elif most is not None:
        draft.lose("reward_clip", most, "advantages are clipped by advantage_clip; rewards are not clipped here")


def correction(draft: Draft) -> None:
    """`train_infer_correction`: the gap between the engine that sampled and the model that learns."""
    at, weights = "train_infer_correction.", "algorithm.importance_weights."
    if draft.source.get(f"{at}is_weight.enabled"):
        draft.set(f"{at}is_weight.enabled", True, f"{weights}kind", "tis")
        draft.put(f"{at}is_weight.upper_bound", 1.2, f"{weights}high", lambda high: float(high or 1e6))
        level = draft.source.get(f"{at}is_weight.weight_type", "token")
        mean = f"{level}: the geometric mean over an episode or call is taken"
        why = "" if level in ("token", "geometric") else mean
        ours = "token" if level == "token" else "sequence"
        draft.say(f"{at}is_weight.weight_type", level, f"{weights}level", ours, why)
        if level == "segment":
            draft.settings["algorithm.args.sequence"] = "call"
    filters = [one for one in draft.source.get(f"{at}filters") or [] if one.get("enabled")]
    if filters and f"{weights}kind" in draft.settings:
        draft.lose(f"{at}filters", filters, "one guard at a time: the weight is kept, the filters are not")
    elif filters:
        first = filters[0]
        why = "" if len(filters) == 1 and not first.get("diff_enabled") else "the first filter's ratios alone"
        draft.set(f"{at}filters", filters, f"{weights}kind", "mis", why)
        draft.settings[f"{weights}low"] = float(first.get("ratio_low", 0.8))
        draft.settings[f"{weights}high"] = float(first.get("ratio_high", 1.2))
        if first.get("agg_type", "token") != "token":
            draft.settings[f"{weights}level"] = "sequence"
    off = [f"{at}{key}" for key in ("is_weight.enabled", "is_weight.weight_type", "is_weight.upper_bound", "filters")]
    draft.skip_rest(off, "off")
    detach = f"{at}is_weight.detach"
    if draft.source.get(detach) is False:
        draft.lose(detach, False, "no gradient flows through the weights")
    draft.skip_rest([detach], "as it is here")


def penalties(draft: Draft) -> None:
    """KL in the loss (k3), or off the reward where `add_token_level_kl` says so; entropy."""
    source = draft.source
    coef = draft.number("kl_loss_coef", 0.0)
    in_loss = bool(source.get("use_kl_loss")) and coef > 0
    if in_loss:
        draft.set("kl_loss_coef", coef, "algorithm.kl.coef", coef)
        draft.set("use_kl_loss", True, "algorithm.kl.estimator", "k3")
    elif source.get("add_token_level_kl") and draft.number("init_kl_coef", 0.2) > 0:
        draft.set("add_token_level_kl", True, "algorithm.kl.where", "reward")
        draft.put("init_kl_coef", 0.2, "algorithm.kl.coef", float)
        draft.put("kl_penalty", "kl", "algorithm.kl.estimator", lambda name: PENALTIES.get(str(name), "k1"))
        if (target := source.get("target_kl")) is not None:
            draft.set("target_kl", target, "algorithm.kl.target", float(target), "an episode's KL; there a token's")
            draft.put("kl_horizon", 10_000, "algorithm.kl.horizon")
    why = {
        "use_kl_loss": "off, or its kl_loss_coef is 0",
        "kl_loss_coef": "not read without use_kl_loss",
        "add_token_level_kl": "off",
        "init_kl_coef": "not read without add_token_level_kl: it only decides whether KL is measured",
        "kl_penalty": "not read without add_token_level_kl",
        "target_kl": "none, or not read without add_token_level_kl",
        "kl_horizon": "not read without target_kl",
    }
    if in_loss:
        why |= dict.fromkeys(("add_token_level_kl", "init_kl_coef"), "there is a penalty in the loss already")
    for key, reason in why.items():
        draft.skip_rest([key], reason)
    if "entropy_loss_coef" in source:
        draft.put("entropy_loss_coef", None, "algorithm.entropy_coef", float)
