"""verl's agent loops, tools and interactions, those of its mixed-training and StateLM forks included.

None of these has a default. One that is not here is refused, with what to do about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from arborl.agents import VERL_AGENT_NAMES
from arborl.config.load_config import check_yaml
from arborl.convert.common_rules import CORPUS, DOCUMENTS
from arborl.convert.conversion_report import KeyReport
from arborl.convert.draft import Draft
from arborl.convert.verl.verl_rewards import rewards
from arborl.convert.verl.verl_rules import A, R, T
from arborl.errors import ConfigError

LOOPS = {
    "SingleTurnAgentLoop": "chat", "ToolAgentLoop": "tool", "StatelmToolAgentLoop": "statelm",
    "CodeExecutionAgentLoop": "code",
}  # fmt: skip
"""Loops of verl and its forks, by class."""
TOOLS = {
    "SandboxFusionTool": "python", "CustomSandboxFusionTool": "python", "Gsm8kTool": "check", "Geo3kTool": "check",
    "SearchTool": "search",
}  # fmt: skip
"""Its tools that have a counterpart, by class."""
SEARCHED = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "searchR1_nq")
"""Sources of questions that are searched for."""
NO_ROUNDS = 64
"""Rounds of an agent whose number verl does not limit."""


def complete(draft: Draft) -> None:
    """Agent, tools, environment and rewards of a run, from all keys together."""
    if is_statelm(draft):
        _statelm(draft)
    else:
        tools = _tools(draft)
        _agent(draft, tools)
        _interaction(draft)
    _code_agents(draft)
    rewards(draft, is_statelm(draft))


# ------------------------------------------------------------------------------------------------ agents


def is_statelm(draft: Draft) -> bool:
    """Whether the script is of StateLM's fork, whose agent edits its own context."""
    if str(draft.known(f"{R}agent.default_agent_loop")) == "statelm_tool_agent":
        return True
    keys = (f"{T}tool_config_path", "--config-name", "custom_reward_function.path")
    named = any("statelm" in Path(str(draft.source.get(key) or "")).name for key in keys)
    return named or any("statelm_tools" in str(tool.get("class_name")) for tool in _listed(draft))


def _agent(draft: Draft, tools: list[Any]) -> None:
    at = f"{R}agent.default_agent_loop"
    loop, several = draft.source.get(at), draft.known(f"{T}enable") is True
    if loop is not None:
        if loop not in VERL_AGENT_NAMES:
            names = ", ".join(VERL_AGENT_NAMES)
            draft.refuse(at, loop, f"no agent is called so here. Known: {names}. Write yours (docs/agents.md).")
            return
        draft.set(at, loop, "agent.name", VERL_AGENT_NAMES[loop])
    elif draft.below("data.mixed_dataset.agent_mapping.") and not tools:
        _say(draft, f"{T}enable", "data.by", draft.settings.get("data.by"), "sources have their own agents")
    elif draft.below(f"{T}tool_config.") and not tools:
        draft.settings["agent.name"] = "code"
        _say(draft, f"{T}enable", "agent.name", "code", "multi_turn.tool_config is of the agent that runs code")
    elif several and not tools and draft.source.get(f"{T}interaction_config_path"):
        draft.set(f"{T}enable", several, "agent.name", "chat", "an interaction answers, and there are no tools")
    elif several or tools:
        draft.set(f"{T}enable", several, "agent.name", "tool")
    if draft.settings.get("agent.name") == "tool":
        if not tools and "data.by" not in draft.settings and not draft.problems:
            file = "Give the file of multi_turn.tool_config_path too: arborl convert verl SCRIPT TOOLS.yaml"
            draft.refuse(f"{T}enable", several, f"a run of many turns, and nothing says with which tools. {file}")
        _rounds(draft, "agent")
        _calls(draft, "agent")
        _results(draft)
    _tools_of_sources(draft, tools)


def _say(draft: Draft, key: str, path: str, ours: Any, why: str = "") -> None:
    """A report line of a key that their files set."""
    if key in draft.source:
        draft.lines.append(KeyReport("changed" if why else "mapped", key, draft.source[key], path, ours, why))


