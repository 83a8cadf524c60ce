"""verl's keys, those of its mixed-training and StateLM forks included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arborl.convert.draft import Draft, Rule, no, to

ESTIMATORS = {
    "grpo": "grpo", "gae": "ppo", "rloo": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "opo": "opo", "gigpo": "gigpo",
}  # fmt: skip
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "mse", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
AGGREGATION = {"token-mean": "token", "seq-mean-token-mean": "episode"}
DEFAULTS = {"algorithm.aggregation": "token", "algorithm.dual_clip": 3.0}
"""What PPO's loss does there where nothing is said, and would not do here."""
AGENTS = {
    "tool_agent": "tool", "single_turn_agent": "chat", "code_execution_agent": "code", "statelm_tool_agent": "statelm",
}  # fmt: skip

ENGINE = "sampling is done by Arbor's own engine, which shares the learner's weights"
PLACEMENT = "the model is trained in one process; nothing is sharded or off-loaded"
MICRO = "micro-batches are counted in tokens, and change nothing but memory: learner.micro_batch_tokens"
CLUSTER = "one machine is used; there is nothing to say about nodes and GPUs"


def files(path: str) -> Rule:
    """A file, or a list of one; several are several sources."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        given = value if isinstance(value, list) else [value]
        if len(given) == 1:
            draft.set(key, value, path, str(given[0]))
        elif path == "data.path":
            for one in given:
                draft.set(key, value, f"data.sources.{Path(str(one)).stem}.path", str(one))
        else:
            draft.drop(key, value, "held-out rows of several files: give each source its own evaluation_path")

    return rule


def estimator(draft: Draft, key: str, value: Any) -> None:
    """GRPO divides by the group's deviation there, unless told not to."""
    to("algorithm.name", ESTIMATORS)(draft, key, value)
    if value == "grpo":
        draft.settings.setdefault("algorithm.std", "group")


