"""Order of the rules for each of ROLL's pipelines.

Settings that belong together are read together, with ROLL's own defaults for those that are left out (its
configuration classes say them: PPOConfig, AgenticConfig, RLVRConfig, GeneratingArguments, TrainingArguments). What is
left then goes through the tables of `roll_key_table.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from arborl.convert.draft import Draft
from arborl.convert.reading.training_scripts import START
from arborl.convert.roll import roll_algorithm as algorithm
from arborl.convert.roll import roll_learner as learner
from arborl.convert.roll import roll_rewards as rewards
from arborl.convert.roll import roll_supervised as supervised
from arborl.convert.roll.roll_environments import environments
from arborl.convert.roll.roll_key_table import PREFIXES as PREFIXES
from arborl.convert.roll.roll_key_table import TABLE as TABLE
from arborl.errors import ConfigError

STARTS = {
    "start_agentic_pipeline.py": "agentic", "start_agentic_rollout_pipeline.py": "agentic",
    "start_rlvr_pipeline.py": "rlvr", "start_rlvr_rollout_pipeline.py": "rlvr", "start_sft_pipeline.py": "sft",
    "start_dpo_pipeline.py": "dpo", "start_distill_pipeline.py": "distill",
}  # fmt: skip
"""Scripts that start a pipeline; others are known by the keys of the file."""


def pipeline(keys: Collection[str], started: str = "") -> str:
    """`agentic`, `rlvr`, `sft`, `dpo` or `distill`."""
    if started in STARTS:
        return STARTS[started]
    heads = {key.partition(".")[0] for key in keys}
    if heads & {"train_env_manager", "custom_envs", "val_env_manager"}:
        return "agentic"
    if "sft_train" in heads:
        return "sft"
    if heads & {"student_pretrain", "teacher_pretrain"}:
        return "distill"
    if heads & {"chosen_key", "rejected_key", "beta", "ipo"}:
        return "dpo"
    if heads & {"rewards", "num_return_sequences_in_group"} or any(".data_args.file_name" in key for key in keys):
        return "rlvr"
    return "agentic"


def convert_all(draft: Draft) -> None:
    """Everything but what the tables say of single keys."""
    if not draft.source:
        return
    heads = {key.partition(".")[0] for key in draft.source}
    if not heads & {key.partition(".")[0] for key in TABLE}:
        some = ", ".join(sorted(heads)[:4])
        raise ConfigError(
            f"{some}: definitions for other files, and no pipeline. Give a file that names it in defaults."
        )
    for key, value in draft.source.items():
        if key.endswith(("image_folder", "video_folder", "audio_folder", "custom_data_kwargs_func")) and value:
            draft.refuse(key, value, "models see text only here: no images, videos or sound.")
    started = str(draft.source.get(START, ""))
    if "_vl_" in started:
        draft.refuse(START, started, "a pipeline for images, and models see text only here.")
        return
    STAGES[pipeline(draft.source, started)](draft)
    draft.put("seed", 42, "seed")


def absent_fragment(draft: Draft, key: str, value: object) -> None:
    """DeepSpeed's fragments, which ROLL's examples had once, define nothing but a stage of ZeRO."""
    why = "a file that is not there; the stage of ZeRO is taken from its name where a strategy_config refers to it"
    draft.lose(key, value, why)


def agentic(draft: Draft) -> None:
    """Environments by tag."""
    train, infer = _begin(draft)
    draft.put("eval_steps", 10, "evaluation.every", lambda steps: max(int(steps), 0))
    _sampling(draft, infer)
    if draft.problems:
        return
    trained = environments(draft)
    if draft.problems:
        return
    by_turn = any("Step" in str(tag.keys.get("env_manager_cls")) for tag in trained)
    tasks, size = (int(draft.settings[f"rollout.{name}"]) for name in ("tasks_per_step", "group_size"))
    _train(draft, train, tasks, size, by_turn, rows=False)


def rlvr(draft: Draft) -> None:
    """Rows, with rewards by domain."""
    train, infer = _begin(draft)
    if "eval_steps" in draft.source:
        draft.put("eval_steps", 10, "evaluation.every", lambda steps: max(int(steps), 0))
    learner.sampling(draft, f"{infer}.generating_args.", "sampling")
    prompt = draft.whole("prompt_length", 1024)
    if prompt >= draft.settings["sampling.max_context"]:
        why = f"leaves no room for an answer in sequence_length={draft.settings['sampling.max_context']}. Write less."
        draft.refuse("prompt_length", prompt, why)
        return
    draft.settings["sampling.max_tokens"] = draft.settings["sampling.max_context"] - prompt
    if draft.below("validation.generating_args."):
        learner.sampling(draft, "validation.generating_args.", "evaluation.sampling")
        draft.undo("evaluation.sampling.max_tokens", "sequence_length less prompt_length, as in training")
    tasks = draft.whole("rollout_batch_size", 128, least=1)
    size = draft.whole("num_return_sequences_in_group", 1, least=1)
    draft.say("rollout_batch_size", 128, "rollout.tasks_per_step", tasks)
    draft.say("num_return_sequences_in_group", 1, "rollout.group_size", size)
    rewards.domains(draft, train, bool(_teacher(draft)))
    if draft.problems:
        return
    _train(draft, train, tasks, size, steps=False, rows=True)


def _begin(draft: Draft) -> tuple[str, str]:
    """Model, length and intervals; the workers that train and that sample (students in on-policy distillation)."""
    student = any(key.startswith("student_train.") for key in draft.source)
    train, infer = ("student_train", "student_infer") if student else ("actor_train", "actor_infer")
    draft.put("max_steps", 500, "trainer.steps")
    supervised.save_interval(draft)
    learner.model(draft, train, "pretrain")
    length(draft)
    return train, infer


def _train(draft: Draft, train: str, tasks: int, size: int, steps: bool, rows: bool) -> None:
    if teacher(draft):
        algorithm.aggregation(draft, steps)
    else:
        algorithm.estimator(draft, steps, rows)
        algorithm.loss(draft, train)
        algorithm.penalties(draft)
        if rows:
            rewards.masks(draft, size)
    learner.optimiser(draft, train)
    learner.minibatches(draft, train, tasks * size, tasks, steps)
    hung = draft.whole("env_monitor.hung_timeout", 3600)
    for path in ("rollout.episode_seconds", "rollout.step_seconds"):
        why = "an episode ends then; there it is logged" if "env_monitor.hung_timeout" in draft.source else ""
        draft.say("env_monitor.hung_timeout", hung, path, float(hung), why)


def length(draft: Draft) -> None:
    """`sequence_length` holds prompt and answer; without it, the sum of both lengths."""
    total = draft.whole("sequence_length", 0) or draft.whole("response_length", 0) + draft.whole("prompt_length", 1024)
    if draft.source.get("sequence_length") is None and draft.source.get("response_length") is None:
        draft.refuse("sequence_length", None, "is not there, and response_length is not either. Write one of them.")
        total = 8192
    draft.settings["sampling.max_context"] = total
    for key in ("sequence_length", "response_length", "prompt_length"):
        if key in draft.source:
            draft.set(key, draft.source[key], "sampling.max_context", total)
    for key in ("val_prompt_length", "val_sequence_length"):
        if key in draft.source:
            draft.lose(key, draft.source[key], "held-out tasks have the same room: sampling.max_context")


def _sampling(draft: Draft, infer: str) -> None:
    """`actor_infer.generating_args` go before those of both managers, validation's included."""
    own = f"{infer}.generating_args"
    if draft.below(f"{own}."):
        learner.sampling(draft, f"{own}.", "sampling")
        for name in ("sampling.temperature", "sampling.top_p", "sampling.top_k"):
            if name in draft.settings:
                draft.default(own, "validation too", f"evaluation.{name}", draft.settings[name])
        return
    learner.sampling(draft, "train_env_manager.generating_args.", "sampling")
    if draft.below("val_env_manager.generating_args."):
        learner.sampling(draft, "val_env_manager.generating_args.", "evaluation.sampling")