def _rounds(draft: Draft, agent: str) -> None:
    """Messages of the agent, and those that answer it: rounds of tools before the last message."""
    limits = {name: draft.known(f"{T}{name}") for name in ("max_assistant_turns", "max_user_turns")}
    rounds = {
        name: most - (name == "max_assistant_turns")
        for name, most in limits.items()
        if isinstance(most, int) and most > 0
    }
    path = f"{agent}.args.max_tool_rounds"
    least = min(rounds.values(), default=NO_ROUNDS)
    if not rounds:
        draft.default(f"{T}max_assistant_turns", None, path, least, "no limit there but that of the length")
    for name in rounds:
        draft.set(f"{T}{name}", limits[name], path, least)


def _calls(draft: Draft, agent: str) -> None:
    """Number of tool calls of one message that are executed; default: one."""
    key, why = f"{T}max_parallel_calls", "further calls get an error; in verl they get no result"
    if isinstance(at_once := draft.source.get(key, 1), int):
        draft.say(key, at_once, f"{agent}.args.max_calls", at_once, why)


RESULTS = {
    f"{T}max_tool_response_length": (256, "a tool says itself how much of its result is shown: @tool(max_chars=…)"),
    f"{T}tool_response_truncate_side": ("middle", "a result that is too long loses its end, and says so"),
}
"""verl's limits of tool results, with their defaults and what happens here."""


def _results(draft: Draft) -> None:
    for key, (usual, why) in RESULTS.items():
        value, is_set = draft.source.get(key, usual), key in draft.source
        draft.lines.append(KeyReport("lost", key, value, why=why, explicit=is_set))


def _tools_of_sources(draft: Draft, tools: list[Any]) -> None:
    """Tools of sources whose agent calls tools, if no file names them: a search tool for questions."""
    for path in _agents(draft, "tool"):
        if not path.startswith("data.sources."):
            continue
        if not any(line.key in RESULTS for line in draft.lines):
            _results(draft)
        source = path.split(".")[2]
        draft.move(path, f"{path}.name")
        _rounds(draft, path)
        _calls(draft, path)
        if tools:
            continue
        key = f"data.mixed_dataset.agent_mapping.{source}"
        if source in SEARCHED:
            entry = [{"name": "search", "args": dict(CORPUS["search"])}]
            draft.settings[f"data.sources.{source}.tools"] = entry
            _say(draft, key, f"data.sources.{source}.tools", entry, f"no file names its tools: {DOCUMENTS}")
        else:
            why = "its agent calls tools, and nothing says which. Add their file: arborl convert verl SCRIPT TOOLS.yaml"
            draft.refuse(key, "tool_agent", why)


def _agents(draft: Draft, name: str) -> list[str]:
    """Our paths of the agents with this name: of the run, of sources, of `data.agents`."""
    found = []
    for path, value in draft.settings.items():
        base = path.removesuffix(".name")
        is_agent = base == "agent" or base.endswith(".agent") or base.rpartition(".")[0] == "data.agents"
        if is_agent and value == name and path != "name":
            found.append(base)
    return found


def loop_class(draft: Draft, key: str, value: Any) -> None:
    """`agent_loops.NAME._target_`, or an entry of the file of `agent_loop_config_path`."""
    name, _, argument = key.removeprefix("agent_loops.").partition(".")
    if argument == "tool_config_path":
        draft.lose(key, value, "a file of tools of one loop. Add it: arborl convert verl SCRIPT TOOLS.yaml")
        return
    if argument != "_target_":
        draft.lose(key, value, f"an argument of the loop: data.agents.{name}.args has those of our agents")
        return
    ours = draft.uses.get(name) or LOOPS.get(str(value).rpartition(".")[2])
    if ours is None:
        own = "Write one (docs/agents.md: an async function of task, environment and model) and say so"
        draft.refuse(key, value, f"a loop of verl's is no agent here. {own}: --use {name}=package.module:Class.")
    elif VERL_AGENT_NAMES.get(name) == ours and ours != "code":
        draft.skip(key, value, "rows that name it get this agent anyway")
    else:
        draft.set(key, value, f"data.agents.{name}", ours)


