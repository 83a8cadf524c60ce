"""Rewards by domain, data sources by tag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from arborl.convert.common_rules import LEFT_OUT
from arborl.convert.draft import Draft, as_number, names, one_or_all, paths
from arborl.convert.roll.roll_key_table import REWARD

MATH = "compared by rule, number by number, and not by math_verify's symbols"
NAME = re.compile(r"[\w -]+")
SOFT = {"soft": (1.0, -0.5, -1.0), "loose": (1.0, -1.0, -1.0), "strict": (1.0, -1.0, -1.0)}
REPETITION = {"name": "repetition", "weight": 0.5}
"""There a penalty of up to 0.5 for repeated sequences of three words."""
IFEVAL = "a keyword is counted by itself, there every word; an unknown function fails the episode, there it scores 0"
IMAGES = {"DetectionRewardWorker": "boxes in images", "VideoR1RewardWorker": "answers about videos"}
WORKERS = (
    "MathRuleRewardWorker", "GeneralRuleRewardWorker", "CodeSandboxRewardWorker", "LLMJudgeRewardWorker",
    "CrossThinkQARuleRewardWorker", "MultipleChoiceBoxedRuleRewardWorker",
)  # fmt: skip


READ = {
    "LLMJudgeRewardWorker": (
        "judge_model_name", "judge_api_url", "judge_model_type", "model_args.model_name_or_path",
    ),
    "CrossThinkQARuleRewardWorker": ("reward_type",),
    "MultipleChoiceBoxedRuleRewardWorker": ("reward_type",),
}  # fmt: skip
"""Keys of a domain that decide its reward, beside the worker."""


def reward(draft: Draft, domain: str) -> tuple[list[Any], str] | None:
    """The rewards of a domain and what differs; None where it is left out, or has been refused."""
    at = f"rewards.{domain}."
    worker = str(draft.source.get(f"{at}worker_cls", "")).rpartition(".")[2]
    ours = draft.uses.get(domain) or draft.uses.get(worker)
    if ours == LEFT_OUT:
        return None
    if ours:
        return [ours], "as --use says"
    if worker == "MathRuleRewardWorker":
        return ["equal"], MATH
    if worker == "GeneralRuleRewardWorker":
        return ["ifeval", REPETITION], IFEVAL
    if worker == "CodeSandboxRewardWorker":
        return [{"name": "code_tests", "args": {"field": "test_cases"}}], "run in our sandbox; 1 where all tests pass"
    if worker in ("CrossThinkQARuleRewardWorker", "MultipleChoiceBoxedRuleRewardWorker"):
        right, wrong, invalid = SOFT.get(str(draft.source.get(f"{at}reward_type")), SOFT["soft"])
        why = "a letter that is right but not in a box is as good"
        choice = {"name": "choice", "args": {"right": right, "wrong": wrong, "invalid": invalid}}
        return [choice, REPETITION] if worker.startswith("CrossThink") else [choice], why
    if worker == "LLMJudgeRewardWorker":
        return _judge(draft, at)
    if worker in IMAGES:
        why = f"scores {IMAGES[worker]}, and models see text only here. --use {domain}=none leaves its rows out."
        draft.refuse(f"{at}worker_cls", worker, why)
        return None
    own = f"--use {domain}=package.module:function, or --use {domain}=none to leave its rows out"
    why = f"no such reward here. Known: {', '.join(WORKERS)}. Write one of your own (docs/tools.md) and say so: {own}."
    draft.refuse(f"{at}worker_cls", worker or None, why)
    return None


def _judge(draft: Draft, at: str) -> tuple[list[Any], str]:
    source = draft.source
    model = source.get(f"{at}judge_model_name") or source.get(f"{at}model_args.model_name_or_path")
    args = {"model": model or "${oc.env:OPENAI_MODEL}", "wrong": 0.0, "invalid": 0.0, "exceeded": 0.0}
    args["base_url"] = source.get(f"{at}judge_api_url") or "${oc.env:OPENAI_BASE_URL}"
    why = "called at an endpoint (base_url, or OPENAI_BASE_URL), with Arbor's prompt"
    if source.get(f"{at}judge_model_type", "inference") != "api":
        why += "; serve the model yourself"
    return [{"name": "judge", "args": args}], why


def domains(draft: Draft, train: str, distilled: bool) -> None:
    """Each tag of a domain is a source, with the domain's reward and its part of the batch."""
    at = f"{train}.data_args."
    shares: dict[str, Any] = draft.below(f"{at}domain_interleave_probs.")
    known = list(dict.fromkeys(key.split(".")[0] for key in draft.below("rewards.")))
    chosen = [name for name in known if not shares or shares.get(name, 0)]
    rewards = {name: reward(draft, name) for name in chosen}
    for name in shares:
        if name not in known and not distilled:
            draft.refuse(f"{at}domain_interleave_probs.{name}", shares[name], "rewards has no such domain.")
    kept = {name: found for name, found in rewards.items() if found is not None}
    if draft.problems:
        return
    if not kept:
        draft.refuse("rewards", None, "no reward is left. Write rewards.DOMAIN.worker_cls, or --use DOMAIN=NAME.")
        return
    for name in chosen:
        if name not in kept:
            why = "left out, as --use says: the others fill its place, and its rows must not be in the files"
            draft.lose(f"rewards.{name}.worker_cls", draft.source.get(f"rewards.{name}.worker_cls"), why)
            draft.lose(f"{at}domain_interleave_probs.{name}", shares.get(name), why)
    if files := paths(draft.source.get(f"{at}file_name")):
        draft.set(f"{at}file_name", files, "data.path", one_or_all(files))
    else:
        draft.refuse(f"{at}file_name", None, "names no rows. Write file_name: [FILE].")
    _columns(draft, at)
    if len(kept) == 1:
        ((name, (ours, why)),) = kept.items()
        _report(draft, name, "rewards", ours, why)
        alone = "a domain alone has the whole batch, and one with a share of 0 nothing"
        draft.skip_rest([f"{at}domain_interleave_probs.{one}" for one in shares], alone)
    else:
        _sources(draft, at, kept, shares)
    _leftovers(draft, shares, known, kept)
    _held_out(draft, several=len(kept) > 1)


