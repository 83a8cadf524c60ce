"""Counterparts of ROLL's environment types: an environment with its arguments, or a data set with a reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arborl.convert.common_rules import CORPUS, DOCUMENTS, SEARCH_TAGS
from arborl.convert.draft import Draft, as_number


@dataclass(frozen=True, slots=True)
class EnvTag:
    """An environment tag. Its settings are kept under temporary paths until their final path is known.

    Kept are `env`, `args.NAME`, `rows.NAME` (where its tasks are rows), `agent`, `agent_args.NAME`, `tool_args.NAME`,
    `max_steps`, `max_tokens`, `system`, `instruction`, `template` and `pattern`.
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

    def lose(self, key: str, why: str) -> None:
        self.draft.lose(self.at + key, self.keys.get(key), why)

    def skip(self, key: str, why: str) -> None:
        self.draft.skip(self.at + key, self.keys.get(key), why)

    def refuse(self, key: str, why: str, value: Any = None) -> bool:
        self.draft.refuse(self.at + key, self.keys.get(key) if value is None else value, why)
        return False

    def whole(self, key: str) -> int:
        """Its `key` as a whole number; ConfigError otherwise."""
        return round(as_number(self.at + key, self.keys[key]))

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
NATIVE = "the same puzzle; the message of a turn has Arbor's words"
SANDBOX = "the puzzle itself, without their container, which does not say its size: 6 × 6 with one box"
GAMES: dict[str, tuple[str, str, Table]] = {
    "frozen_lake": ("frozen_lake", "", LAKE), "sokoban": ("sokoban", "", SOKOBAN), "webshop": ("shop", MADE, SHOP),
    "sokoban_native_env": ("sokoban", NATIVE, {"num_boxes": ("boxes", 1), "format_penalty": ("format_penalty", -0.1)}),
    "sokoban_sandbox": ("sokoban", SANDBOX, {}),
}  # fmt: skip
"""Their kind, ours, what differs, and the arguments."""
ROOMS = {"sokoban": [10, 10], "sokoban_native_env": [6, 6], "sokoban_sandbox": [6, 6]}
"""Sizes of rooms by default."""
UNREAD = {
    "env_config.action_pattern": "read with the tag's templates",
    "use_thread_lock": "environments do not wait for one another here",
    "max_env_step_concurrent": "rollout.concurrency bounds the episodes in flight",
    "agent_runner_cls": "none",
    "env_config.max_steps": "the tag's own max_steps is what ends an episode",
    "env_config.observation_mode": "pages are text",
    "env_config.seed": "one seed decides the run",
    "env_config.base_url": "no service is needed",
    "env_config.server_start_timeout": "no service is needed",
    "pre_step_template": "only the manager for images reads it",
    "next_step_template": "only the manager for images reads it",
    "history_length": "only managers of steps read it",
}
"""Keys of a tag that need no counterpart."""
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
    "sokoban_mcp": "the same puzzle behind an MCP server. Write env_type: sokoban for the puzzle itself",
    "sokoban_tool_call": "the same puzzle with moves as tool calls. Write env_type: sokoban for moves as text",
    "rock_tb_native_env": "tasks in containers of the ROCK service, which is not here",
    "openreward_env": "tasks of the OpenReward service, which is not here",
    "atropos_env": "environments of the package Atropos, which is not here",
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
            file = str(tag.keys["env_config.file_path"])
            folder = file.rpartition("/")[0] or "." if file.endswith(".json") else file
            why = "the folder of the file, with its attributes and instructions" if folder != file else ""
            tag.set("env_config.file_path", "args.data", folder, why)
        return kind not in ROOMS or _room(tag, ROOMS[kind])
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
    named = [name for name in ("max_steps", key) if tag.keys.get(name) is not None]
    most = tag.whole(named[0]) if named else None
    if most is not None and key in named:
        why = "" if tag.whole(key) == most else "the tag's own max_steps, which is what ends an episode there"
        tag.set(key, "args.max_steps", most, why)
    elif most is not None:
        tag.default("max_steps", most, "args.max_steps", most)
    _instruction(tag, _signs(tag))