def _teacher(draft: Draft) -> str:
    """The teacher of on-policy distillation; empty without one."""
    distills = draft.below("student_train.") or draft.source.get("is_pure_opd")
    return str(draft.source.get("teacher.model_args.model_name_or_path") or "") if distills else ""


def teacher(draft: Draft) -> bool:
    """On-policy distillation: the advantage is the teacher's log-probability minus the student's."""
    if name := _teacher(draft):
        draft.set("teacher.model_args.model_name_or_path", name, "algorithm.args.teacher", name)
        draft.settings["algorithm.name"] = "distill"
        if "adv_estimator" in draft.source:
            estimator = draft.source["adv_estimator"]
            draft.set("adv_estimator", estimator, "algorithm.name", "distill", "a teacher alone decides")
        return True
    end = ".model_args.model_name_or_path"
    names = [str(name) for key, name in draft.source.items() if key.startswith("teacher.") and key.endswith(end)]
    if names:
        why = "several teachers, by tag, and there is one here. Give each its own run: keep one, as teacher.model_args."
        draft.refuse("teacher", ", ".join(names), why)
    elif draft.source.get("use_opd"):
        why = "a teacher beside rewards is not here. Write algorithm=distill, or leave use_opd out."
        draft.refuse("use_opd", True, why)
    return False


STAGES: dict[str, Callable[[Draft], None]] = {
    "agentic": agentic, "rlvr": rlvr, "sft": supervised.sft, "dpo": supervised.dpo, "distill": supervised.distill,
}  # fmt: skip
