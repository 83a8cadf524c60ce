"""What becomes of each of verl's keys, with its defaults; what only all keys together say.

The defaults are those of `ppo_trainer.yaml` (January 2026; 0.6 has the same) that change the result. A default goes
through the rule of its key, as if the script had set it, and is written out where Arbor would do something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arborl.agents import VERL_AGENT_NAMES
from arborl.convert.common_rules import (
    MICRO,
    Rule,
    choice,
    folder,
    idle,
    known,
    no,
    num,
    positive,
    refuse,
    text,
    to,
    together,
    unless,
    when,
    write_defaults,
)
from arborl.convert.draft import Draft
from arborl.convert.reading.source_files import SourceKeys
from arborl.convert.verl import verl_losses as losses
from arborl.convert.verl import verl_parts as parts
from arborl.convert.verl import verl_rewards as scores
from arborl.convert.verl import verl_rules as rules
from arborl.convert.verl.verl_key_lists import EXACT, REF, WILDCARDS
from arborl.convert.verl.verl_losses import GAE, KL_LOSS, SAPO, as_the_actor, of_critic
from arborl.convert.verl.verl_rules import A, M, R, T
from arborl.errors import ConfigError

CORRECTION = "algorithm.rollout_correction."
FORMATS = {"hermes": "hermes", "qwen": "hermes", "llama3_json": "llama3", "qwen3_coder": "qwen_xml"}
LOGS = idle("every episode is written to the run's folder")
FILTER = when(known("algorithm.filter_groups.enable"), losses.group_filter, "no groups are filtered")
KL_REWARD = when(known("algorithm.use_kl_in_reward"), losses.kl_reward, "not read without use_kl_in_reward")
WITH_KL_LOSS = idle("a KL penalty in the loss; see kl_loss_coef and kl_loss_type")
WITHOUT_KL_LOSS = "no KL penalty in the loss, as here without algorithm.kl.coef"
KL_TYPE = choice("algorithm.kl.estimator", losses.KL, "Write low_var_kl, kl, abs or mse.")
GRPO, DYNAMIC = known("algorithm.adv_estimator", "grpo", "grpo_vectorized", "grpo_passk"), known(f"{A}use_dynamic_bsz")
DECAYED = "all weights there; here matrices, not norms and biases"
ADAPTERS = "a folder of adapters knows its base, and they go on being trained"
HAS_LORA, WITHOUT_LORA = known(f"{M}lora_rank"), "read with a lora_rank above 0 only"
MASTER = {name: "float32" if dtype == "float32" else "none" for name, dtype in rules.DTYPES.items()}
FILTERED_BY = ("acc", "score", "seq_reward", "seq_final_reward")
REFILL = "groups that are left out are replaced from one larger batch: rollout.spare_groups"


def is_vanilla(draft: Draft) -> bool:
    return losses.loss(draft) == "ppo"


def has_no_grad_clip(draft: Draft) -> bool:
    return f"{A}grad_clip" not in draft.source


def source_agent(draft: Draft, key: str, value: Any) -> None:
    """The agent of a source; `single_turn_agent` has no tools."""
    path = f"data.sources.{key.rpartition('.')[2]}.agent"
    own = f"Write one of your own (docs/agents.md) and say so: --use {value}=package.module:Class."
    choice(path, {**VERL_AGENT_NAMES, **draft.uses}, own)(draft, key, value)


def length_of_the_run(draft: Draft, key: str, value: Any) -> None:
    """`total_epochs`, where `total_training_steps` is not given."""
    if isinstance(draft.source.get("trainer.total_training_steps"), int):
        draft.skip(key, value, "total_training_steps says how long to train")
    else:
        num("trainer.epochs")(draft, key, value)


ROWS: dict[str, Rule | tuple[Rule, Any]] = {
    "--module": rules.module,
    "--config-name": rules.configuration,
    "--config-path": idle("place of the configuration"),
    "data.train_files": (text("data.path", variable="TRAIN_FILES"), "~/data/rlhf/gsm8k/train.parquet"),
    "data.val_files": (text("data.evaluation_path"), "~/data/rlhf/gsm8k/test.parquet"),
    "data.train_batch_size": (num("rollout.tasks_per_step"), 1024),
    "data.gen_batch_size": FILTER,
    "data.val_batch_size": idle("held-out tasks are played all at once, as many as evaluation.tasks"),
    "data.val_max_samples": (rules.validation_rows, -1),
    "data.train_max_samples": unless(-1, "all rows are used. Write a shorter file."),
    "data.max_prompt_length": (num("data.max_prompt_tokens"), 512),
    "data.max_response_length": (rules.answer_length, 512),
    "data.filter_overlong_prompts": (rules.overlong_prompts, False),
    "data.truncation": (rules.overlong_prompts, "error"),
    "data.prompt_key": rules.prompt_key,
    "data.reward_fn_key": unless("data_source", "rewards go by the column data_source"),
    "data.document_key": unless("document_content", "documents are read from the column document_content"),
    "data.seed": num("seed"),
    "data.shuffle": (choice("data.shuffle", {"True": True, "False": False}, "Write true or false."), True),
    "data.image_key": rules.pictures,
    "data.video_key": rules.pictures,
    "data.custom_cls.path": refuse(
        "rows of a class of yours. Write them to a file, or name a function: data.rows=package.module:function.",
        off="null: the usual rows",
    ),
    "data.sampler.class_path": unless(
        None, "rows come in a new order every pass; data.schedule and data.band order sources"
    ),
    "data.sampler.class_name": unless(None, "see data.sampler.class_path"),
    "data.mixed_dataset.enabled": idle("sources are mixed as soon as there are some"),
    "data.mixed_dataset.tolerance": idle("shares are exact; `arborl data mix` shows them"),
    "algorithm.adv_estimator": (losses.estimator, "gae"),
    "algorithm.norm_adv_by_std_in_grpo": (when(GRPO, losses.by_std, "read with adv_estimator=grpo only"), True),
    "algorithm.gamma": (losses.gamma, 1.0),
    "algorithm.lam": (when(GAE, num("algorithm.args.gae_lambda"), "read with adv_estimator=gae only"), 1.0),
    "algorithm.use_kl_in_reward": (idle("see algorithm.kl_ctrl.kl_coef"), False),
    "algorithm.kl_penalty": (KL_REWARD, "kl"),
    "algorithm.kl_ctrl.type": (losses.kl_control, "fixed"),
    "algorithm.kl_ctrl.kl_coef": (KL_REWARD, 0.001),
    "algorithm.kl_ctrl.target_kl": losses.kl_control,
    "algorithm.kl_ctrl.horizon": losses.kl_control,
    "algorithm.use_pf_ppo": unless(False, "episodes are not drawn again by their rewards"),
    f"{CORRECTION}rollout_is": losses.correction,
    f"{CORRECTION}rollout_is_threshold": (losses.correction, 2.0),
    f"{CORRECTION}rollout_is_batch_normalize": unless(False, "weights are not brought to mean 1"),
    f"{CORRECTION}rollout_rs": losses.rejection,
    f"{CORRECTION}rollout_rs_threshold": losses.rejection,
    f"{CORRECTION}bypass_mode": idle("ratios are taken against the policy that sampled: algorithm.anchor"),
    f"{CORRECTION}loss_type": idle("read with bypass_mode only: the loss is then PPO's, or REINFORCE"),
    "algorithm.rollout_is": losses.correction,
    "algorithm.rollout_is_threshold": losses.correction,
    "algorithm.rollout_is_threshold_lower": losses.correction,
    "algorithm.rollout_is_level": losses.correction,
    "algorithm.rollout_is_mode": losses.correction,
    "algorithm.rollout_is_veto_threshold": unless(None, "no token vetoes its sequence"),
    "algorithm.filter_groups.enable": FILTER,
    "algorithm.filter_groups.metric": unless(FILTERED_BY, "groups are compared by their rewards"),
    "algorithm.filter_groups.max_num_gen_batches": when(
        known("algorithm.filter_groups.enable"), no(REFILL), "no groups are filtered"
    ),
    f"{A}policy_loss.loss_mode": (losses.loss_mode, "vanilla"),
    f"{A}loss_agg_mode": (losses.aggregation, "token-mean"),
    f"{A}clip_ratio": (losses.clip, 0.2),
    f"{A}clip_ratio_low": (losses.clip_side("low"), 0.2),
    f"{A}clip_ratio_high": (losses.clip_side("high"), 0.2),
    f"{A}clip_ratio_c": (when(is_vanilla, num("algorithm.args.dual_clip"), "read with loss_mode=vanilla only"), 3.0),
    f"{A}tau_pos": (when(SAPO, num("algorithm.args.tau_positive"), "read with loss_mode=sapo only"), 1.0),
    f"{A}tau_neg": (when(SAPO, num("algorithm.args.tau_negative"), "read with loss_mode=sapo only"), 1.05),
    f"{A}entropy_coeff": (num("algorithm.entropy_coef"), 0),
    f"{A}use_kl_loss": (when(KL_LOSS, WITH_KL_LOSS, WITHOUT_KL_LOSS), False),
    f"{A}kl_loss_coef": (when(KL_LOSS, num("algorithm.kl.coef"), "not read without use_kl_loss"), 0.001),
    f"{A}kl_loss_type": (when(KL_LOSS, KL_TYPE, "not read without use_kl_loss"), "low_var_kl"),
    f"{A}ppo_epochs": (num("learner.epochs"), 1),
    f"{A}ppo_mini_batch_size": (rules.minibatch, 256),
    f"{A}ppo_max_token_len_per_gpu": when(
        DYNAMIC, rules.micro_batch, "read with use_dynamic_bsz only; it changes memory, and no result"
    ),
    f"{A}use_dynamic_bsz": idle(MICRO),
    f"{A}shuffle": unless(False, "minibatches are in the order of the batch"),
    f"{A}grad_clip": (num("learner.max_grad_norm"), 1.0),
    f"{A}optim.clip_grad": when(has_no_grad_clip, num("learner.max_grad_norm"), "actor.grad_clip is read in its place"),
    f"{A}optim.lr": (num("learner.lr"), 1e-6),
    f"{A}optim.lr_warmup_steps": (rules.warmup, -1),
    f"{A}optim.lr_warmup_steps_ratio": (rules.warmup_share, 0.0),
    f"{A}optim.lr_scheduler_type": (rules.schedule, "constant"),
    f"{A}optim.warmup_style": rules.schedule,
    f"{A}optim.lr_decay_style": rules.schedule,
    f"{A}optim.min_lr_ratio": (rules.lowest_rate, 0.0),
    f"{A}optim.weight_decay": (num("learner.weight_decay", why=DECAYED), 0.01),
    f"{A}optim.betas": (rules.betas, [0.9, 0.999]),
    f"{A}optim.num_cycles": unless(0.5, "a cosine comes down once"),
    f"{A}optim.total_training_steps": idle("known from the length of the run"),
    f"{A}optim.optimizer": unless(("AdamW", "adam", "adamw", "Adam"), "the optimiser is AdamW"),
    f"{A}optim.optimizer_impl": unless("torch.optim", "the optimiser is torch's AdamW"),
    f"{A}fsdp_config.dtype": (choice("model.dtype", rules.DTYPES, "Write bfloat16, float16 or float32."), "bfloat16"),
    f"{A}fsdp_config.model_dtype": (choice("learner.master", MASTER, "Write fp32 or bf16."), "fp32"),
    f"{A}fsdp_config.full_determinism": rules.deterministic,
    f"{A}optim.min_lr": rules.last_rate,
    f"{M}path": (rules.model_path, "~/models/deepseek-llm-7b-chat"),
    f"{M}lora_adapter_path": text("model.name", ADAPTERS),
    f"{M}lora.adapter_path": text("model.name", ADAPTERS),
    f"{M}lora.dropout": num("model.lora.dropout"),
    f"{M}lora.target_modules": rules.megatron_layers,
    f"{M}tokenizer_path": unless(None, "a model's own tokenizer is used"),
    f"{M}custom_chat_template": text("model.chat_template"),
    f"{M}external_lib": unless(None, "nothing else is imported"),
    f"{M}enable_gradient_checkpointing": to("learner.recompute", bool),
    f"{M}use_remove_padding": idle("there is no padding: tokens are packed as trees"),
    f"{M}lora_rank": (num("model.lora.rank"), 0),
    f"{M}lora_alpha": (when(HAS_LORA, num("model.lora.alpha"), WITHOUT_LORA), 16),
    f"{M}lora.rank": num("model.lora.rank"),
    f"{M}lora.alpha": num("model.lora.alpha"),
    f"{M}target_modules": when(HAS_LORA, rules.adapted_layers, WITHOUT_LORA),
    f"{M}exclude_modules": unless(None, "no layer is left out: name those that are adapted in model.lora.target"),
    f"{R}n": (num("rollout.group_size"), 1),
    f"{R}temperature": (num("sampling.temperature"), 1.0),
    f"{R}top_p": (num("sampling.top_p"), 1),
    f"{R}top_k": (num("sampling.top_k", lambda k: max(int(k), 0)), -1),
    f"{R}do_sample": unless(True, "training episodes are sampled"),
    f"{R}ignore_eos": unless(False, "the model's end of turn ends a call"),
    f"{R}over_sample_rate": unless((0, None), "no episode is cancelled for being late; see rollout.redundancy"),
    f"{R}prompt_length": rules.window,
    f"{R}response_length": rules.answer_length,
    f"{R}max_model_len": rules.window,
    f"{R}val_kwargs.do_sample": (rules.evaluation, False),
    f"{R}val_kwargs.temperature": (rules.evaluation, 0),
    f"{R}val_kwargs.top_p": (num("evaluation.sampling.top_p"), 1.0),
    f"{R}val_kwargs.top_k": (num("evaluation.sampling.top_k", lambda k: max(int(k), 0)), -1),
    f"{R}val_kwargs.n": (num("evaluation.group_size"), 1),
    f"{R}agent.agent_loop_config_path": parts.loop_file,
    f"{T}num_repeat_rollouts": unless(None, "an episode is played once"),
    f"{T}single_turn_max_tokens": num("sampling.max_tokens"),
    f"{T}max_samples_per_trajectory": parts.samples,
    f"{T}downsample_mode": parts.samples,
    f"{T}model_type": idle("what a template does to earlier turns is seen, and a new branch begins"),
    f"{T}dump_trajectories_enabled": to("agent.args.dump_trajectories_enabled"),
    f"{T}dump_trajectories_dir": folder("agent.args.dump_trajectories_dir", "they go to the folder `trajectories`"),
    f"{T}dump_trajectories_freq": num("agent.args.dump_trajectories_freq"),
    f"{T}format": choice("agent.tool_format", FORMATS, "Name yours: agent.tool_format."),
    "critic.optim.lr": (of_critic(num("learner.critic_lr")), 1e-5),
    "critic.cliprange_value": (of_critic(num("algorithm.args.value_clip")), 0.5),
    "critic.model.path": of_critic(losses.critic_model),
    "reward_model.enable": scores.reward_model,
    "reward_model.reward_manager": (together, "naive"),
    "reward_manager.name": scores.manager,
    "trainer.total_training_steps": num("trainer.steps"),
    "trainer.total_epochs": (length_of_the_run, 30),
    "trainer.experiment_name": rules.run_name,
    **dict.fromkeys(rules.CLUSTER_VARIABLES, rules.cluster_variable),
    "--nproc_per_node": idle("Ray starts the processes: trainer.n_gpus_per_node"),
    "--nnodes": idle("Ray starts the processes: trainer.nnodes"),
    "trainer.project_name": idle("runs are in runs/, under their names; trackers get the project"),
    "trainer.default_local_dir": folder("output_dir", "a run is in runs/NAME-001"),
    "trainer.save_freq": positive("trainer.save_every"),
    "trainer.test_freq": (positive("evaluation.every"), -1),
    "trainer.val_before_train": (to("evaluation.before", bool), True),
    "trainer.val_only": refuse("this trains nothing. Write: arborl evaluate RUN", off="it trains"),
    "trainer.critic_warmup": unless((0, -1), "policy and critic are trained together from the start"),
    "trainer.logger": rules.loggers,
    "trainer.resume_mode": idle("`arborl train --resume latest` goes on with a run"),
    "trainer.resume_from_path": unless(None, "verl's checkpoints are not read; a model of them can be model.name"),
    "trainer.max_actor_ckpt_to_keep": positive(
        "trainer.keep", "all checkpoints there, the last two here: trainer.keep"
    ),
    "trainer.max_critic_ckpt_to_keep": idle("a checkpoint holds policy and critic"),
    "trainer.rollout_data_dir": LOGS,
    "trainer.validation_data_dir": LOGS,
    "trainer.log_val_generations": LOGS,
    "trainer.device": idle("model.device is found"),
    "trainer.ref_update_freq": unless((0, -1, None), "the reference is the policy at the start, always"),
}
"""Rules by key; with verl's default where that changes the result."""
UNREAD = {
    "tools": "no agent of the run calls them",
    "data.custom_cls.name": "read with custom_cls.path only",
    "custom_reward_function.path": "null: the rule of a row's data_source",
    "custom_reward_function.name": "read with custom_reward_function.path only",
    "reward_model.reward_kwargs.max_resp_len": "read with overlong_buffer_cfg.enable only",
    "reward_model.reward_manager": "another key says which rewards there are",
    "reward_model.max_length": "null: no limit",
    "reward_model.model.path": "there is no reward model",
    f"{A}loss_scale_factor": "read with loss_agg_mode=seq-mean-token-sum-norm only",
    f"{R}agent.default_agent_loop": "null: rows name their agents, or have one turn",
    f"{T}enable": "one turn; or the keys of its agent say more",
    f"{T}tool_config_path": "null: no tools",
    f"{T}max_assistant_turns": "read by agents with tools only",
    f"{T}max_user_turns": "read by agents with tools, and with an interaction, only",
    f"{T}max_parallel_calls": "read by agents with tools only",
    f"{T}interaction_config_path": "null: only tools answer",
    **dict.fromkeys(parts.RESULTS, "read by agents with tools only"),
    **dict.fromkeys(
        (f"{T}min_assistant_turns", f"{T}exceed_length_penalty", f"{T}below_min_turns_reward"),
        "read by StateLM's agent only",
    ),
    **dict.fromkeys(scores.JUDGE, "read by StateLM's judge of open answers only"),
    **{f"{T}tool_config.{name}": "read by the agent that runs code only" for name in parts.TOOL_CONFIG},
}
"""Keys that `verl_parts`, `verl_rewards` and `verl_losses` read with others, and why one that they did not is left."""
SHARED_WITH_CRITIC = (
    "ppo_epochs ppo_mini_batch_size grad_clip shuffle loss_agg_mode optim.weight_decay optim.lr_warmup_steps "
    "optim.lr_warmup_steps_ratio optim.betas optim.lr_scheduler_type optim.warmup_style optim.lr_decay_style "
    "optim.min_lr_ratio optim.num_cycles optim.optimizer optim.optimizer_impl optim.clip_grad"
)
TABLE: dict[str, Rule] = (
    EXACT
    | {key: row[0] if isinstance(row, tuple) else row for key, row in ROWS.items()}
    | dict.fromkeys(UNREAD, together)
    | {f"critic.{name}": as_the_actor(name) for name in SHARED_WITH_CRITIC.split()}
)
DEFAULTS: dict[str, Any] = {key: row[1] for key, row in ROWS.items() if isinstance(row, tuple)}