def loop_file(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.skip(key, value, "null: verl's own loops")
        return
    entries = read_file(str(value))
    if entries is None:
        draft.refuse(key, value, "the file is not near the script, so the agents are unknown. Put it there.")
        return
    draft.skip(key, value, "read: each loop below")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping) and entry.get("name") not in VERL_AGENT_NAMES:
            loop_class(draft, f"agent_loops.{entry.get('name')}._target_", entry.get("_target_"))


# ------------------------------------------------------------------------------------------------ code agents

TAGS = {
    "code_start_tag": "code_start_tag", "code_end_tag": "code_end_tag", "answer_start_tag": "answer_start_tag",
    "answer_end_tag": "answer_end_tag", "start_state_marker": "result_start_tag", "end_state_marker": "result_end_tag",
}  # fmt: skip
"""Tags of the loop that runs code, and arguments of `agent=code`."""
MARKERS = {"start_state_marker": "<execution_results>", "end_state_marker": "</execution_results>"}
SERVER = {
    "server_url": "http://127.0.0.1:30003", "max_retries": 3, "timeout": 60.0, "max_workers": 10,
    "rate_limit_per_minute": 120.0,
}  # fmt: skip
"""Defaults of its tool client."""
TOOL_CONFIG = (
    *TAGS, *SERVER, "request_interval", "retry_delay", "enable_global_rate_limit", "state_masking", "master_ip",
)  # fmt: skip
PREFIX = "from tools import *\n\n"
"""Text before every code there."""
ONE_LIMIT = "the smaller of rate_limit_per_minute and 60 / request_interval, for all processes together"


def _code_agents(draft: Draft) -> None:
    """Tags and tool server of agents that run code."""
    at, agents = f"{T}tool_config.", _agents(draft, "code")
    given = draft.below(at)
    if not agents:
        for name, value in given.items():
            draft.lose(f"{at}{name}", value, "no agent of the run runs code between tags")
        return
    for path in agents:
        if path in draft.settings:
            draft.move(path, f"{path}.name")
        for name, argument in TAGS.items():
            ours = given.get(name, MARKERS.get(name))
            if ours is not None:
                draft.say(f"{at}{name}", ours, f"{path}.args.{argument}", str(ours))
        _rounds(draft, path)
    if given or "code_execution_agent" in (draft.known(f"{R}agent.default_agent_loop"), *_mapped(draft)):
        _tool_server(draft, at, given, agents)


def _mapped(draft: Draft) -> Iterator[str]:
    yield from map(str, draft.below("data.mixed_dataset.agent_mapping.").values())
    yield from (key.split(".")[1] for key in draft.source if key.startswith("agent_loops."))


def _tool_server(draft: Draft, at: str, given: Mapping[str, Any], agents: list[str]) -> None:
    """The server that runs the code, as a tool of the agents."""
    numbers = {name: given.get(name, usual) for name, usual in SERVER.items()}
    for name in ("max_retries", "timeout", "max_workers", "rate_limit_per_minute", "request_interval"):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            draft.refuse(f"{at}{name}", value, "not a number above 0 that can be read without running the script.")
            return
    interval = given.get("request_interval")
    rate = min(float(numbers["rate_limit_per_minute"]), 60.0 / interval if interval else float("inf"))
    entry = {
        "server": str(numbers["server_url"]), "protocol": "execute", "code_prefix": PREFIX,
        "limit": {"per_minute": rate}, "concurrency": int(numbers["max_workers"]), "timeout": float(numbers["timeout"]),
        "retries": int(numbers["max_retries"]),
    }  # fmt: skip
    paths = ["tools" if path == "agent" or path.startswith("data.agents.") else f"{path.removesuffix('.agent')}.tools"
             for path in agents]  # fmt: skip
    for path in dict.fromkeys(paths):
        draft.settings[path] = [entry]
        draft.say(f"{at}server_url", SERVER["server_url"], path, [entry])
        for name in ("max_retries", "timeout", "max_workers"):
            _say(draft, f"{at}{name}", path, [entry])
        for name in ("rate_limit_per_minute", "request_interval"):
            _say(draft, f"{at}{name}", path, [entry], ONE_LIMIT if interval else "")
    _server_rest(draft, at, given)


