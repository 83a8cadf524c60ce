"""Counterparts of ROLL's environment types: an environment with its arguments, or a data set with a reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arborl.convert.common_rules import CORPUS, DOCUMENTS, SEARCH_TAGS
from arborl.convert.draft import Draft


@dataclass(frozen=True, slots=True)
class EnvTag:
    """An environment tag. Its settings are kept under temporary paths until their final path is known.

    Kept are `env`, `args.NAME`, `rows.NAME` (where its tasks are rows), `agent`, `agent_args.NAME`, `tool_args.NAME`,
    `max_steps`, `max_tokens`, `system`, `template` and `pattern`.
    """

    draft: Draft
    name: str
    keys: Mapping[str, Any]
    """Its keys in ROLL."""

    @property
    def at(self) -> str:
        return f"custom_envs.{self.name}."

    def kept(self, what: str) -> str:
        return f"@{self.name}|{what}"

    def set(self, key: str, what: str, ours: Any, why: str = "") -> None:
        """Their `key` is `what` here."""
        self.draft.set(self.at + key, self.keys.get(key), self.kept(what), ours, why)

    def default(self, key: str, value: Any, what: str, ours: Any) -> None:
        """What they do without `key`."""
        self.draft.default(self.at + key, value, self.kept(what), ours)

    def take(self, key: str, otherwise: Any, what: str, ours: Any) -> None:
        """`set` if the tag has `key`, else `default`."""
        if self.keys.get(key) is not None:
            self.set(key, what, ours)
        else:
            self.default(key, otherwise, what, ours)

    def drop(self, key: str, why: str) -> None:
        self.draft.drop(self.at + key, self.keys.get(key), why)

    def skip(self, key: str, why: str) -> None:
        self.draft.skip(self.at + key, self.keys.get(key), why)

    def refuse(self, key: str, why: str, value: Any = None) -> bool:
        self.draft.refuse(self.at + key, self.keys.get(key) if value is None else value, why)
        return False

    def get(self, what: str) -> Any:
        return self.draft.settings.get(self.kept(what))

    @property
    def everything(self) -> dict[str, Any]:
        """All that is kept, by what it is."""
        start = self.kept("")
        return {key.removeprefix(start): value for key, value in self.draft.settings.items() if key.startswith(start)}

    @property
    def who(self) -> str:
        """The agent that plays it, to be compared."""
        return repr({key: value for key, value in sorted(self.everything.items()) if key.startswith("agent")})


LAKE = {
    "size": ("size", 4),
    "p": ("frozen", 0.8),
    "is_slippery": ("slippery", True),
    "format_penalty": ("format_penalty", 0.0),
}
SOKOBAN = {"num_boxes": ("boxes", 4), "format_penalty": ("format_penalty", 0.0)}
SHOP = {"num_products": ("products", 1000), "human_goals": ("human", False), "format_penalty": ("format_penalty", 0.0)}
Table = Mapping[str, tuple[str, Any]]
"""Their argument, ours, and what they do without it."""
MADE = "products are made, 1,000 of them; env_config.file_path (env.args.data) names WebShop's own"
GAMES: dict[str, tuple[str, str, Table]] = {
    "frozen_lake": ("frozen_lake", "", LAKE), "sokoban": ("sokoban", "", SOKOBAN), "webshop": ("shop", MADE, SHOP),
}  # fmt: skip
"""Their kind, ours, what differs, and the arguments."""
UNREAD = {
    "action_pattern": "read with the tag's templates",
    "use_thread_lock": "environments do not wait for one another here",
    "max_env_step_concurrent": "rollout.concurrency bounds the episodes in flight",
    "agent_runner_cls": "none",
    "max_steps": "the tag's own max_steps is what ends an episode",
    "env_instruction": "the environment says its own rules; env.prompt says the rest",
    "observation_mode": "pages are text",
    "seed": "one seed decides the run",
}
SHOWN = "what the model sees is drawn in our own signs and words"
BOXED = "compared by rule, number by number, and not by math_verify's symbols"
ROWS = {
    "math": ("equal", BOXED), "roll_math": ("equal", BOXED), "eval": ("equal", BOXED),
    "qa": ("qa", ""), "roll_qa": ("qa", ""), "logic": ("qa", ""),
    "code": ("code_tests", "run in our sandbox; tests are read as docs/tools.md says"),
    "roll_code": ("code_tests", "run in our sandbox; tests are read as docs/tools.md says"),
}  # fmt: skip
"""The reward of a dataset's answers, and what differs."""
QA = {
    "name": "short_answer",
    "args": {"match": "exact", "wrong": 0.0, "invalid": 0.0, "exceeded": 0.0, "too_few_turns": 0.0},
}
REMEDIES = {
    "sokoban_sandbox": "the same puzzle behind a service. Write env_type: sokoban for the puzzle itself",
    "sokoban_mcp": "the same puzzle behind an MCP server. Write env_type: sokoban for the puzzle itself",
    "sokoban_tool_call": "the same puzzle with moves as tool calls. Write env_type: sokoban for moves as text",
    "sokoban_native_env": "the same puzzle in another layout of messages. Write env_type: sokoban and env_manager_cls: "
    "…StepEnvManager for steps with a history",
    "rock_tb_native_env": "tasks in containers of the ROCK service, which is not here",
    "openreward_env": "tasks of the OpenReward service, which is not here",
    "atropos_env": "tasks of an Atropos server, which is not here",
    "deepeyes": "questions about images, and models see text only here",
    "cli_env": "tasks at a command line behind a service, which is not here",
}


