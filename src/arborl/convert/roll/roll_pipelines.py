"""Order of the rules for each of ROLL's pipelines.

Settings that belong together are read together, with ROLL's own defaults for those that are left out (its
configuration classes say them: PPOConfig, AgenticConfig, RLVRConfig, GeneratingArguments, TrainingArguments). What is
left then goes through the tables of `roll_key_table.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from arborl.convert.draft import Draft
from arborl.convert.roll import roll_algorithm as algorithm
from arborl.convert.roll import roll_learner as learner
from arborl.convert.roll import roll_rewards as rewards
from arborl.convert.roll import roll_supervised as supervised
from arborl.convert.roll.roll_environments import environments
from arborl.convert.roll.roll_key_table import PREFIXES as PREFIXES
from arborl.convert.roll.roll_key_table import TABLE as TABLE


def pipeline(keys: Collection[str]) -> str:
    """`agentic`, `rlvr`, `sft`, `dpo` or `distill`.

    Example:
        pipeline(["train_env_manager.tags", "adv_estimator"])      # 'agentic'
    """
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
    for key, value in draft.source.items():
        if key.endswith(("image_folder", "video_folder", "audio_folder", "custom_data_kwargs_func")) and value:
            draft.refuse(key, value, "models see text only here: no images, videos or sound.")
    STAGES[pipeline(draft.source)](draft)
    draft.put("seed", 42, "seed")


def agentic(draft: Draft) -> None:
    """Environments by tag."""
    train, infer = _roles(draft)
    draft.put("max_steps", 500, "trainer.steps")
    draft.put("eval_steps", 10, "evaluation.every", lambda steps: max(int(steps), 0))
    draft.put("save_steps", 50, "trainer.save_every", lambda steps: int(steps) if int(steps) > 0 else 10_000)
    learner.model(draft, train, "pretrain")
    length(draft)
    _sampling(draft, infer)
    if draft.problems:
        return
    environments(draft)
    if draft.problems:
        return
    steps = draft.settings.get("agent.name") == "step"
    tasks = int(draft.settings["rollout.tasks_per_step"])
    size = int(draft.settings["rollout.group_size"])
    if teacher(draft):
        algorithm.aggregation(draft, steps)
    else:
        algorithm.estimator(draft, steps, rows=False)
        algorithm.loss(draft, train)
        algorithm.penalties(draft)
    learner.optimiser(draft, train)
    learner.minibatches(draft, train, tasks * size, tasks, steps)
    patience(draft)


def rlvr(draft: Draft) -> None:
    """Rows, with rewards by domain."""
    train, infer = _roles(draft)
    draft.put("max_steps", 500, "trainer.steps")
    if "eval_steps" in draft.source:
        draft.put("eval_steps", 10, "evaluation.every", lambda steps: max(int(steps), 0))
    draft.put("save_steps", 50, "trainer.save_every", lambda steps: int(steps) if int(steps) > 0 else 10_000)
    learner.model(draft, train, "pretrain")
    length(draft)
    learner.sampling(draft, f"{infer}.generating_args.", "sampling")
    draft.settings["sampling.max_tokens"] = draft.settings["sampling.max_context"] - int(
        draft.source.get("prompt_length") or 1024
    )
    if draft.below("validation.generating_args."):
        learner.sampling(draft, "validation.generating_args.", "evaluation.sampling")
        draft.undo("evaluation.sampling.max_tokens", "sequence_length less prompt_length, as in training")
    tasks = int(draft.put("rollout_batch_size", 128, "rollout.tasks_per_step"))
    size = int(draft.put("num_return_sequences_in_group", 1, "rollout.group_size"))
    distilled = teacher(draft)
    rewards.domains(draft, train, distilled)
    if draft.problems:
        return
    if distilled:
        algorithm.aggregation(draft, False)
    else:
        algorithm.estimator(draft, steps=False, rows=True)
        algorithm.loss(draft, train)
        algorithm.penalties(draft)
        rewards.masks(draft, size)
    learner.optimiser(draft, train)
    learner.minibatches(draft, train, tasks * size, tasks, steps=False)
    patience(draft)


def _roles(draft: Draft) -> tuple[str, str]:
    """The workers that train and that sample: on-policy distillation calls them students."""
    student = any(key.startswith("student_train.") for key in draft.source)
    return ("student_train", "student_infer") if student else ("actor_train", "actor_infer")


def length(draft: Draft) -> None:
    """`sequence_length` holds prompt and answer; without it, both of their lengths do."""
    answer = draft.source.get("response_length")
    whole = draft.source.get("sequence_length")
    total = draft.whole("sequence_length", 0) or draft.whole("response_length", 0) + draft.whole("prompt_length", 1024)
    if whole is None and answer is None:
        draft.refuse("sequence_length", None, "is not there, and response_length is not either. Write one of them.")
        total = 8192
    draft.settings["sampling.max_context"] = total
    for key in ("sequence_length", "response_length", "prompt_length"):
        if key in draft.source:
            draft.set(key, draft.source[key], "sampling.max_context", total)
    for key in ("val_prompt_length", "val_sequence_length"):
        if key in draft.source:
            draft.drop(key, draft.source[key], "held-out tasks have the same room: sampling.max_context")


def _sampling(draft: Draft, infer: str) -> None:
    """`actor_infer.generating_args` go before those of both managers, validation's included."""
    own = bool(draft.below(f"{infer}.generating_args."))
    learner.sampling(draft, f"{infer}.generating_args." if own else "train_env_manager.generating_args.", "sampling")
    if own:
        for name, value in list(draft.settings.items()):
            if name in ("sampling.temperature", "sampling.top_p", "sampling.top_k"):
                draft.default(f"{infer}.generating_args", "validation too", f"evaluation.{name}", value)
    elif draft.below("val_env_manager.generating_args."):
        learner.sampling(draft, "val_env_manager.generating_args.", "evaluation.sampling")


def teacher(draft: Draft) -> bool:
    """On-policy distillation: the advantage is the teacher's log-probability minus the student's."""
    at = "teacher.model_args.model_name_or_path"
    if at in draft.source and (draft.below("student_train.") or draft.source.get("is_pure_opd")):
        draft.set(at, draft.source[at], "algorithm.args.teacher", draft.source[at])
        why = "" if "adv_estimator" not in draft.source else "a teacher alone decides"
        draft.settings["algorithm.name"] = "distill"
        if why:
            draft.set("adv_estimator", draft.source["adv_estimator"], "algorithm.name", "distill", why)
        return True
    several = [
        key for key in draft.source if key.startswith("teacher.") and key.endswith(".model_args.model_name_or_path")
    ]
    if several:
        why = "several teachers, by tag, and there is one here. Give each its own run: keep one, as teacher.model_args."
        draft.refuse("teacher", ", ".join(str(draft.source[key]) for key in several), why)
    elif draft.source.get("use_opd"):
        draft.refuse(
            "use_opd", True, "a teacher beside rewards is not here. Write algorithm=distill, or leave use_opd out."
        )
    return False


def patience(draft: Draft) -> None:
    """Nothing ends an episode there for taking long."""
    hung = draft.whole("env_monitor.hung_timeout", 3600)
    for path in ("rollout.episode_seconds", "rollout.step_seconds"):
        draft.default("env_monitor.hung_timeout", hung, path, float(hung))


STAGES: dict[str, Callable[[Draft], None]] = {
    "agentic": agentic, "rlvr": rlvr, "sft": supervised.sft, "dpo": supervised.dpo, "distill": supervised.distill,
}  # fmt: skip