def minibatch(draft: Draft, key: str, value: Any) -> None:
    tasks = draft.given.get("data.train_batch_size")
    if isinstance(tasks, int) and isinstance(value, int) and tasks % value == 0:
        draft.set(key, value, "learner.minibatches", tasks // value)
    else:
        draft.drop(key, value, "tasks of an optimiser step, which do not divide data.train_batch_size evenly")


def clip(draft: Draft, key: str, value: Any) -> None:
    for side in ("low", "high"):
        if f"actor_rollout_ref.actor.clip_ratio_{side}" not in draft.given:
            draft.set(key, value, f"algorithm.clip_{side}", value)


def kl_loss(draft: Draft, key: str, value: Any) -> None:
    coef = draft.given.get("actor_rollout_ref.actor.kl_loss_coef", 0.001)
    if value:
        draft.set(key, value, "algorithm.kl.coef", coef)
    else:
        draft.drop(key, value, "no KL penalty in the loss, as here without algorithm.kl.coef")


def kl_part(path: str, table: dict[str, str] | None = None) -> Rule:
    """Read with a penalty in the loss only."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if not draft.given.get("actor_rollout_ref.actor.use_kl_loss"):
            draft.drop(key, value, "not read without use_kl_loss")
        else:
            to(path, table)(draft, key, value)

    return rule


def kl_reward(draft: Draft, key: str, value: Any) -> None:
    if not draft.given.get("algorithm.use_kl_in_reward"):
        draft.drop(key, value, "not read without use_kl_in_reward")
    elif draft.given.get("actor_rollout_ref.actor.use_kl_loss"):
        draft.drop(key, value, "there is a penalty in the loss already, and one is enough here")
    else:
        draft.set(key, value, "algorithm.kl.coef", value)
        draft.set(key, value, "algorithm.kl.where", "reward")


def length(draft: Draft, key: str, value: Any) -> None:
    """Their response is all turns together; ours is one call, within a context that holds everything."""
    draft.set(key, value, "sampling.max_tokens", value)
    prompt = draft.given.get("data.max_prompt_length")
    if "actor_rollout_ref.rollout.max_model_len" not in draft.given:
        draft.set(key, value, "sampling.max_context", int(value) + int(prompt or 3 * int(value)))


def overlong(draft: Draft, key: str, value: Any) -> None:
    ways = {"error": "refuse", "left": "cut", "right": "cut", "middle": "cut"}
    if draft.given.get("data.filter_overlong_prompts"):
        draft.drop(key, value, "prompts that are too long are filtered out")
    elif "data.max_prompt_length" not in draft.given:
        draft.drop(key, value, "not read without max_prompt_length")
    else:
        to("data.overlong", ways)(draft, key, value)


def turns(draft: Draft, key: str, value: Any) -> None:
    """Calls of the model in one conversation: rounds of tools, and the answer."""
    if isinstance(value, int) and value > 1:
        draft.set(key, value, "agent.args.max_tool_rounds", value - 1)
    else:
        draft.drop(key, value, "an agent without a limit of its own has the context for one")


def samples(draft: Draft, key: str, value: Any) -> None:
    """Either of StateLM's two keys. They are read together: where one is left out, its default there is not ours."""
    at = "actor_rollout_ref.rollout.multi_turn."
    most, how = draft.given.get(f"{at}max_samples_per_trajectory", 1), draft.given.get(f"{at}downsample_mode", "last")
    if not isinstance(most, int) or most < 1:
        draft.drop(key, value, "all branches are trained, as here without learner.max_samples_per_trajectory")
    elif draft.given.get("actor_rollout_ref.actor.policy_loss.loss_mode") == "gspo":
        draft.drop(key, value, "the ratios of gspo are of whole episodes, of which all branches are trained")
    else:
        ours = {"max_samples_per_trajectory": most, "downsample_mode": "last" if how == "last" else "random"}
        for name, setting in ours.items():
            draft.settings[f"learner.{name}"] = setting
        name = key.rpartition(".")[2]
        draft.set(key, value, f"learner.{name}", ours[name])


def ratio(draft: Draft, key: str, value: Any) -> None:
    name = key.rpartition(".")[2]
    draft.settings.setdefault("data.by", "data_source")
    draft.set(key, value, f"data.sources.{name}.ratio", value)


def mapping(draft: Draft, key: str, value: Any) -> None:
    to(f"data.sources.{key.rpartition('.')[2]}.agent", AGENTS)(draft, key, value)


def loops(draft: Draft, key: str, value: Any) -> None:
    name = key.removeprefix("agent_loops.").removesuffix("._target_")
    draft.set(key, value, f"data.agents.{name}", {"_target_": value})


def tag(draft: Draft, key: str, value: Any) -> None:
    draft.settings.setdefault("agent.name", "code")
    draft.set(key, value, f"agent.args.{key.rpartition('.')[2]}", value)


def loggers(draft: Draft, key: str, value: Any) -> None:
    names = value if isinstance(value, list) else str(value).strip("[]").replace("'", "").split(",")
    draft.set(key, value, "track.tensorboard", "tensorboard" in [str(name).strip() for name in names])
    if any(str(name).strip() in ("wandb", "swanlab", "mlflow") for name in names):
        draft.drop(key, value, "metrics go to the console, metrics.jsonl and TensorBoard")


def freq(path: str) -> Rule:
    def rule(draft: Draft, key: str, value: Any) -> None:
        if isinstance(value, int) and value > 0:
            draft.set(key, value, path, value)
        else:
            draft.drop(key, value, "off, as it is here without the setting, or at the end only")

    return rule


def loss_mode(draft: Draft, key: str, value: Any) -> None:
    if value in ("gspo", "vanilla"):
        draft.set(key, value, "algorithm.loss", {"gspo": "gspo", "vanilla": "ppo"}[value])
    else:
        draft.drop(key, value, "no loss by that name; see algorithm.loss")


A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
TABLE: dict[str, Rule] = {
    "data.train_files": files("data.path"),
    "data.val_files": files("data.evaluation_path"),
    "data.train_batch_size": to("rollout.tasks_per_step"),
    "data.val_batch_size": no("held-out tasks are played all at once, as many as evaluation.tasks"),
    "data.max_prompt_length": to("data.max_prompt_tokens"),
    "data.max_response_length": length,
    "data.filter_overlong_prompts": to("data.overlong", {True: "drop", False: "refuse"}),
    "data.truncation": overlong,
    "data.prompt_key": to("data.question", lambda key: "question" if key == "prompt" else key),
    "data.seed": to("seed"),
    "data.shuffle": no("rows come in a new order every pass, always"),
    "data.return_raw_chat": no("conversations are always kept as messages"),
    "data.mixed_dataset.enabled": no("sources are mixed as soon as there are some"),
    "data.mixed_dataset.tolerance": no("shares are exact; `arborl data mix` shows them"),
    "algorithm.adv_estimator": estimator,
    "algorithm.gamma": to("algorithm.gamma"),
    "algorithm.lam": to("algorithm.gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.std", {True: "group", False: "none"}),
    "algorithm.use_kl_in_reward": no("see algorithm.kl_ctrl.kl_coef"),
    "algorithm.kl_ctrl.kl_coef": kl_reward,
    "algorithm.kl_ctrl.type": no("algorithm.kl.target makes the coefficient adaptive"),
    f"{M}path": to("model.name"),
    f"{M}enable_gradient_checkpointing": to("learner.recompute"),
    f"{M}use_remove_padding": no("there is no padding: tokens are packed as trees"),
    f"{M}lora_rank": to("model.lora.rank"),
    f"{M}lora_alpha": to("model.lora.alpha"),
    f"{A}optim.lr": to("learner.lr"),
    f"{A}optim.weight_decay": to("learner.weight_decay"),
    f"{A}optim.lr_warmup_steps": to("learner.warmup_steps", lambda n: max(int(n), 0)),
    f"{A}ppo_mini_batch_size": minibatch,
    f"{A}ppo_epochs": to("learner.epochs"),
    f"{A}ppo_max_token_len_per_gpu": to("learner.micro_batch_tokens"),
    f"{A}grad_clip": to("learner.max_grad_norm"),
    f"{A}clip_ratio": clip,
    f"{A}clip_ratio_low": to("algorithm.clip_low"),
    f"{A}clip_ratio_high": to("algorithm.clip_high"),
    f"{A}clip_ratio_c": to("algorithm.dual_clip"),
    f"{A}use_kl_loss": kl_loss,
    f"{A}kl_loss_coef": kl_part("algorithm.kl.coef"),
    f"{A}kl_loss_type": kl_part("algorithm.kl.estimator", KL),
    f"{A}entropy_coeff": to("algorithm.entropy_coef"),
    f"{A}loss_agg_mode": to("algorithm.aggregation", AGGREGATION),
    f"{A}policy_loss.loss_mode": loss_mode,
    f"{A}use_dynamic_bsz": no(MICRO),
    f"{R}n": to("rollout.group_size"),
    f"{R}temperature": to("sampling.temperature"),
    f"{R}top_p": to("sampling.top_p"),
    f"{R}top_k": to("sampling.top_k", lambda k: max(int(k), 0)),
    f"{R}prompt_length": to("data.max_prompt_tokens"),
    f"{R}response_length": length,
    f"{R}max_model_len": to("sampling.max_context"),
    f"{R}multi_turn.enable": to("agent.name", {True: "tool", False: "chat"}),
    f"{R}multi_turn.max_assistant_turns": turns,
    f"{R}multi_turn.max_user_turns": no("the environment decides how often it answers"),
    f"{R}multi_turn.single_turn_max_tokens": to("sampling.max_tokens"),
    f"{R}multi_turn.max_samples_per_trajectory": samples,
    f"{R}multi_turn.downsample_mode": samples,
    f"{R}multi_turn.tool_config.code_start_tag": tag,
    f"{R}multi_turn.tool_config.code_end_tag": tag,
    f"{R}multi_turn.tool_config.answer_start_tag": tag,
    f"{R}multi_turn.tool_config.answer_end_tag": tag,
    f"{R}multi_turn.format": to("agent.tool_format", {"hermes": "hermes", "qwen": "hermes", "llama3_json": "llama3"}),
    "critic.optim.lr": to("learner.critic_lr"),
    "trainer.total_training_steps": to("trainer.steps"),
    "trainer.total_epochs": no("how long to train is said in steps: trainer.steps"),
    "trainer.experiment_name": to("name"),
    "trainer.project_name": no("runs lie in runs/, under their names"),
    "trainer.default_local_dir": to("output_dir"),
    "trainer.save_freq": freq("trainer.save_every"),
    "trainer.test_freq": freq("evaluation.every"),
    "trainer.val_before_train": no("held-out tasks are always played before training, unless evaluation.tasks=0"),
    "trainer.critic_warmup": no("policy and critic are trained together from the start"),
    "trainer.logger": loggers,
    "trainer.resume_mode": no("`arborl train --resume latest` goes on with a run"),
}
PREFIXES: dict[str, Rule] = {
    "data.mixed_dataset.dataset_ratios.": ratio,
    "data.mixed_dataset.agent_mapping.": mapping,
    "data.mixed_dataset.": no("batches are always composed exactly, and their composition is always logged"),
    "agent_loops.": loops,
    f"{R}multi_turn.": no("see agent.args and agent.tool_args"),
    f"{R}": no(ENGINE),
    f"{A}fsdp_config.": no(PLACEMENT),
    f"{A}ppo_micro_batch_size": no(MICRO),
    "actor_rollout_ref.ref.": no("the reference policy is a frozen copy, made where algorithm.kl.coef asks for one"),
    "critic.": no("the critic shares the policy's trunk; see learner.critic"),
    "reward_model.": no("rewards are named in rewards"),
    "custom_reward_function.": no("name your own as rewards=[package.module:function]"),
    "trainer.n": no(CLUSTER),
    "ray_": no(CLUSTER),
}
VARIABLES: dict[str, Rule] = {
    "MODEL_PATH": to("model.name"),
    "TRAIN_FILES": files("data.path"),
    "VAL_FILES": files("data.evaluation_path"),
    "LEARNING_RATE": to("learner.lr"),
    "TRAIN_BATCH_SIZE": to("rollout.tasks_per_step"),
    "RATE_LIMIT_PER_MINUTE": no("a limit is written with its tool: tools=[{server: URL, limit: {per_minute: N}}]"),
    "TOOL_MAX_WORKERS": no("written with its tool: tools=[{server: URL, concurrency: N}]"),
    "TOOL_REQUEST_INTERVAL": no("written with its tool: limit.per_minute, as 60 divided by the interval"),
    "MASTER_IP": no(CLUSTER),
    "WORKER_NODES": no(CLUSTER),
    "CONDA_ENV": no(CLUSTER),
    "WANDB_DIR": no("metrics go to the console, metrics.jsonl and TensorBoard"),
}
"""Of scripts whose overrides are made of them elsewhere."""


def variable_ratio(draft: Draft, key: str, value: Any) -> None:
    """`TACO_RATIO=0.4`."""
    draft.settings.setdefault("data.by", "data_source")
    draft.set(key, value, f"data.sources.{key.removesuffix('_RATIO').lower()}.ratio", value)
