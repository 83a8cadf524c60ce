"""ROLL's SFT, DPO and distillation pipelines."""

from __future__ import annotations

from arborl.convert.common_rules import VISION_MODEL
from arborl.convert.draft import Draft, one_or_all, paths
from arborl.convert.roll import roll_learner as learner

OBJECTIVE = (
    "logits_topk", "kd_temperature", "teacher_temperature", "adaptive_kl_alpha", "skew_lambda", "distill_on_prompt",
)  # fmt: skip


def save_interval(draft: Draft) -> None:
    draft.put("save_steps", 50, "trainer.save_every", lambda steps: int(steps) if int(steps) > 0 else 10_000)


def sft(draft: Draft) -> None:
    _learn(draft, "sft_train", "pretrain", "sft")
    _prompt_column(draft)
    draft.put("response_key", "output", "data.fields.completion")
    for key, why in (
        ("query_key", "a second column is not added to the first: join them in the rows"),
        ("system_key", "agent.system is one text for all rows"),
    ):
        if draft.source.get(key):
            draft.lose(key, draft.source[key], why)


def dpo(draft: Draft) -> None:
    name = "ipo" if draft.source.get("ipo") else "dpo"
    _learn(draft, "actor_train", "pretrain", name)
    if "ipo" in draft.source:
        draft.set("ipo", draft.source["ipo"], "algorithm.name", name)
    draft.put("beta", 0.1, "algorithm.args.beta", float)
    _prompt_column(draft)
    for column in ("chosen", "rejected"):
        if draft.source.get(f"{column}_key", column) != column:
            draft.put(f"{column}_key", column, f"data.fields.{column}")
        draft.skip_rest([f"{column}_key"], "the column has that name here too")
    if (smooth := draft.source.get("label_smoothing")) is not None:
        (draft.lose if smooth else draft.skip)("label_smoothing", smooth, "no smoothing of labels here")


def distill(draft: Draft) -> None:
    _learn(draft, "student", "student_pretrain", "distill")
    if VISION_MODEL.search(str(draft.source.get("student_pretrain"))):
        draft.refuse("student_pretrain", draft.source["student_pretrain"], "Arbor trains text models only.")
        return
    teacher = draft.source.get("teacher_pretrain") or draft.source.get("teacher.model_args.model_name_or_path")
    if not teacher:
        draft.refuse("teacher_pretrain", None, "names no teacher. Write teacher_pretrain: MODEL.")
        return
    draft.set("teacher_pretrain", teacher, "algorithm.args.teacher", teacher)
    draft.put("question_key", "question", "data.question")
    draft.default("sequence_length", None, "sampling.max_tokens", draft.settings["sampling.max_context"] // 2)
    objective = draft.source.get("kd_objective", "forward_kl")
    why = f"{objective} over given answers; here the student's own answers are scored by the teacher"
    draft.say("kd_objective", objective, "algorithm.loss", "distill", why)
    weight = draft.number("distill_loss_weight", 0.5)
    if weight < 1:
        why = f"the rest, {1 - weight:g}, is the loss of given answers there: see demonstrations"
        draft.lose("distill_loss_weight", weight, why)
    unread = dict.fromkeys(OBJECTIVE, "part of kd_objective")
    for key, why in {"answer_key": "given answers are not read: see kd_objective", **unread}.items():
        if key in draft.source:
            draft.lose(key, draft.source[key], why)
    draft.skip_rest(["logits_transfer_backend"], "one process, nothing is sent")


def _prompt_column(draft: Draft) -> None:
    """The column of the prompt; `question` is a default name and needs data.fields.prompt."""
    column = draft.source.get("prompt_key", "instruction")
    draft.say("prompt_key", column, "data.fields.prompt" if column == "question" else "data.question", column)


def _learn(draft: Draft, role: str, model: str, name: str) -> None:
    draft.settings["algorithm.name"] = name
    learner.model(draft, role, model)
    draft.put("sequence_length", draft.whole("sequence_length", 8192), "sampling.max_context")
    key = f"{role}.data_args.file_name"
    files = paths(draft.source.get(key))
    if not files:
        draft.refuse(key, None, "names no rows. Write file_name: FILE.")
        return
    draft.set(key, files, "data.path", one_or_all(files))
    if held := draft.source.get("validation.data_args.file_name"):
        if set(paths(held)) & set(files):
            why = "rows that are trained on: a tenth of them is held out instead"
            draft.lose("validation.data_args.file_name", held, why)
        else:
            draft.set("validation.data_args.file_name", held, "data.evaluation_path", one_or_all(paths(held)))
    learner.optimiser(draft, role)
    rows, devices = learner.optimiser_batch(draft, role)
    why = "" if devices else f"{role}.device_mapping does not say how many devices share a batch"
    for part, usual in (("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1)):
        draft.say(f"{role}.training_args.{part}", usual, "rollout.tasks_per_step", rows * (devices or 1), why)
    epochs = f"{role}.training_args.num_train_epochs"
    if "max_steps" in draft.source and name != "sft":
        draft.put("max_steps", 500, "trainer.steps")
        draft.skip_rest([epochs], "max_steps ends the run before it, or as it does here")
    else:
        draft.put(epochs, 1, "trainer.epochs", lambda passes: max(round(float(passes)), 1))
        if "max_steps" in draft.source:
            draft.lose("max_steps", draft.source["max_steps"], "passes over the rows decide there")
    save_interval(draft)
