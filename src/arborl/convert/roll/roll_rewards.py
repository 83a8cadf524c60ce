"""Rewards by domain, data sources by tag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from arborl.convert.draft import Draft, names

MATH = "compared by rule, number by number, and not by math_verify's symbols"
NAME = re.compile(r"[\w -]+")
LEAVE = "none"
"""What `--use DOMAIN=none` says: leave it out."""
SOFT = {"soft": (1.0, -0.5, -1.0), "loose": (1.0, -1.0, -1.0), "strict": (1.0, -1.0, -1.0)}
WORKERS = (
    "MathRuleRewardWorker", "CodeSandboxRewardWorker", "LLMJudgeRewardWorker", "CrossThinkQARuleRewardWorker",
    "MultipleChoiceBoxedRuleRewardWorker",
)  # fmt: skip


def reward(draft: Draft, domain: str) -> tuple[Any, str] | None:
    """The reward of a domain and what differs; None where it is left out, or has been refused."""
    at = f"rewards.{domain}."
    worker = str(draft.source.get(f"{at}worker_cls", "")).rpartition(".")[2]
    ours = draft.uses.get(domain) or draft.uses.get(worker)
    if ours == LEAVE:
        return None
    if ours:
        return ours, "as --use says"
    if worker == "MathRuleRewardWorker":
        return "equal", MATH
    if worker == "CodeSandboxRewardWorker":
        return {"name": "code_tests", "args": {"field": "test_cases"}}, "run in our sandbox; 1 where all tests pass"
    if worker in ("CrossThinkQARuleRewardWorker", "MultipleChoiceBoxedRuleRewardWorker"):
        right, wrong, invalid = SOFT.get(str(draft.source.get(f"{at}reward_type")), SOFT["soft"])
        why = "a letter that is right but not in a box is as good"
        return {"name": "choice", "args": {"right": right, "wrong": wrong, "invalid": invalid}}, why
    if worker == "LLMJudgeRewardWorker":
        return _judge(draft, at)
    own = f"--use {domain}=package.module:function, or --use {domain}=none to leave its rows out"
    known = f"no such reward here. Known: {', '.join(WORKERS)}"
    draft.refuse(
        f"{at}worker_cls", worker or None, f"{known}. Write one of your own (docs/tools.md) and say so: {own}."
    )
    return None


def _judge(draft: Draft, at: str) -> tuple[Any, str]:
    source = draft.source
    model = source.get(f"{at}judge_model_name") or source.get(f"{at}model_args.model_name_or_path")
    args = {"model": model or "${oc.env:OPENAI_MODEL}", "wrong": 0.0, "invalid": 0.0, "exceeded": 0.0}
    args["base_url"] = source.get(f"{at}judge_api_url") or "${oc.env:OPENAI_BASE_URL}"
    why = "called at an endpoint (base_url, or OPENAI_BASE_URL), with Arbor's prompt"
    if source.get(f"{at}judge_model_type", "inference") != "api":
        why += "; serve the model yourself"
    return {"name": "judge", "args": args}, why


def domains(draft: Draft, train: str, distilled: bool) -> None:
    """Each tag of a domain is a source, with the domain's reward and its part of the batch."""
    files = _files(draft, f"{train}.data_args.file_name")
    shares: dict[str, Any] = draft.below(f"{train}.data_args.domain_interleave_probs.")
    known = list(dict.fromkeys(key.split(".")[0] for key in draft.below("rewards.")))
    chosen = [name for name in known if not shares or shares.get(name, 0)]
    rewards = {name: reward(draft, name) for name in chosen}
    for name in shares:
        if name not in known and not distilled:
            draft.refuse(
                f"{train}.data_args.domain_interleave_probs.{name}", shares[name], "rewards has no such domain."
            )
    kept = {name: found for name, found in rewards.items() if found is not None}
    if draft.problems:
        return
    if not kept:
        draft.refuse("rewards", None, "no reward is left. Write rewards.DOMAIN.worker_cls, or --use DOMAIN=NAME.")
        return
    for name in chosen:
        if name not in kept:
            why = "left out, as --use says: the others fill its place, and its rows must not be in the files"
            draft.drop(f"rewards.{name}.worker_cls", draft.source.get(f"rewards.{name}.worker_cls"), why)
            draft.drop(f"{train}.data_args.domain_interleave_probs.{name}", shares.get(name), why)
    _path(draft, train, files)
    _columns(draft, train)
    if len(kept) == 1:
        (name,) = kept
        draft.set(
            f"rewards.{name}.worker_cls",
            draft.source.get(f"rewards.{name}.worker_cls"),
            "rewards",
            [kept[name][0]],
            kept[name][1],
        )
    else:
        _sources(draft, train, kept, shares)
    _leftovers(draft, train, known, kept)
    _held_out(draft, several=len(kept) > 1)


def _files(draft: Draft, key: str) -> list[str]:
    found = draft.source.get(key)
    return [str(one) for one in found] if isinstance(found, list) else names(found) if found else []


def _path(draft: Draft, train: str, files: list[str]) -> None:
    key = f"{train}.data_args.file_name"
    if not files:
        draft.refuse(key, None, "names no rows. Write file_name: [FILE].")
    else:
        draft.set(key, files, "data.path", files[0] if len(files) == 1 else files)