CELLS = {
    "frozen_lake": ("player", "ice", "hole", "goal", "player_in_hole", "player_on_goal"),
    "sokoban": ("wall", "floor", "target", "box_on_target", "box", "player", "player_on_target"),
}
"""Our names of cells, in the order of their numbers in `grid_lookup`."""


def _signs(tag: EnvTag) -> dict[str, str]:
    """The signs of cells: `grid_lookup`. `grid_vocab` has the words for them in the rules."""
    cells = CELLS.get(str(tag.get("env")), ())
    lookup = {key: str(sign) for key, sign in tag.keys.items() if key.startswith("env_config.grid_lookup.")}
    by_number = {key.rpartition(".")[2]: sign for key, sign in lookup.items()}
    signs = {cell: by_number[str(number)] for number, cell in enumerate(cells) if str(number) in by_number}
    for key in tag.keys:
        name = key.removeprefix("env_config.").partition(".")[0]
        if key in lookup and signs:
            tag.set(key, "args.symbols", signs)
        elif name in ("grid_lookup", "grid_vocab", "action_lookup", "map_lookup") and tag.keys[key] is None:
            tag.skip(key, "null: not given")
        elif name == "grid_vocab" and signs:
            tag.set(key, "args.symbols", signs, "the rules name the cells in Arbor's words")
        elif name in ("grid_lookup", "grid_vocab", "map_lookup"):
            tag.lose(key, "the board has Arbor's signs and words: env.args.symbols")
        elif name == "action_lookup" and str(tag.keys[key]) in MOVES:
            tag.skip(key, "moves have these names here")
        elif name == "action_lookup":
            tag.lose(key, f"moves are called {', '.join(MOVES)}")
    return signs


MOVES = ("Left", "Down", "Right", "Up")


def _instruction(tag: EnvTag, signs: Mapping[str, str]) -> None:
    """Rules in their words. ROLL adds signs and moves to them."""
    key = "env_config.env_instruction"
    text, kind = tag.keys.get(key), str(tag.get("env"))
    if text is None:
        return
    if kind not in CELLS:
        tag.set(key, "instruction", str(text))
        return
    from arborl.envs.games import frozen_lake, sokoban

    usual = {"frozen_lake": frozen_lake.SYMBOLS, "sokoban": sokoban.SYMBOLS}[kind]
    cells = ", ".join(f"{sign} {cell.replace('_', ' ')}" for cell, sign in {**usual, **signs}.items())
    ours = f"{text}\nOn the board: {cells}.\nMoves: {', '.join(MOVES)}."
    tag.set(key, "instruction", ours, "with signs and moves in Arbor's words")


def _room(tag: EnvTag, usual: list[int]) -> bool:
    key = "env_config.dim_room"
    room = tag.keys.get(key, usual)
    if not isinstance(room, list) or len(room) != 2 or room[0] != room[1] or not isinstance(room[0], int):
        return tag.refuse(key, "rooms are square here. Write dim_room: [N, N].")
    tag.take(key, room, "args.size", room[0])
    tag.default("env_config", "the outer wall is shown", "args.border", True)
    if "env_config.search_depth" in tag.keys:
        why = "puzzles are made by pulling boxes, and solved to be sure; see env.args.pulls"
        tag.lose("env_config.search_depth", why)
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
    key = "tool_wrapper.wrapper_args.max_tool_uses"
    if tag.keys.get(key) is not None and tag.get("agent"):
        tag.set(key, "agent_args.max_tool_rounds", tag.whole(key))
    for name in ("tool_reward", "tool_success_reward"):
        key = f"tool_wrapper.wrapper_args.{name}"
        if key in tag.keys:
            worth = "a tool call is worth nothing by itself here; add a reward of your own to rewards"
            (tag.lose if tag.keys[key] else tag.skip)(key, worth if tag.keys[key] else "0, as here")
    return True
