"""AgentFly's keys beside verl's, as of its first and its later layout (`agent.init_config`, `agent.run_config`)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from arborl.convert.common_rules import CORPUS, DOCUMENTS, ENGINE, LEFT_OUT, SEARCH_TAGS, Rule, idle, num, to
from arborl.convert.draft import Draft, names
from arborl.convert.verl.verl_rules import M

AGENTS = {"hf": "tool", "think": "tool", "react": "react", "code": "code", "searchr1": "code", "action": "chat"}
TOOLS = {
    "calculator": "calculator", "code_interpreter": "python", "answer": "answer", "answer_math": "answer",
    "answer_qa": "answer", "search": "search", "google_search": "search", "dense_retrieve": "retrieve",
    "async_dense_retrieve": "retrieve", "asyncdense_retrieve": "retrieve",
}  # fmt: skip
ENVIRONMENTS = {"webshop_browser": "shop", "webshop_browser_action": "shop"}
"""Tools that are an environment's moves."""
ELSEWHERE = {
    "alfworld": "ALFWorld is not here", "scienceworld": "ScienceWorld is not here", "chess": "chess is not here",
    "pyautogui": "screens are not here, and models see text only", "capture": "screens are not here",
    "summarize": "context is edited by agent=statelm (docs/context.md), not by a tool of its own",
}  # fmt: skip
JUDGE = {"model": "${oc.env:OPENAI_MODEL}", "base_url": "${oc.env:OPENAI_BASE_URL}"}
NOTHING: dict[str, Any] = {"wrong": 0.0, "invalid": 0.0, "exceeded": 0.0, "too_few_turns": 0.0, "max_sentences": None}
GOLDEN = {"field": "golden_answers"} | NOTHING
EXACT = {"name": "short_answer", "args": {"match": "exact"} | GOLDEN}
F1 = {"name": "short_answer", "args": {"match": "f1"} | NOTHING}
F1_TOOL = {"name": "short_answer", "args": {"match": "f1", "min_tool_calls": 2} | NOTHING}
TAGGED = {
    "earlier_pattern": r"\A(?:\Z|(?=.*<think>)(?=.*</think>))",
    "last_pattern": r"\A(?=.*<answer>)(?=.*</answer>)",
}
FORM = {"match": "exact", "min_tool_calls": 1} | TAGGED | GOLDEN | {"wrong": 0.1, "invalid": 0.1}
JUDGED = ({"name": "judge", "args": JUDGE | NOTHING}, "with our own question; OPENAI_BASE_URL says where")
TOOL = {"wrong": 0.1, "min_tool_calls": 1}
THINK = {"earlier_pattern": "</think>", "last_pattern": "</think>"}
THOUGHT = {"earlier_pattern": r"(?i)\A\s*thought", "last_pattern": r"(?i)\A\s*thought"}
DIGITS = "numbers are compared whole, not by their last digits"
REWARDS: dict[str, tuple[Any, str]] = {
    "math_reward_string_equal": ({"name": "equal", "args": TOOL}, DIGITS),
    "math_string_equal_reward_tool": ({"name": "equal", "args": TOOL}, DIGITS),
    "math_equal_reward": ("equal", ""),
    "math_equal_reward_tool": ({"name": "equal", "args": TOOL}, ""),
    "math_equal_reward_think": ({"name": "equal", "args": TOOL | THINK}, ""),
    "math_reward_thought_with_tool": ({"name": "equal", "args": TOOL | THOUGHT}, ""),
    "math_reward": ("equal", ""),
    "qa_em_reward": (EXACT, ""),
    "qa_em_format_reward": ({"name": "short_answer", "args": FORM}, "as it is documented; the code there fails"),
    "qa_em_reward_tool_call": (EXACT, ""),
    "qa_f1_reward": (F1, ""),
    "qa_f1_reward_tool": (F1_TOOL, ""),
    "code_reward_test": ("code_tests", "1 where all tests of the row pass; there whenever the code could be run"),
    "llm_as_judge_reward": JUDGED,
    "llm_as_judge_math_reward": JUDGED,
    "webshop_reward": ("env", ""),
}
"""Theirs, ours, and what differs."""


