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
MADE = "its moves are messages, and its products are made; env.args.data names WebShop's own"
ALFWORLD = "its moves are messages; needs pip install 'arborl[alfworld]', and the games of alfworld-download"
SCIENCEWORLD = "its moves are messages; needs pip install 'arborl[scienceworld]', and Java"
CHESS = "its moves are messages, and a wrong move ends the puzzle; needs pip install 'arborl[chess]'"
ENVIRONMENTS = {
    "webshop_browser": ("shop", MADE),
    "webshop_browser_action": ("shop", MADE),
    "alfworld_step": ("alfworld", ALFWORLD),
    "scienceworld_explorer": ("scienceworld", SCIENCEWORLD),
    "chess_move": ("chess", CHESS),
}
"""Tools that are an environment's moves: the environment, and what differs."""
AT_ONCE = {"alfworld": 8, "scienceworld": 48, "chess": 8}
"""Their numbers of concurrent environments, `max_global_num`."""
ENV_ARGS: dict[str, dict[str, Any]] = {"scienceworld": {"tasks": [], "simplifications": ""}}
"""Their settings of an environment that no key has."""
STATE_TOOLS = {
    "alfworld_get_task_objective": "the first observation has the task",
    "chess_get_state": "every observation has the board; the message `board` shows it again",
    "chess_get_legal_moves": "the message `moves` lists them",
}
"""Tools that only read the state of an environment, and what replaces them."""
COMMANDS_TOOL = "alfworld_get_admissible_commands"
ROWS = {
    "alfworld": "rows select games by task_id; the text of the episode is the game's",
    "scienceworld": "rows select tasks by task_name and variation_idx; the text of the episode is the simulator's",
    "chess": "rows have the puzzles, in fen and moves; the text of the episode is the environment's",
}
"""Environments whose tasks are AgentFly's rows."""
ELSEWHERE = {
    "alfworld_reset": "an episode has one game, and starts it",
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
    "alfworld_episode_reward": ("env", ""),
    "scienceworld_reward": (
        {"name": "env", "weight": 10.0},
        "10 for a finished task, also after fewer than 4 messages",
    ),
    "chess_puzzle_reward_simple": ("env", ""),
    "chess_puzzle_reward": ("env", "as it is documented: moves are judged in the position in which they were made"),
}
"""Theirs, ours, and what differs."""
ENV_REWARDS = (
    "webshop_reward",
    "alfworld_episode_reward",
    "scienceworld_reward",
    "chess_puzzle_reward",
    "chess_puzzle_reward_simple",
)
REWARD_ARGS: dict[str, dict[str, Any]] = {
    "scienceworld_reward": {"env.args.intermediate": False},
    "chess_puzzle_reward": {"env.args.dense": True, "env.args.engine": "stockfish"},
}
"""What a reward needs of its environment."""


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
            ours, why = ENVIRONMENTS[name]
            draft.set(key, name, "env.name", ours, why)
            for argument, content in ENV_ARGS.get(ours, {}).items():
                draft.set(key, name, f"env.args.{argument}", content)
        elif ours is None and name in (*STATE_TOOLS, COMMANDS_TOOL):
            _query_tool(draft, key, name)
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


def _query_tool(draft: Draft, key: str, name: str) -> None:
    """A tool that reads the state of an environment: not needed, or a setting adds its answer to every observation."""
    if str(_source_value(draft, "agent_type")).lower() == "action":
        draft.skip(key, name, "the action agent calls its first tool only")
    elif name in STATE_TOOLS:
        draft.skip(key, name, STATE_TOOLS[name])
    else:
        draft.set(key, name, "env.args.list_actions", True, "every observation lists the commands")


def reward(draft: Draft, key: str, value: Any) -> None:
    name = str(value).lower()
    if name in draft.uses:
        draft.set(key, value, "rewards", [draft.uses[name]], "as --use says")
    elif name in REWARDS:
        ours, why = REWARDS[name]
        draft.set(key, value, "rewards", [ours], why)
        for path, content in REWARD_ARGS.get(name, {}).items():
            draft.set(key, value, path, content)
    else:
        own = f"Write one of your own (docs/tools.md) and say so: --use {name}=package.module:function."
        draft.refuse(key, value, f"no such reward here. Known: {', '.join(REWARDS)}. {own}")


DATA = ("data.path", "data.evaluation_path")
ACTION = r"(?i)<action>\s*(.*?)\s*</action>"
OBSERVATION = "<observation>{observation}</observation>"
FAMILY = re.compile(r"qwen\d(?:\.\d)?|llama-?\d(?:\.\d)?|glm-\d|phi-\d|deepseek|nemotron")
"""Beginnings of AgentFly's templates that are a model's own."""


def template(draft: Draft, key: str, value: Any) -> None:
    """A chat template by name: the model's own, or another one, which is not kept."""
    name, model = str(value).lower(), str(_source_value(draft, "model_name_or_path") or draft.known(f"{M}path")).lower()
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