def fill(tag: EnvTag, ours: str | None) -> bool:
    """Say what the tag is here. False where it is nothing, which has been refused."""
    kind = str(tag.keys.get("env_type") or "")
    family, _, game = kind.partition(":")
    if not kind:
        return tag.refuse("env_type", "is not there. Write the kind of environment.")
    if ours is not None:
        tag.set("env_type", "env", ours, "as --use says; its arguments are handed on as they are")
        for key, value in tag.keys.items():
            if key.startswith("env_config."):
                tag.set(key, f"args.{key.removeprefix('env_config.')}", value)
        return True
    if kind in GAMES:
        name, why, arguments = GAMES[kind]
        tag.set("env_type", "env", name, why)
        _take(tag, arguments)
        if kind == "webshop" and tag.keys.get("env_config.file_path") is not None:
            tag.set("env_config.file_path", "args.data", tag.keys["env_config.file_path"])
        return kind != "sokoban" or _room(tag)
    if family == "game" and game:
        why = "TextArena's game, whose words and rewards are not GEM's; needs pip install 'arborl[textarena]'"
        name = {"TowerofHanoi-v0": "TowerOfHanoi-v0"}.get(game, game)
        return _named(tag, "textarena", "game", name, "kwargs", why)
    if family == "rg" and game:
        why = "tasks are drawn anew, and are not some of one seed; needs pip install 'arborl[reasoning_gym]'"
        return _named(tag, "reasoning_gym", "dataset", game, "config", why)
    if family in ROWS:
        return _dataset(tag, family)
    known = ", ".join([*GAMES, "game:…", "rg:…", "math:…", "qa:…", "code:…"])
    remedy = REMEDIES.get(kind, f"no such environment here. Known: {known}")
    own = f"Or write one of your own (docs/environments.md) and say so: --use {kind}=package.module:Class."
    return tag.refuse("env_type", f"{remedy}. {own}")


def _named(tag: EnvTag, env: str, by: str, name: str, inside: str, why: str) -> bool:
    tag.set("env_type", "env", env, why)
    tag.set("env_type", f"args.{by}", name)
    for key, value in tag.keys.items():
        last = key.removeprefix("env_config.")
        if last == key:
            continue
        if inside == "config" and last in ("size", "seed"):
            tag.skip(key, "tasks are drawn from the run's seed")
        else:
            tag.set(key, f"args.{inside}.{last}", value)
    return True