def _report(draft: Draft, name: str, path: str, ours: list[Any], why: str) -> None:
    """The reward of a domain, for each key that decides it."""
    worker = str(draft.source.get(f"rewards.{name}.worker_cls", "")).rpartition(".")[2]
    for key in ("worker_cls", *READ.get(worker, ())):
        whole = f"rewards.{name}.{key}"
        if key == "worker_cls" or whole in draft.source:
            draft.set(whole, draft.source.get(whole), path, ours, why)


def _columns(draft: Draft, at: str) -> None:
    if (prompt := draft.source.get(f"{at}prompt")) is not None:
        draft.set(f"{at}prompt", prompt, "data.question", prompt)
    if (messages := draft.source.get(f"{at}messages")) is not None and messages != "messages":
        draft.set(f"{at}messages", messages, "data.fields.messages", messages)
    elif messages is not None:
        draft.skip(f"{at}messages", messages, "a column of that name is read as the conversation anyway")
    draft.default("ground_truth", "a column of the rows", "data.fields.answer", "ground_truth")
    draft.put("prompt_length", 1024, "data.max_prompt_tokens")


def _sources(draft: Draft, at: str, kept: Mapping[str, tuple[list[Any], str]], shares: Mapping[str, Any]) -> None:
    draft.default("rows are of a domain by their tag", "tag", "data.by", draft.source.get(f"{at}tag") or "tag")
    for name, (ours, why) in kept.items():
        tags = names(draft.source.get(f"rewards.{name}.tag_included")) or [name]
        share = as_number(f"{at}domain_interleave_probs.{name}", shares.get(name, 1.0 / len(kept)))
        several = "" if len(tags) == 1 else f"the domain's share, divided equally among its {len(tags)} tags"
        for tag in tags:
            if not NAME.fullmatch(tag):
                why_not = "is no name for a source here. Use letters, digits, - and _."
                draft.refuse(f"rewards.{name}.tag_included", tag, why_not)
            _report(draft, name, f"data.sources.{tag}.rewards", ours, why)
            if (key := f"rewards.{name}.tag_included") in draft.source:
                draft.set(key, tags, f"data.sources.{tag}.rewards", ours)
            key = f"{at}domain_interleave_probs.{name}"
            draft.say(key, share, f"data.sources.{tag}.ratio", share / len(tags), several)
    unused = [f"{at}domain_interleave_probs.{name}" for name in shares if not shares[name]]
    draft.skip_rest(unused, "a share of 0: no rows")


