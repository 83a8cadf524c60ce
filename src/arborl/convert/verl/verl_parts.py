"""Who plays, with what, and who judges: verl's agent loops, tools and rewards, those of its StateLM fork included.

None of these has a default. One that is not here is refused, with what to do about it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from arborl.agents import VERL_AGENT_NAMES
from arborl.config.load_config import check_yaml
from arborl.convert.conversion_report import KeyReport
from arborl.convert.draft import Draft
from arborl.convert.verl.verl_rules import A, R, T
from arborl.errors import ConfigError

LOOPS = {"SingleTurnAgentLoop": "chat", "ToolAgentLoop": "tool", "StatelmToolAgentLoop": "statelm"}
"""verl's own loops, by class."""
TOOLS = {"SandboxFusionTool": "python", "CustomSandboxFusionTool": "python", "Gsm8kTool": "check", "Geo3kTool": "check"}
"""Its tools that have a counterpart, by class."""
MANAGERS = ("naive", "dapo", "prime", "batch")
NO_MANAGER = "no such manager of rewards here. Name a reward of yours: rewards=[package.module:function]."


def complete(draft: Draft) -> None:
    """Agent, tools and rewards of a run, from all keys together."""
    if is_statelm(draft):
        _statelm(draft)
    else:
        _agent(draft, _tools(draft))
    if not any(line.path == "rewards" for line in draft.lines):
        _reward(draft)


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
    elif several or tools:
        draft.set(f"{T}enable", several, "agent.name", "tool")
    if draft.settings.get("agent.name") == "tool":
        if not tools and "data.by" not in draft.settings and not draft.problems:
            file = "Give the file of multi_turn.tool_config_path too: arborl convert verl SCRIPT TOOLS.yaml"
            draft.refuse(f"{T}enable", several, f"a run of many turns, and nothing says with which tools. {file}")
        most = draft.known(f"{T}max_assistant_turns")
        if isinstance(most, int) and most > 1:
            draft.set(f"{T}max_assistant_turns", most, "agent.args.max_tool_rounds", most - 1)
        _calls(draft)
    _tags(draft)


def _calls(draft: Draft) -> None:
    """Number of tool calls of one message that are executed; default: one."""
    key, why = f"{T}max_parallel_calls", "further calls get an error; in verl they get no result"
    if isinstance(at_once := draft.source.get(key, 1), int):
        draft.say(key, at_once, "agent.args.max_calls", at_once, why)


def _tags(draft: Draft) -> None:
    """Tags of the code agent: of the run, or of some sources."""
    at = f"{T}tool_config."
    tags = {key: value for key, value in draft.source.items() if key.startswith(at) and key.endswith("_tag")}
    if not tags:
        return
    of_sources = [key for key, agent in draft.settings.items() if key.endswith(".agent") and agent == "code"]
    if not of_sources and draft.settings.get("agent.name", "chat") in ("chat", "code"):
        draft.settings["agent.name"] = "code"
    for key, value in tags.items():
        name = key.rpartition(".")[2]
        for where in of_sources:
            draft.set(key, value, f"{where}.args.{name}", value)
        if not of_sources and draft.settings.get("agent.name") == "code":
            draft.set(key, value, f"agent.args.{name}", value)
        elif not of_sources:
            draft.drop(key, value, "the agent calls tools and writes no code between tags")
    for where in of_sources:
        draft.settings[f"{where}.name"] = draft.settings.pop(where)


def loop_class(draft: Draft, key: str, value: Any) -> None:
    """`agent_loops.NAME._target_`, or an entry of the file of `agent_loop_config_path`."""
    name = key.removeprefix("agent_loops.").removesuffix("._target_")
    ours = LOOPS.get(str(value).rpartition(".")[2])
    if ours is None:
        own = "Write one (docs/agents.md: an async function of task, environment and model), take this key out"
        why = f"a loop of verl's is no agent here. {own}, and name yours: data.agents.{name}=package.module:Class."
        draft.refuse(key, value, why)
    else:
        draft.set(key, value, f"data.agents.{name}", ours)


