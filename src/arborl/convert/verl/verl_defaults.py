"""verl's defaults, from its `ppo_trainer.yaml` (January 2026; 0.6 has the same).

Only what changes the result is here. Each goes through the rule of its key, as if the script had set it, and is
written out where Arbor would do something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import RunConfig
from arborl.convert.draft import Draft

A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."

DEFAULTS: dict[str, Any] = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.shuffle": True,
    "data.val_max_samples": -1,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    f"{A}policy_loss.loss_mode": "vanilla",
    f"{A}loss_agg_mode": "token-mean",
    f"{A}clip_ratio": 0.2,
    f"{A}clip_ratio_low": 0.2,
    f"{A}clip_ratio_high": 0.2,
    f"{A}clip_ratio_c": 3.0,
    f"{A}tau_pos": 1.0,
    f"{A}tau_neg": 1.05,
    f"{A}entropy_coeff": 0,
    f"{A}use_kl_loss": False,
    f"{A}kl_loss_coef": 0.001,
    f"{A}kl_loss_type": "low_var_kl",
    f"{A}ppo_epochs": 1,
    f"{A}ppo_mini_batch_size": 256,
    f"{A}grad_clip": 1.0,
    f"{A}optim.lr": 1e-6,
    f"{A}optim.lr_warmup_steps": -1,
    f"{A}optim.lr_warmup_steps_ratio": 0.0,
    f"{A}optim.lr_scheduler_type": "constant",
    f"{A}optim.min_lr_ratio": 0.0,
    f"{A}optim.weight_decay": 0.01,
    f"{A}optim.betas": [0.9, 0.999],
    f"{A}fsdp_config.dtype": "bfloat16",
    f"{A}fsdp_config.model_dtype": "fp32",
    f"{M}path": "~/models/deepseek-llm-7b-chat",
    f"{M}lora_rank": 0,
    f"{M}lora_alpha": 16,
    f"{R}n": 1,
    f"{R}temperature": 1.0,
    f"{R}top_p": 1,
    f"{R}top_k": -1,
    f"{R}val_kwargs.do_sample": False,
    f"{R}val_kwargs.temperature": 0,
    f"{R}val_kwargs.top_p": 1.0,
    f"{R}val_kwargs.top_k": -1,
    f"{R}val_kwargs.n": 1,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "reward_model.reward_manager": "naive",
    "trainer.total_epochs": 30,
    "trainer.val_before_train": True,
    "trainer.test_freq": -1,
}


def known(draft: Draft, key: str) -> Any:
    """What the run there has for a key: as given, or verl's own."""
    return draft.source.get(key, DEFAULTS.get(key))


def number(draft: Draft, key: str, otherwise: float = 0) -> Any:
    """The same where it must be a number; one that is not is refused by the rule of its own key."""
    found = known(draft, key)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else otherwise


def usual_here(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What Arbor does without a word, with the advantage and the loss of these settings: our keys, dotted."""
    preset = AlgorithmConfig(name=settings.get("algorithm.name", "grpo"))
    chosen = AlgorithmConfig(name=preset.name, loss=settings.get("algorithm.loss", preset.loss))
    own = dict(_dotted(chosen.model_dump(mode="json"), "algorithm."))
    return dict(_dotted(RunConfig().model_dump(mode="json"))) | own | {
        "algorithm.name": "grpo",
        "algorithm.loss": preset.loss,
    }  # fmt: skip


def _dotted(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