def _take(tag: EnvTag, table: Table) -> None:
    """Arguments with a counterpart, theirs or what they do without; an episode's turns are bounded alike in both."""
    for theirs, (ours, otherwise) in table.items():
        key = f"env_config.{theirs}"
        tag.take(key, otherwise, f"args.{ours}", otherwise if tag.keys.get(key) is None else tag.keys[key])
    key = "env_config.max_steps"
    most = tag.keys.get("max_steps", tag.keys.get(key))
    if most is not None and key in tag.keys:
        why = "" if int(tag.keys[key]) == int(most) else "the tag's own max_steps, which is what ends an episode there"
        tag.set(key, "args.max_steps", int(most), why)
    elif most is not None:
        tag.default("max_steps", int(most), "args.max_steps", int(most))
    for name in tag.keys:
        if name.startswith(SIGNS):
            tag.drop(name, SHOWN)


SIGNS = tuple(f"env_config.{name}" for name in ("grid_lookup", "grid_vocab", "action_lookup", "map_lookup"))


def _room(tag: EnvTag) -> bool:
    key = "env_config.dim_room"
    room = tag.keys.get(key, [10, 10])
    if not isinstance(room, list) or len(set(room)) != 1:
        return tag.refuse(key, "rooms are square here. Write dim_room: [N, N].")
    tag.take(key, room, "args.size", int(room[0]))
    if "env_config.search_depth" in tag.keys:
        why = "puzzles are made by pulling boxes, and solved to be sure; see env.args.pulls"
        tag.drop("env_config.search_depth", why)
    return True


def _dataset(tag: EnvTag, family: str) -> bool:
    """Questions with answers: rows, a reward, and tools where a wrapper gives some."""
    reward, why = ROWS[family]
    name, split = tag.keys.get("env_config.dataset_name"), tag.keys.get("env_config.split")
    if not name:
        return tag.refuse("env_config.dataset_name", "names no dataset. Write dataset_name: OWNER/NAME.")
    tag.set("env_config.dataset_name", "rows.hub", f"{name}::{split}" if split else str(name))
    if split:
        tag.set("env_config.split", "rows.hub", f"{name}::{split}")
    usual = "problem" if family in ("math", "roll_math") else "question"
    question, answer = tag.keys.get("env_config.question_key"), tag.keys.get("env_config.answer_key")
    tag.take("env_config.question_key", usual, "rows.question", question or usual)
    if answer:
        tag.set("env_config.answer_key", "rows.fields.answer", answer)
    chosen: Any = QA if reward == "qa" else reward
    if reward == "code_tests":
        chosen = {"name": "code_tests", "args": {"field": tag.keys.get("env_config.test_key") or "tests"}}
    tag.set("env_type", "rows.rewards", [chosen], why)
    return _tools(tag)


def _tools(tag: EnvTag) -> bool:
    key = "tool_wrapper.tool_configs"
    uses, tools = tag.draft.uses, []
    for one in tag.keys.get(key) or []:
        tool = str(one.get("tool_id")) if isinstance(one, Mapping) else str(one)
        if tool == "python_code":
            tag.set(key, "agent", "code", "code between <code> and </code>, run in our sandbox")
        elif tool in uses:
            tools.append(uses[tool])
        elif tool == "search":
            tag.set(key, "agent", "code", "queries between <search> and </search>")
            tag.set(key, "rows.tools", ["search"])
            for name, text in SEARCH_TAGS.items():
                tag.set(key, f"agent_args.{name}", text)
            for name, value in CORPUS["search"].items():
                tag.set(key, f"tool_args.search.{name}", value, DOCUMENTS)
        else:
            own = f"Write one of your own (docs/tools.md) and say so: --use {tool}=package.module:function."
            return tag.refuse(key, f"no such tool here. Known: python_code, search. {own}", tool)
    if tools:
        tag.set(key, "rows.tools", tools, "as --use says")
        tag.set(key, "agent", "tool")
    most = tag.keys.get("tool_wrapper.wrapper_args.max_tool_uses")
    if most is not None and tag.get("agent"):
        tag.set("tool_wrapper.wrapper_args.max_tool_uses", "agent_args.max_tool_rounds", int(most))
    for name in ("tool_reward", "tool_success_reward"):
        key = f"tool_wrapper.wrapper_args.{name}"
        if key in tag.keys:
            worth = "a tool call is worth nothing by itself here; add a reward of your own to rewards"
            (tag.drop if tag.keys[key] else tag.skip)(key, worth if tag.keys[key] else "0, as here")
    return True