def loop_file(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.skip(key, value, "null: verl's own loops")
        return
    entries = _read(str(value))
    if entries is None:
        draft.refuse(key, value, "the file is not near the script, so the agents are unknown. Put it there.")
        return
    draft.skip(key, value, "read: each loop below")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping) and entry.get("name") not in VERL_AGENT_NAMES:
            loop_class(draft, f"agent_loops.{entry.get('name')}._target_", entry.get("_target_"))


# ------------------------------------------------------------------------------------------------ tools


def _listed(draft: Draft) -> list[dict[str, Any]]:
    """The tools of the file that the script names, or of one that was given beside it."""
    found: Any = draft.source.get("tools")
    if found is None and isinstance(path := draft.source.get(f"{T}tool_config_path"), str):
        tree = _read(path)
        found = tree.get("tools") if isinstance(tree, Mapping) else None
    return [dict(tool) for tool in found if isinstance(tool, Mapping)] if isinstance(found, list) else []


def _tools(draft: Draft) -> list[Any]:
    key = f"{T}tool_config_path"
    path, listed = draft.source.get(key), _listed(draft)
    if path is not None and not listed:
        advice = "Add it: arborl convert verl SCRIPT TOOLS.yaml"
        draft.refuse(key, path, f"the file is not near the script, so the tools are unknown. {advice}")
        return []
    ours = []
    for tool in listed:
        name = str(tool.get("class_name", "")).rpartition(".")[2]
        config = tool.get("config") if isinstance(tool.get("config"), Mapping) else {}
        if name in TOOLS:
            ours.append(TOOLS[name])
            _library_tool(draft, f"{key}: {name}", TOOLS[name], _schema(tool), config)
        elif tool.get("mcp") or (config or {}).get("type") == "mcp":
            ours += _servers(draft, key, tool)
        elif name == "SearchTool":
            own = "take this tool out of the file, and write tools=[search] and agent.tool_args.search.corpus=FILE."
            why = "a search service of its own. Here `search` and `retrieve` look into a corpus of yours"
            draft.refuse(key, name, f"{why}: {own}")
        else:
            own = "Write it as a function (docs/tools.md) and name it: tools=[package.module:function]."
            draft.refuse(key, name, f"no such tool here. Take it out of the file. {own}")
    if ours:
        draft.set(key if path is not None else "tools", path, "tools", ours)
    return ours


def _library_tool(draft: Draft, key: str, ours: str, schema: Mapping[str, Any], config: Any) -> None:
    """A tool of the library in the place of theirs, with the differences."""
    if ours == "check":
        texts = {name: str(schema[name]) for name in ("name", "description") if schema.get(name)}
        draft.set(key, config, "agent.tool_args.check", texts, "it returns right or wrong; in verl a reward")
    else:
        why = "code runs in Arbor's own sandbox, not at sandbox_fusion_url; the tool is called `python`"
        draft.lines.append(KeyReport("changed", key, config, "tools", ours, why))