def _columns(draft: Draft, train: str) -> None:
    at = f"{train}.data_args."
    if (prompt := draft.source.get(f"{at}prompt")) is not None:
        draft.set(f"{at}prompt", prompt, "data.question", prompt)
    if (messages := draft.source.get(f"{at}messages")) is not None and messages != "messages":
        draft.set(f"{at}messages", messages, "data.fields.messages", messages)
    elif messages is not None:
        draft.skip(f"{at}messages", messages, "a column of that name is read as the conversation anyway")
    draft.default("ground_truth", "a column of the rows", "data.fields.answer", "ground_truth")
    draft.put("prompt_length", 1024, "data.max_prompt_tokens")


def _sources(draft: Draft, train: str, kept: Mapping[str, tuple[Any, str]], shares: Mapping[str, Any]) -> None:
    draft.default(
        "rows are of a domain by their tag", "tag", "data.by", draft.source.get(f"{train}.data_args.tag") or "tag"
    )
    for name, (ours, why) in kept.items():
        tags = names(draft.source.get(f"rewards.{name}.tag_included")) or [name]
        share = float(shares.get(name, 1.0 / len(kept)))
        for tag in tags:
            if not NAME.fullmatch(tag):
                draft.refuse(
                    f"rewards.{name}.tag_included", tag, "is no name for a source here. Use letters, digits, - and _."
                )
            place = f"data.sources.{tag}"
            draft.set(
                f"rewards.{name}.worker_cls",
                draft.source.get(f"rewards.{name}.worker_cls"),
                f"{place}.rewards",
                [ours],
                why,
            )
            key = f"{train}.data_args.domain_interleave_probs.{name}"
            several = "" if len(tags) == 1 else f"the domain's share, divided equally among its {len(tags)} tags"
            (draft.set if key in draft.source else draft.default)(
                key, share, f"{place}.ratio", share / len(tags), several
            )


def _leftovers(draft: Draft, train: str, known: list[str], kept: Mapping[str, Any]) -> None:
    for name in known:
        for key in draft.below(f"rewards.{name}."):
            whole = f"rewards.{name}.{key}"
            filters = ("query_filter_config.type", "response_filter_config.type")
            if key in filters and draft.source[whole] != "no_filter":
                draft.set(
                    whole,
                    draft.source[whole],
                    "rollout.group_filter",
                    "varied",
                    "groups that all score alike are dropped; there by thresholds",
                )
            elif key == "response_length_penalty_coef" and draft.source[whole]:
                draft.drop(whole, draft.source[whole], "no such penalty by itself: algorithm.overlong")
            elif whole not in draft.accounted():
                draft.skip(
                    whole,
                    draft.source[whole],
                    "left out"
                    if name not in kept
                    else "read with the domain's worker_cls, or where it runs, which changes nothing",
                )
    at = f"{train}.data_args."
    for key in draft.below(at):
        if at + key not in draft.accounted():
            draft.skip(
                at + key,
                draft.source[at + key],
                "data.* sets how rows are read; the chat template is the model's",
            )


def _held_out(draft: Draft, several: bool) -> None:
    key = "validation.data_args.file_name"
    files = _files(draft, key)
    if not files:
        return
    if several or len(files) > 1:
        draft.drop(key, files, "sources by a column have their own held-out rows: a tenth")
    else:
        draft.set(key, files, "data.evaluation_path", files[0])
    if (batch := draft.source.get("val_batch_size")) is not None:
        draft.set("val_batch_size", batch, "evaluation.tasks", int(batch))


def masks(draft: Draft, size: int) -> None:
    """Which answers are left out of the loss, and how they are weighed."""
    source = draft.source
    if source.get("max_len_mask"):
        draft.set("max_len_mask", True, "algorithm.overlong.filter", True, "out of the group's baseline too")
    if source.get("difficulty_mask") and size > 1:
        low, high = (
            draft.number("difficulty_low_threshold", 0.0),
            draft.number("difficulty_high_threshold", 1.0),
        )
        exact = low < 1 / size and high > 1 - 1 / size
        why = "" if exact else "groups that all score alike; there those by difficulty thresholds"
        draft.set("difficulty_mask", True, "algorithm.skip_zero_variance", True, why)
        for key in ("difficulty_low_threshold", "difficulty_high_threshold"):
            if key in source:
                draft.set(key, source[key], "algorithm.skip_zero_variance", True, why)
    off = {
        "max_len_mask": "off",
        "difficulty_mask": "off",
        "difficulty_low_threshold": "not read without difficulty_mask",
        "difficulty_high_threshold": "not read without difficulty_mask",
        "error_max_len_threshold": "not read without error_max_len_clip",
    }
    extra = (
        "error_max_len_clip", "difficulty_loss_weight", "length_loss_weight", "postive_loss_coef",
        "use_topr_neg_loss_coef", "use_topr_loss", "balance_length",
    )  # fmt: skip
    for key in (*off, *extra):
        if key in source and key not in draft.accounted():
            quiet = off.get(key) or ("" if source[key] else "off")
            (draft.skip if quiet else draft.drop)(key, source[key], quiet or "no counterpart here")
    if (coef := source.get("rl_loss_coef")) is not None:
        draft.skip(
            "rl_loss_coef", coef, "1, as here" if coef == 1 else "a factor on all of the loss, which Adam undoes"
        )