PREFIXES: dict[str, Rule] = WILDCARDS | {
    "data.apply_chat_template_kwargs.": rules.chat_args,
    "data.mixed_dataset.dataset_ratios.": rules.ratio,
    "data.mixed_dataset.agent_mapping.": source_agent,
    "agent_loops.": parts.loop_class,
    "reward_model.reward_kwargs.overlong_buffer_cfg.": losses.overlong_buffer,
    "reward_model.overlong_buffer.": losses.overlong_buffer,
    "custom_reward_function.reward_kwargs.": together,
    f"{M}override_config.": no("a model is as its own configuration says"),
    f"{REF}model.": no("the reference is the policy at the start of the run"),
    "validation.": no("validation has the agents, tools and limits of training"),
}
"""Sections whose keys are names of theirs, and those that need no counterpart."""
VARIABLES: dict[str, str] = {
    "MODEL_PATH": f"{M}path",
    "TRAIN_FILES": "data.train_files",
    "VAL_FILES": "data.val_files",
    "LEARNING_RATE": f"{A}optim.lr",
    "TRAIN_BATCH_SIZE": "data.train_batch_size",
    "TOOL_SERVER_URL": f"{T}tool_config.server_url",
    "RATE_LIMIT_PER_MINUTE": f"{T}tool_config.rate_limit_per_minute",
    "TOOL_MAX_WORKERS": f"{T}tool_config.max_workers",
    "TOOL_REQUEST_INTERVAL": f"{T}tool_config.request_interval",
    **{name: name for name in (*rules.CLUSTER_VARIABLES, *scores.JUDGE)},
}
"""Variables of scripts of both forks, and the keys that they are for. An override of the same key wins."""
RATIOS = ("taco", "nq", "math")
"""Sources whose ratios have variables: `TACO_RATIO`."""
NESTED = "trainer.actor_rollout_ref."
"""Place of the section in the example of the mixed-training fork."""