def _server_rest(draft: Draft, at: str, given: Mapping[str, Any]) -> None:
    for name, usual, why, off in (
        (
            "enable_global_rate_limit",
            True,
            "limits are shared by all runs of this user on the machine",
            "limits always",
        ),
        ("state_masking", True, "results of tools are never trained on", "results of tools are not part of the loss"),
    ):
        if name in given:
            (draft.skip if given[name] is usual else draft.lose)(
                f"{at}{name}", given[name], why if given[name] else off
            )
    if "retry_delay" in given:
        draft.lose(f"{at}retry_delay", given["retry_delay"], "the waits between attempts are those of the tool client")
    if "master_ip" in given:
        draft.skip(f"{at}master_ip", given["master_ip"], "every process calls the server itself")


# ------------------------------------------------------------------------------------------------ tools


def _listed(draft: Draft) -> list[dict[str, Any]]:
    """The tools of the file that the script names, or of one that was given beside it."""
    found: Any = draft.source.get("tools")
    if found is None and isinstance(path := draft.source.get(f"{T}tool_config_path"), str):
        tree = read_file(path)
        found = tree.get("tools") if isinstance(tree, Mapping) else None
    return [dict(tool) for tool in found if isinstance(tool, Mapping)] if isinstance(found, list) else []


def _tools(draft: Draft) -> list[Any]:
    key = f"{T}tool_config_path"
    path, listed = draft.source.get(key), _listed(draft)
    if path is not None and not listed:
        advice = "Add it: arborl convert verl SCRIPT TOOLS.yaml"
        draft.refuse(key, path, f"the file is not near the script, so the tools are unknown. {advice}")
        return []
    ours: list[Any] = []
    for tool in listed:
        name = str(tool.get("class_name", "")).rpartition(".")[2]
        config = tool.get("config") if isinstance(tool.get("config"), Mapping) else {}
        if name in TOOLS:
            ours.append(_library_tool(draft, f"{key}: {name}", TOOLS[name], _schema(tool), config or {}))
        elif tool.get("mcp") or (config or {}).get("type") == "mcp":
            ours += _servers(draft, key, tool)
        else:
            own = "Write it as a function (docs/tools.md) and name it: tools=[package.module:function]."
            draft.refuse(key, name, f"no such tool here. Take it out of the file. {own}")
    if ours:
        draft.set(key if path is not None else "tools", path, "tools", ours)
    return ours