def length(path: str) -> Rule:
    """A number of tokens. A variable that the script does not set has no number."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if isinstance(value, int) and value > 0:
            draft.set(key, value, path, value)
        else:
            draft.lose(key, value, f"no number of tokens, so {path} is not written")

    return rule


def minibatch(draft: Draft, key: str, value: Any) -> None:
    """Chains of an optimiser step: AgentFly makes the chains itself, so that verl counts each as a row."""
    tasks, chains = draft.source.get("data.train_batch_size"), _source_value(draft, "num_chains", 1)
    if not all(isinstance(one, int) and one > 0 for one in (tasks, chains, value)):
        draft.lose(key, value, "chains of an optimiser step, of a batch whose size is not given")
        return
    rows = tasks * chains  # type: ignore[operator]
    count = min(max(rows // value, 1), int(tasks or 1))
    exact = rows % value == 0 and count == rows // value
    why = "" if exact else f"{rows} chains by {value}: here each holds whole groups"
    draft.set(key, value, "learner.minibatches", count, why)


def _key(draft: Draft, key: str) -> str:
    """Their name of `key`, in the layout that the script uses; empty where it does not set it."""
    layouts = (f"agent.{layout}{key}" for layout in ("run_config.", "init_config.", ""))
    return next((name for name in layouts if name in draft.source), "")


def _source_value(draft: Draft, key: str, otherwise: Any = None) -> Any:
    return draft.source.get(_key(draft, key), otherwise)


def _rows(draft: Draft, env: str) -> None:
    """Rows select the tasks of some environments; others make theirs."""
    if env in ROWS:
        draft.default("max_global_num", AT_ONCE[env], "rollout.concurrency", AT_ONCE[env])
        if isinstance(context := _source_value(draft, "max_model_len"), int):
            why = "rows are not the prompts, so the context is the only limit"
            draft.say("data.max_prompt_length", 512, "data.max_prompt_tokens", context, why)
        draft.lines = [replace(one, kind="changed", why=ROWS[env]) if one.path in DATA else one for one in draft.lines]
    else:
        for path in (*DATA, "data.question"):
            draft.undo(path, "the environment makes its tasks")


def _action_tags(draft: Draft, env: str) -> None:
    """What the action agent reads between its tags, and what its template writes around observations."""
    kind = _source_value(draft, "agent_type")
    if str(kind).lower() != "action" or env not in ROWS:
        return
    why = "a reply without it is an illegal command; there it ends the episode"
    draft.set(_key(draft, "agent_type"), kind, "env.prompt.action_pattern", ACTION, why)
    if system := _source_value(draft, "system_prompt"):
        why = "it describes the commands, so the environment's own rules are left out"
        draft.set(_key(draft, "system_prompt"), system, "env.prompt.instruction", "", why)
    if _source_value(draft, "template") == "action-agent":
        why = "the first observation too; the chat template is the model's own"
        draft.lines = [line for line in draft.lines if not line.key.endswith(".template")]
        draft.set(_key(draft, "template"), "action-agent", "env.prompt.observation", OBSERVATION, why)


def after(draft: Draft) -> None:
    """What only makes sense together."""
    settings, reward_key = draft.settings, "agent.init_config.reward_name"
    if env := settings.get("env.name"):
        _rows(draft, env)
        if not settings.get("tools") and settings.get("agent.name") in ("tool", "react"):
            draft.lines = [line for line in draft.lines if line.path != "agent.name"]
            kind = _source_value(draft, "agent_type")
            draft.set(_key(draft, "agent_type"), kind, "agent.name", "chat", "its moves are messages")
        _action_tags(draft, env)
        most = _source_value(draft, "max_turns")
        if isinstance(most, int):
            settings.pop("agent.args.max_tool_rounds", None)
            settings["env.args.max_steps"] = most
            draft.lines = [
                replace(line, kind="mapped", path="env.args.max_steps", ours=most, why="")
                if line.path == "agent.args.max_tool_rounds"
                else line
                for line in draft.lines
            ]
    elif settings.get("agent.name") == "chat" and str(_source_value(draft, "agent_type")).lower() == "action":
        why = f"acts in an environment, and no tool names one. Known: {', '.join(ENVIRONMENTS)}."
        draft.refuse("agent.agent_type", "action", why)
    elif str(_source_value(draft, "reward_name")).lower() in ENV_REWARDS and settings.get("rewards"):
        draft.refuse(
            reward_key, _source_value(draft, "reward_name"), "is that of an environment, and no tool names one."
        )
    if "rewards" not in settings:
        draft.refuse(reward_key, None, f"names no reward. Write one of {', '.join(REWARDS)}; or your own with --use.")
    for key in ("max_model_len", "generation_config.max_tokens"):
        if isinstance(most := _source_value(draft, key), int):  # takes precedence over verl's own lengths
            settings["sampling.max_context" if key == "max_model_len" else "sampling.max_tokens"] = most
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
    "max_model_len": length("sampling.max_context"),
    "max_concurrent_chains": to("rollout.concurrency"),
    "train_on_last_turn": to("learner.max_samples_per_trajectory", {False: None}),
    "generation_config.max_tokens": length("sampling.max_tokens"),
    "generation_config.temperature": to("sampling.temperature"),
    "generation_config.top_p": to("sampling.top_p"),
    "generation_config.top_k": to("sampling.top_k", lambda k: max(int(k), 0)),
    "context_config.resource_backend": idle("tools and environments run on this machine"),
}
TABLE: dict[str, Rule] = {
    f"agent.{layout}{key}": rule for key, rule in PLAIN.items() for layout in ("", "init_config.", "run_config.")
} | {"actor_rollout_ref.actor.ppo_mini_batch_size": minibatch}