def variables_too(draft: Draft, variables: Mapping[str, Any]) -> dict[str, str]:
    """Add variables with a known meaning to the keys, unless an override sets the same; and keys in other places.
    Returns their own names by key."""
    places = {f"{M}path": "model_path"} | {key.removeprefix("trainer."): key for key in draft.source if NESTED in key}
    moved = {key: name for key, name in places.items() if name in draft.source and key not in draft.source}
    for key, name in moved.items():
        draft.source[key] = draft.source.pop(name)
    sources = {*RATIOS, *draft.below("data.mixed_dataset.agent_mapping.")}
    known = VARIABLES | {f"{name.upper()}_RATIO": f"data.mixed_dataset.dataset_ratios.{name}" for name in sources}
    added = {
        key: name
        for name, key in known.items()
        if variables.get(name) not in (None, "", []) and key not in draft.source
    }
    draft.source |= {key: variables[name] for key, name in added.items()}
    return added | moved


def check_training(collected: SourceKeys, where: str) -> None:
    """Raise ConfigError for files that start no training and have no settings of one."""
    if any(not key.startswith("--") for key in collected.keys):
        return
    if collected.mentions_trainer and {"MODEL_PATH", "TRAIN_FILES"} <= collected.variables.keys():
        return
    raise ConfigError(
        f"{where}: starts no training of verl. Looked for a command such as python3 -m verl.trainer.main_ppo with "
        "overrides (data.train_files=…), also in quotes behind ssh or tmux; for a list of overrides; and for the "
        "variables MODEL_PATH and TRAIN_FILES beside a mention of main_ppo."
    )


def complete(draft: Draft, has_parts: bool = False) -> None:
    """What a script does not say, and what only all of it together says."""
    write_defaults(draft, TABLE)
    draft.default("a deadline of an episode", None, "rollout.episode_seconds", 86_400, "there is none: a day")
    if not has_parts:
        parts.complete(draft)
    _sources(draft)
    for key, why in UNREAD.items():
        draft.skip_rest([key], why)


def _sources(draft: Draft) -> None:
    """Sources by a column: sources without an agent answer in one turn, as verl's `single_turn_agent` does."""
    if not draft.settings.get("data.by"):
        return
    if draft.below("data.mixed_dataset.agent_mapping."):
        for name in sorted({key.split(".")[2] for key in draft.settings if key.startswith("data.sources.")}):
            at = f"data.sources.{name}.agent"
            if not any(key == at or key.startswith(f"{at}.") for key in draft.settings):
                draft.settings[at] = "chat"
                if draft.settings.get("tools"):
                    draft.settings[f"data.sources.{name}.tools"] = []