def agent(draft: Draft, key: str, value: Any) -> None:
    kind = str(value).lower()
    ours = draft.uses.get(kind) or AGENTS.get(kind)
    if ours is None:
        own = f"Write one of your own (docs/agents.md) and say so: --use {kind}=package.module:Agent."
        draft.refuse(key, value, f"no such agent here. Known: {', '.join(AGENTS)}. {own}")
        return
    draft.set(key, value, "agent.name", ours, "its actions are sent to the environment" if kind == "action" else "")
    if kind == "searchr1" and ours == "code":
        for name, tag in SEARCH_TAGS.items():
            draft.set(key, value, f"agent.args.{name}", tag)


def tools(draft: Draft, key: str, value: Any) -> None:
    found: list[str] = []
    for name in names(value):
        ours = draft.uses.get(name) or TOOLS.get(name)
        if ours == LEFT_OUT:
            draft.lose(key, name, "left out, as --use says")
        elif ours is None and name in ENVIRONMENTS:
            why = "its moves are messages, and its products are made; env.args.data names WebShop's own"
            draft.set(key, name, "env.name", ENVIRONMENTS[name], why)
        elif ours is None:
            reason = next((text for start, text in ELSEWHERE.items() if name.startswith(start)), "no such tool here")
            own = f"--use {name}=package.module:function, or --use {name}=none to leave it out"
            write = f"Write one of your own (docs/tools.md) and say so: {own}"
            draft.refuse(key, name, f"{reason}. Known: {', '.join(TOOLS)}. {write}.")
        elif ours not in found:
            found.append(ours)
            for argument, content in CORPUS.get(ours, {}).items():
                draft.set(key, name, f"agent.tool_args.{ours}.{argument}", content, DOCUMENTS)
    if found:
        draft.set(key, value, "tools", found)


def reward(draft: Draft, key: str, value: Any) -> None:
    name = str(value).lower()
    if name in draft.uses:
        draft.set(key, value, "rewards", [draft.uses[name]], "as --use says")
    elif name in REWARDS:
        ours, why = REWARDS[name]
        draft.set(key, value, "rewards", [ours], why)
    else:
        own = f"Write one of your own (docs/tools.md) and say so: --use {name}=package.module:function."
        draft.refuse(key, value, f"no such reward here. Known: {', '.join(REWARDS)}. {own}")


FAMILY = re.compile(r"qwen\d(?:\.\d)?|llama-?\d(?:\.\d)?|glm-\d|phi-\d|deepseek|nemotron")
"""Beginnings of AgentFly's templates that are a model's own."""


def template(draft: Draft, key: str, value: Any) -> None:
    """A chat template by name: the model's own, or another one, which is not kept."""
    name, model = str(value).lower(), str(_said(draft, "model_name_or_path") or draft.known(f"{M}path")).lower()
    family = FAMILY.match(name)
    plain = re.compile(r"[-_.\s]")
    if family is None or plain.sub("", family[0]) not in plain.sub("", model.rpartition("/")[2]):
        why = "not the model's own chat template, which is used here: model.chat_template names another"
        draft.lose(key, value, why)
    elif name != family[0]:
        why = f"a variant of {family[0]}; the model's own chat template is used: model.chat_template names another"
        draft.lose(key, value, why)
    else:
        draft.skip(key, value, "the model's own chat template")


def turns(draft: Draft, key: str, value: Any) -> None:
    """Calls of the model in one conversation."""
    if value is not None and (not isinstance(value, int) or value < 1):
        draft.refuse(key, value, "must be a whole number >= 1.")
    elif value is not None:
        why = "rounds of tools, and then the answer; in AgentFly the last call's tools run and no message follows"
        draft.set(key, value, "agent.args.max_tool_rounds", value - 1, why)
    else:
        draft.lose(key, value, "an agent without a limit of its own has the context for one")


