"""verl's rewards: a function of one's own, a reward model, or the rule of a row's `data_source`; StateLM's scorers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arborl.convert.common_rules import UNSEEN
from arborl.convert.draft import Draft
from arborl.convert.verl.verl_rules import T

MANAGERS = ("naive", "dapo", "prime", "batch")
NO_MANAGER = "no such manager of rewards here. Name a reward of yours: rewards=[package.module:function]."
FUNCTION, NAME = "custom_reward_function.path", "custom_reward_function.name"
JUDGE = {"OPENAI_MODEL": "model", "OPENAI_BASE_URL": "base_url"}
"""Variables of StateLM's scripts, and arguments of the judge; the key stays in the environment."""


def rewards(draft: Draft, is_statelm: bool) -> None:
    """The rewards of a run, from all keys together."""
    if is_statelm:
        _statelm(draft)
    if not any(line.path == "rewards" for line in draft.lines):
        _function(draft) if draft.source.get(FUNCTION) is not None else _rule(draft)


def _rule(draft: Draft) -> None:
    """What verl itself does with each `data_source`."""
    key = "reward_model.reward_manager"
    if draft.known(key) not in MANAGERS:
        draft.refuse(key, draft.known(key), NO_MANAGER)
    else:
        draft.say(key, draft.known(key), "rewards", [{"name": "data_source"}])


def _function(draft: Draft) -> None:
    path, name = str(draft.source[FUNCTION]), draft.source.get(NAME) or "compute_score"
    if path.startswith("pkg://"):
        function, why = f"{path.removeprefix('pkg://')}:{name}", ""
    elif (file := Path(path).expanduser()).is_file():
        function, why = f"{file.absolute()}:{name}", ""
    else:
        function = f"{path}:{name}"
        why = "there is no such file near the script: correct the path"
        if UNSEEN.search(path):
            function = f"{UNSEEN.sub('', path).lstrip('/')}:{name}"
            why = f"{UNSEEN.search(path)[0]} is only known when the script runs: correct the path"  # type: ignore[index]
    more = draft.below("custom_reward_function.reward_kwargs.")
    made = [{"name": "score_function", "args": {"function": function} | ({"kwargs": more} if more else {})}]
    draft.set(FUNCTION, path, "rewards", made, why)
    if NAME in draft.source:
        draft.set(NAME, name, "rewards", made, why)
    for key, value in more.items():
        draft.set(f"custom_reward_function.reward_kwargs.{key}", value, "rewards", made, why)


def manager(draft: Draft, key: str, value: Any) -> None:
    """The newer name of `reward_model.reward_manager`."""
    if value is None:
        draft.skip(key, value, "null: see reward_model.reward_manager")
    elif value not in MANAGERS:
        draft.refuse(key, value, NO_MANAGER)
    else:
        draft.skip(key, value, "rewards are functions; see rewards")


def reward_model(draft: Draft, key: str, value: Any) -> None:
    """A sequence classifier of one label that scores the conversation; rules are not used then."""
    path, longest = draft.known("reward_model.model.path"), draft.source.get("reward_model.max_length")
    if not value:
        draft.skip(key, value, "rewards are functions")
        return
    if path is None:
        draft.refuse(key, value, "reward_model.model.path does not say which. Write it into the script.")
        return
    args: dict[str, Any] = {"path": str(path)}
    if isinstance(longest, int):
        args["max_tokens"] = longest
        why = "of a longer conversation the beginning is cut off"
        draft.set("reward_model.max_length", longest, "rewards", [{"name": "reward_model", "args": args}], why)
    made = [{"name": "reward_model", "args": args}]
    draft.set(key, value, "rewards", made, "a classifier of one label; one that generates is rewards=[judge]")
    if "reward_model.model.path" in draft.source:
        draft.set("reward_model.model.path", path, "rewards", made)


# ------------------------------------------------------------------------------------------------ StateLM


def _statelm(draft: Draft) -> None:
    """The fork's scorers: letters by rule; `statelm_qa` also has open answers, which a model judges."""
    path = draft.source.get(FUNCTION)
    scorer = None if path is None else Path(str(path)).stem
    if scorer not in ("statelm_qa", "mcq"):
        return
    args: dict[str, Any] = {"letters": "ABCD"}
    lines = {}
    for theirs, ours in (("exceed_length_penalty", "exceeded"), ("below_min_turns_reward", "too_few_turns")):
        if isinstance(value := draft.source.get(f"{T}{theirs}"), int | float):
            args[ours] = lines[f"{T}{theirs}"] = float(value)
    if scorer == "mcq":
        args |= {"wrong": 0.0, "invalid": 0.0}
    else:
        named = {ours: str(draft.source[name]) for name, ours in JUDGE.items() if draft.source.get(name)}
        args["open"] = {"name": "judge", "args": {"fallback": "exact"} | named}
    made = [{"name": "choice", "args": args}]
    options = (
        "" if len(args.get("open", {}).get("args", ())) == 3 else "; OPENAI_MODEL and OPENAI_BASE_URL name the judge"
    )
    why = "" if scorer == "mcq" else f"the judge of open answers gets our own prompt{options}"
    draft.set(FUNCTION, path, "rewards", made, why)
    for name in JUDGE if scorer == "statelm_qa" else ():
        if name in draft.source:
            draft.set(name, draft.source[name], "rewards", made)
    for key in lines:
        draft.set(key, draft.source[key], "rewards", made)
    if NAME in draft.source:
        draft.set(NAME, draft.source[NAME], "rewards", made)