def _servers(draft: Draft, key: str, tool: Mapping[str, Any]) -> list[Any]:
    """MCP servers as `{mcp: {url: …}}` or `{mcp: {command: …}}`."""
    about = tool.get("mcp")
    named = about.get("mcp_servers_config_path") if isinstance(about, Mapping) else None
    tree = _read(str(named), Path(str(draft.source.get(key) or ".")).parent) if named else None
    servers = tree.get("mcpServers") if isinstance(tree, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        draft.refuse(key, named, "no such file of MCP servers. Take the tool out, and write tools=[{mcp: {url: URL}}].")
        return []
    out: list[Any] = []
    for server in servers.values():
        settings = {name: server[name] for name in ("url", "command", "args", "env") if name in server}
        if "args" in settings and "command" in settings:
            settings["command"] = " ".join([str(settings["command"]), *map(str, settings.pop("args"))])
        out.append({"mcp": settings})
    return out


def _read(path: str, folder: Path = Path()) -> Any:
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


# ------------------------------------------------------------------------------------------------ rewards


def _reward(draft: Draft) -> None:
    """One's own function; else what verl itself does with each `data_source`."""
    path, name = draft.source.get("custom_reward_function.path"), draft.source.get("custom_reward_function.name")
    if path is not None:
        args: dict[str, Any] = {"function": f"{Path(str(path)).stem}:{name or 'compute_score'}"}
        more = draft.below("custom_reward_function.reward_kwargs.")
        made_of = [{"name": "score_function", "args": args | ({"kwargs": more} if more else {})}]
        why = f"put {Path(str(path)).parent} on PYTHONPATH"
        draft.set("custom_reward_function.path", path, "rewards", made_of, why)
        return
    key = "reward_model.reward_manager"
    if draft.known(key) not in MANAGERS:
        draft.refuse(key, draft.known(key), NO_MANAGER)
    else:
        draft.say(key, draft.known(key), "rewards", [{"name": "data_source"}])


def manager(draft: Draft, key: str, value: Any) -> None:
    """The newer name of `reward_model.reward_manager`."""
    if value not in MANAGERS:
        draft.refuse(key, value, NO_MANAGER)
    else:
        draft.skip(key, value, "rewards are functions; see rewards")


def reward_model(draft: Draft, key: str, value: Any) -> None:
    """A sequence classifier of one label that scores the conversation; rules are not used then."""
    path = draft.known("reward_model.model.path")
    if not value:
        draft.skip(key, value, "rewards are functions")
    elif path is None:
        draft.refuse(key, value, "reward_model.model.path does not say which. Write it into the script.")
    else:
        made = [{"name": "reward_model", "args": {"path": str(path)}}]
        draft.set(key, value, "rewards", made, "a classifier of one label; one that generates is rewards=[judge]")


# ------------------------------------------------------------------------------------------------ StateLM


def samples(draft: Draft, key: str, value: Any) -> None:
    """Either of StateLM's two keys. They are read together: where one is left out, its default there is not ours."""
    most = draft.source.get(f"{T}max_samples_per_trajectory", 1)
    how = draft.source.get(f"{T}downsample_mode", "last")
    if not isinstance(most, int) or most < 1:
        draft.skip(key, value, "all branches are trained, as here without learner.max_samples_per_trajectory")
    elif draft.source.get(f"{A}policy_loss.loss_mode") == "gspo":
        draft.drop(key, value, "the ratios of gspo are of whole episodes, of which all branches are trained")
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
    _calls(draft)
    _statelm_reward(draft)


def _statelm_reward(draft: Draft) -> None:
    """The fork's scorer of letters. Open answers are judged by a model there, which is another reward here."""
    key = "custom_reward_function.path"
    path = draft.source.get(key)
    if path is None or Path(str(path)).stem not in ("statelm_qa", "mcq"):
        return
    args: dict[str, Any] = {}
    for theirs, ours in (("exceed_length_penalty", "exceeded"), ("below_min_turns_reward", "too_few_turns")):
        if isinstance(value := draft.source.get(f"{T}{theirs}"), int | float):
            draft.set(f"{T}{theirs}", value, f"rewards.0.args.{ours}", float(value))
            draft.settings.pop(f"rewards.0.args.{ours}")
            args[ours] = float(value)
    if Path(str(path)).stem == "mcq":
        args |= {"wrong": 0.0, "invalid": 0.0}
    why = "for answers that are a letter; open answers, which a model judges there, are rewards=[judge]"
    draft.set(key, path, "rewards", [{"name": "choice", "args": args}], why)


def _schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = tool.get("tool_schema")
    function = schema.get("function") if isinstance(schema, Mapping) else None
    return function if isinstance(function, Mapping) else {}