def _leftovers(draft: Draft, shares: Mapping[str, Any], known: list[str], kept: Mapping[str, Any]) -> None:
    """Other keys of the domains, by exact name."""
    filters = ("query_filter_config.type", "response_filter_config.type")
    for name in known:
        chosen = not shares or shares.get(name, 0)
        unused = "left out, as --use says" if chosen else "no row is of this domain: it has no share"
        for key, value in draft.below(f"rewards.{name}.").items():
            whole = f"rewards.{name}.{key}"
            if whole in draft.accounted():
                continue
            if key.startswith(("system_envs.", *(f"{one.removesuffix('.type')}.filter_args." for one in filters))):
                draft.lose(whole, value, "thresholds and variables of a reward's worker are not here")
            elif key not in REWARD and key != "worker_cls":
                draft.lose(whole, value, "unknown key")
            elif name not in kept:
                draft.skip(whole, value, unused)
            elif key in filters and value != "no_filter":
                why = "groups that all score alike are dropped; there by thresholds"
                draft.set(whole, value, "rollout.group_filter", "varied", why)
            else:
                REWARD[key](draft, whole, value)


def _held_out(draft: Draft, several: bool) -> None:
    key = "validation.data_args.file_name"
    files = paths(draft.source.get(key))
    if not files:
        return
    if several or len(files) > 1:
        draft.lose(key, files, "sources by a column have their own held-out rows: a tenth")
    else:
        draft.set(key, files, "data.evaluation_path", files[0])
    if draft.source.get("val_batch_size") is not None:
        draft.put("val_batch_size", None, "evaluation.tasks", int)


OFF = {
    "max_len_mask": "off", "difficulty_mask": "off",
    "difficulty_low_threshold": "not read without difficulty_mask",
    "difficulty_high_threshold": "not read without difficulty_mask",
    "error_max_len_threshold": "not read without error_max_len_clip",
}  # fmt: skip
WITHOUT_COUNTERPART = (
    "error_max_len_clip", "difficulty_loss_weight", "length_loss_weight", "postive_loss_coef",
    "use_topr_neg_loss_coef", "use_topr_loss", "balance_length",
)  # fmt: skip


def masks(draft: Draft, size: int) -> None:
    """Which answers are left out of the loss, and how they are weighed."""
    source = draft.source
    if source.get("max_len_mask"):
        draft.set("max_len_mask", True, "algorithm.overlong.filter", True, "out of the group's baseline too")
    if source.get("difficulty_mask") and size > 1:
        low, high = draft.number("difficulty_low_threshold", 0.0), draft.number("difficulty_high_threshold", 1.0)
        exact = low < 1 / size and high > 1 - 1 / size
        why = "" if exact else "groups that all score alike; there those by difficulty thresholds"
        for key in ("difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold"):
            if key in source:
                draft.set(key, source[key], "algorithm.skip_zero_variance", True, why)
    for key, why in OFF.items():
        draft.skip_rest([key], why)
    for key in WITHOUT_COUNTERPART:
        if source.get(key):
            draft.lose(key, source[key], "no counterpart here")
        draft.skip_rest([key], "off")
    if (coef := source.get("rl_loss_coef")) is not None:
        why = "1, as here" if coef == 1 else "a factor on all of the loss, which Adam undoes"
        draft.skip("rl_loss_coef", coef, why)
