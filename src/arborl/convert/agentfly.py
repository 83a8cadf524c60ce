"""AgentFly's keys beside verl's, as of its first and its later layout (`agent.init_config`, `agent.run_config`)."""

from __future__ import annotations

from typing import Any

from arborl.convert.draft import Draft, Rule, no, to
from arborl.convert.verl import ENGINE, turns

AGENTS = {"hf": "tool", "react": "react", "code": "code", "think": "tool", "openai": "tool"}
TOOLS = {
    "calculator": "calculator", "code_interpreter": "python", "answer": "answer", "answer_math": "answer",
    "answer_qa": "answer", "search": "search", "google_search": "search", "dense_retrieve": "retrieve",
    "async_dense_retrieve": "retrieve", "summarize": "",
}  # fmt: skip
REWARDS: dict[str, Any] = {
    "math_reward_string_equal": "equal", "math_string_equal_reward_tool": "equal", "math_equal_reward": "equal",
    "math_equal_reward_tool": "equal", "math_reward": "equal", "qa_em_reward": "exact",
    "qa_f1_reward": {"name": "short_answer", "args": {"match": "f1", "wrong": 0.0, "invalid": 0.0}},
    "code_reward_test": "code_tests",
}  # fmt: skip


def tools(draft: Draft, key: str, value: Any) -> None:
    names = value if isinstance(value, list) else [name.strip() for name in str(value).strip("[]").split(",")]
    known = [TOOLS[name] for name in names if TOOLS.get(name)]
    for name in names:
        if not TOOLS.get(name):
            draft.drop(key, name, "no such tool here; name your own as package.module:function")
    if known:
        draft.set(key, value, "tools", known)


def reward(draft: Draft, key: str, value: Any) -> None:
    if value in REWARDS:
        draft.set(key, value, "rewards", [REWARDS[value]])
    else:
        draft.drop(key, value, "no such reward here; name your own as rewards=[package.module:function]")


def model(draft: Draft, key: str, value: Any) -> None:
    draft.set(key, value, "model.name", value)


PLAIN: dict[str, Rule] = {
    "agent_type": to("agent.name", AGENTS),
    "tools": tools,
    "reward_name": reward,
    "num_chains": to("rollout.group_size"),
    "max_turns": turns,
    "model_name_or_path": model,
    "template": no("a model brings its own chat template"),
    "tool_parser_name": to("agent.tool_format", {"hermes": "hermes", "llama3_json": "llama3", "pythonic": "pythonic"}),
    "backend": no(ENGINE),
    "use_agent": no("there is always an agent; agent=chat calls no tools"),
    "system_prompt": to("agent.system"),
    "max_model_len": to("sampling.max_context"),
    "max_concurrent_chains": to("rollout.concurrency"),
}
TABLE: dict[str, Rule] = {
    f"agent.{layout}{key}": rule for key, rule in PLAIN.items() for layout in ("", "init_config.", "run_config.")
}