def _library_tool(draft: Draft, key: str, ours: str, schema: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """A tool of the library in the place of theirs, with the differences."""
    if ours == "check":
        texts = {name: str(schema[name]) for name in ("name", "description") if schema.get(name)}
        draft.set(key, config, "agent.tool_args.check", texts, "it returns right or wrong; in verl a reward")
        return ours
    if ours == "search":
        entry: dict[str, Any] = {"name": "search", "args": dict(CORPUS["search"])}
        if isinstance(workers := config.get("num_workers"), int) and workers > 0:
            entry["concurrency"] = workers
        if isinstance(seconds := config.get("timeout"), int | float) and seconds > 0:
            entry["timeout"] = float(seconds)
        why = f"{DOCUMENTS}; one query a call, by words"
        draft.lines.append(KeyReport("changed", key, dict(config), "tools", entry, why))
        return entry
    why = "code runs in Arbor's own sandbox, not at sandbox_fusion_url; the tool is called `python`"
    draft.lines.append(KeyReport("changed", key, dict(config), "tools", ours, why))
    return ours


def _servers(draft: Draft, key: str, tool: Mapping[str, Any]) -> list[Any]:
    """MCP servers as `{mcp: {url: …}}` or `{mcp: {command: […]}}`."""
    about = tool.get("mcp")
    named = about.get("mcp_servers_config_path") if isinstance(about, Mapping) else None
    tree = read_file(str(named), Path(str(draft.source.get(key) or ".")).parent) if named else None
    servers = tree.get("mcpServers") if isinstance(tree, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        draft.refuse(key, named, "no such file of MCP servers. Take the tool out, and write tools=[{mcp: {url: URL}}].")
        return []
    out: list[Any] = []
    for server in servers.values():
        settings = {name: server[name] for name in ("url", "env") if name in server}
        if server.get("command"):
            settings["command"] = [str(server["command"]), *map(str, server.get("args") or ())]
        out.append({"mcp": settings})
    return out


def read_file(path: str, folder: Path = Path()) -> Any:
    """What a YAML or JSON file holds; None where there is none."""
    file = folder / path
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8", errors="replace")
    check_yaml(text, str(file))
    try:
        return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = tool.get("tool_schema")
    function = schema.get("function") if isinstance(schema, Mapping) else None
    return function if isinstance(function, Mapping) else {}


# ------------------------------------------------------------------------------------------------ interactions

GSM8K = "Your response is incorrect! You need to reflect on your answer and try again."
"""Of verl's Gsm8kInteraction."""


def _interaction(draft: Draft) -> None:
    """verl's Gsm8kInteraction tells the model that it is wrong: attempts of `env=question`. Others are refused."""
    key = f"{T}interaction_config_path"
    path = draft.source.get(key)
    if path is None:
        draft.skip_rest([key], "null: only tools answer")
        return
    own = "Write it as one (docs/environments.md), take this key out, and name it: env=package.module:Class."
    tree = read_file(str(path))
    listed = tree.get("interaction") if isinstance(tree, Mapping) else None
    classes = {str(one.get("class_name")).rpartition(".")[2] for one in listed or () if isinstance(one, Mapping)}
    if classes != {"Gsm8kInteraction"}:
        what = f"of {', '.join(sorted(classes))} " if classes else ""
        draft.refuse(key, path, f"an interaction {what}is an environment here. {own}")
        return
    most = {name: draft.known(f"{T}{name}") for name in ("max_user_turns", "max_assistant_turns")}
    limits = [turns + (name == "max_user_turns") for name, turns in most.items() if isinstance(turns, int)]
    attempts = max(min(limits, default=NO_ROUNDS), 1)
    why = "" if draft.settings.get("agent.name") != "tool" else "there calls of tools count among the turns of the user"
    draft.set(key, path, "env.name", "question")
    draft.set(key, path, "env.args.feedback", GSM8K)
    draft.set(key, path, "env.args.pattern", r"####\s*(-?[0-9.,]+)")
    draft.settings["env.args.attempts"] = attempts
    for name, turns in most.items():
        if isinstance(turns, int):
            draft.set(f"{T}{name}", turns, "env.args.attempts", attempts, why)
    if not limits:
        draft.set(key, path, "env.args.attempts", attempts, "no limit there but that of the length")


# ------------------------------------------------------------------------------------------------ StateLM


def samples(draft: Draft, key: str, value: Any) -> None:
    """Either of StateLM's two keys. They are read together: where one is left out, its default there is not ours."""
    most = draft.source.get(f"{T}max_samples_per_trajectory", 1)
    how = draft.source.get(f"{T}downsample_mode", "last")
    if not isinstance(most, int) or most < 1:
        draft.skip(key, value, "all branches are trained, as here without learner.max_samples_per_trajectory")
    elif draft.source.get(f"{A}policy_loss.loss_mode") in ("gspo", "geo_mean"):
        draft.lose(key, value, "the ratios of this loss are of whole episodes, of which all branches are trained")
    else:
        mode = "last" if how == "last" else "random"
        ours = {"learner.max_samples_per_trajectory": most, "learner.downsample_mode": mode}
        draft.settings |= ours
        path = f"learner.{key.rpartition('.')[2]}"
        draft.set(key, value, path, ours[path])


def _statelm(draft: Draft) -> None:
    key = f"{T}tool_config_path" if f"{T}tool_config_path" in draft.source else f"{T}enable"
    draft.set(key, draft.source.get(key), "agent.name", "statelm")
    listed = [str(_schema(tool).get("name")) for tool in _listed(draft)]
    if listed:
        draft.set(key, draft.source.get(key), "agent.args.toolset", listed)
    for name in ("max_assistant_turns", "min_assistant_turns"):
        if isinstance(turns := draft.source.get(f"{T}{name}"), int):
            draft.set(f"{T}{name}", turns, f"agent.args.{name}", turns)
    draft.settings["rollout.max_turns"] = max(int(draft.settings.get("agent.args.max_assistant_turns", 32)), 32)
    _calls(draft, "agent")