def minibatch(draft: Draft, key: str, value: Any) -> None:
    """Chains of an optimiser step: AgentFly makes the chains itself, so that verl counts each as a row."""
    tasks, chains = draft.source.get("data.train_batch_size"), _said(draft, "num_chains", 1)
    if not all(isinstance(one, int) and one > 0 for one in (tasks, chains, value)):
        draft.lose(key, value, "chains of an optimiser step, of a batch whose size is not given")
        return
    rows = tasks * chains  # type: ignore[operator]
    count = min(max(rows // value, 1), int(tasks or 1))
    exact = rows % value == 0 and count == rows // value
    why = "" if exact else f"{rows} chains by {value}: here each holds whole groups"
    draft.set(key, value, "learner.minibatches", count, why)


def _said(draft: Draft, key: str, otherwise: Any = None) -> Any:
    layouts = (f"agent.{layout}{key}" for layout in ("run_config.", "init_config.", ""))
    return next((draft.source[name] for name in layouts if name in draft.source), otherwise)


def after(draft: Draft) -> None:
    """What only makes sense together."""
    settings, reward_key = draft.settings, "agent.init_config.reward_name"
    if settings.get("env.name"):
        for path in ("data.path", "data.evaluation_path", "data.question"):
            draft.undo(path, "the environment makes its tasks")
        if not settings.get("tools") and settings.get("agent.name") == "tool":
            draft.set("agent.agent_type", _said(draft, "agent_type"), "agent.name", "chat", "its moves are messages")
        most = _said(draft, "max_turns")
        if isinstance(most, int):
            settings.pop("agent.args.max_tool_rounds", None)
            settings["env.args.max_steps"] = most
            draft.lines = [
                replace(line, kind="mapped", path="env.args.max_steps", ours=most, why="")
                if line.path == "agent.args.max_tool_rounds"
                else line
                for line in draft.lines
            ]
    elif settings.get("agent.name") == "chat" and str(_said(draft, "agent_type")).lower() == "action":
        why = "acts in an environment, and no tool names one. Known: webshop_browser_action."
        draft.refuse("agent.agent_type", "action", why)
    elif settings.get("rewards") == ["env"]:
        draft.refuse(reward_key, "webshop_reward", "is that of an environment, and no tool names one.")
    if "rewards" not in settings:
        draft.refuse(reward_key, None, f"names no reward. Write one of {', '.join(REWARDS)}; or your own with --use.")
    for key in ("max_model_len", "generation_config.max_tokens"):
        if (most := _said(draft, key)) is not None:  # before what verl's own lengths say
            settings["sampling.max_context" if key == "max_model_len" else "sampling.max_tokens"] = int(most)
    if settings.get("agent.name") == "code" and "python" in settings.get("tools", ()):
        draft.undo("tools", "what the code agent runs anyway")


PLAIN: dict[str, Rule] = {
    "agent_type": agent,
    "tools": tools,
    "reward_name": reward,
    "num_chains": num("rollout.group_size"),
    "max_turns": turns,
    "model_name_or_path": to("model.name"),
    "template": template,
    "tool_parser_name": to("agent.tool_format", {"hermes": "hermes", "llama3_json": "llama3", "pythonic": "pythonic"}),
    "backend": idle(ENGINE),
    "use_agent": idle("there is always an agent; agent=chat calls no tools"),
    "system_prompt": to("agent.system"),
    "max_model_len": to("sampling.max_context"),
    "max_concurrent_chains": to("rollout.concurrency"),
    "train_on_last_turn": to("learner.max_samples_per_trajectory", {False: None}),
    "generation_config.max_tokens": to("sampling.max_tokens"),
    "generation_config.temperature": to("sampling.temperature"),
    "generation_config.top_p": to("sampling.top_p"),
    "generation_config.top_k": to("sampling.top_k", lambda k: max(int(k), 0)),
    "context_config.resource_backend": idle("tools and environments run on this machine"),
}
TABLE: dict[str, Rule] = {
    f"agent.{layout}{key}": rule for key, rule in PLAIN.items() for layout in ("", "init_config.", "run_config.")
} | {"actor_rollout_ref.actor.ppo_mini_batch_size": minibatch}
