"""`arborl train --stub`: a few small steps with scripted replies, with stand-ins for what this machine lacks.

Rows that are not there, judges, reward models, tool servers, trackers and environments whose package or data is not
installed are replaced; each replacement is logged.
Mistakes in the configuration stay errors.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborl.config.config_base import validate
from arborl.config.data_config import DataConfig, RowsConfig
from arborl.config.part_config import RewardConfig
from arborl.config.run_config import RunConfig
from arborl.config.tool_config import ToolConfig
from arborl.envs import ENVS, EXTRAS
from arborl.envs.adapters.other_packages import MissingRequirementError
from arborl.errors import ArborError
from arborl.models.model_files import is_model_folder, read_model_config, resolve
from arborl.registry import OBJECT_PREFIX, check_arguments, load
from arborl.rewards import REWARDS
from arborl.rewards.score_function import CODE_SOURCES
from arborl.seeds import derive
from arborl.tools import tool
from arborl.types import Episode

log = logging.getLogger(__name__)

ROWS = 24
STEPS = 3
TASKS = 4
"""Largest number of tasks of a step, and of episodes of a task."""
EVALUATION_TASKS = 8
ENDPOINTS = ("judge", "reward_model")
"""Rewards that need a server or weights."""
SMALL_ROOMS = {"rooms": 2, "doors": 0, "max_steps": 4}
TESTS = [{"input": "3 4", "output": "7"}]
ANSWER, LETTER = "7", "B"
"""The answer to every row, and the one to every row with letters."""
REPLY = "The answer is \\boxed{{{0}}}.\n#### {0}\n<answer>{0}</answer>"
"""A correct reply, in the forms that rewards of the library read."""
WRONG_REPLIES = ("I do not know.", "The answer is 1.")


def stub_run(config: RunConfig, objects: Mapping[str, Any], resuming: bool) -> tuple[RunConfig, dict[str, Any]]:
    """The run with a few small steps, scripted replies and stand-ins, and the objects of its parts."""
    made = dict(objects)
    tree = config.model_dump() | {"stub": True}
    if not config.data.offline:
        tree["engine"] = config.engine.scripted().model_dump()
    tree["trainer"] |= {"steps": min(config.trainer.steps or STEPS, STEPS), "epochs": None, "checkpoint_dir": None}
    tree["demonstrations"] |= {"steps": min(config.demonstrations.steps, 1)}
    for key in ("tasks_per_step", *(() if config.data.offline else ("spare_groups", "group_size"))):
        tree["rollout"][key] = min(getattr(config.rollout, key), TASKS)
    for source in tree["data"]["sources"].values():
        source["evaluation_tasks"] = None
    tree["learner"] |= {"minibatches": 1, "strategy": "single", "ranks": 1, "restarts": 2}
    tree["track"] |= {"top_logprobs": 0, "trackers": ()}
    tree["placement"] = {"name": "local"}
    tree["evaluation"] |= {"tasks": min(config.evaluation.tasks, EVALUATION_TASKS)}
    replaced = [f"track.trackers.{part.name}" for part in config.track.trackers]
    replaced += ["trainer.checkpoint_dir by the run folder"] if config.trainer.checkpoint_dir is not None else []
    replaced += _replace_lengths(config, tree)
    replaced += _replace_models(config, tree)
    rows = list(_replace_rows(config, tree, made))
    if rows and config.env.name == "question" and tree["engine"]["name"] == "scripted" and not tree["engine"]["args"]:
        tree["engine"]["args"] = {"replies": [REPLY.format(ANSWER), REPLY.format(LETTER), *WRONG_REPLIES]}
    replaced += rows
    replaced += _replace_envs(config, tree)
    replaced += _replace_parts(config, tree, made)
    replaced += [] if resuming else _replace_folder(config, tree)
    if replaced:
        log.warning("--stub replaces %s.", ", ".join(replaced))
    return validate(RunConfig, tree), made


def _replace_folder(config: RunConfig, tree: dict[str, Any]) -> Iterator[str]:
    """An `output_dir` that holds a run, or cannot be created here, becomes another folder."""
    folder = config.output_dir
    if folder is None:
        return
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK):
        tree["output_dir"] = None
        yield f"output_dir={folder} by runs/"
    elif folder.is_dir() and any(folder.iterdir()):
        number = 2
        while (other := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        tree["output_dir"] = other
        yield f"output_dir by {other}"


def _replace_lengths(config: RunConfig, tree: dict[str, Any]) -> Iterator[str]:
    """Lengths beyond the positions of the model, which is often smaller than the one that the file is for."""
    model = read_model_config(resolve(config.model.name))
    longest = model.get("max_position_embeddings") or model.get("n_positions")
    if longest is None or config.sampling.max_context <= longest:
        return
    tree["sampling"] |= {"max_context": longest, "max_tokens": min(config.sampling.max_tokens, longest // 4)}
    evaluated = tree["evaluation"]["sampling"]
    if evaluated.get("max_tokens") is not None:
        evaluated["max_tokens"] = min(evaluated["max_tokens"], longest // 4)
    for section in (tree["data"], *tree["data"]["sources"].values()):
        section["max_prompt_tokens"] = min(section["max_prompt_tokens"], longest // 2)
        for key in ("max_tokens", "max_context"):
            if section["sampling"].get(key) is not None:
                section["sampling"][key] = min(section["sampling"][key], longest // (4 if key == "max_tokens" else 1))
    yield f"sampling.max_context by {longest}"


def _replace_models(config: RunConfig, tree: dict[str, Any]) -> Iterator[str]:
    """Precisions that are slow here, and models beside the policy: the policy's own weights in their place."""
    if config.model.dtype in ("bfloat16", "float16"):
        tree["model"]["dtype"] = "auto"
        yield "model.dtype by auto"
    if config.learner.critic_from is not None and not is_model_folder(Path(config.learner.critic_from).expanduser()):
        tree["learner"]["critic_from"] = None
        yield "learner.critic_from"
    teacher = config.algorithm.args.get("teacher")
    if teacher is not None and not is_model_folder(Path(str(teacher)).expanduser()):
        tree["algorithm"]["args"]["teacher"] = config.model.name
        yield f"algorithm.args.teacher by {config.model.name}"


# ------------------------------------------------------------------------------------------------ rows


def _replace_rows(config: RunConfig, tree: dict[str, Any], objects: dict[str, Any]) -> Iterator[str]:
    data = config.data
    for name, source in {"": data, **data.sources}.items():
        section = tree["data"]["sources"][name] if name else tree["data"]
        where = f"data.sources.{name}." if name else "data."
        if source.has_rows and not _are_there(source, objects):
            section |= {"path": None, "hub": None, "rows": _rows_part(objects, name, source, config), "endless": False}
            section |= {"evaluation_path": None, "evaluation_rows": None, "split": "auto"}
            yield f"{where}{'path' if source.files else 'hub' if source.hub else 'rows'}"
        elif not _exist(_files(source.evaluation_path)):
            section["evaluation_path"] = None
            yield f"{where}evaluation_path"
    given = config.demonstrations
    if given.path is not None and not given.path.exists():
        tree["demonstrations"] |= {"path": None, "rows": _rows_part(objects, "demonstrations", data, config)}
        yield "demonstrations.path"


def _are_there(source: DataConfig, objects: Mapping[str, Any]) -> bool:
    if source.rows is not None:
        return source.rows.name in objects or _can_import(source.rows.name)
    if source.hub is not None:
        return Path(source.hub.partition(":")[0]).is_dir()
    return _exist(source.files)


def _files(path: Path | Sequence[Path] | None) -> Sequence[Path]:
    return () if path is None else (path,) if isinstance(path, Path) else path


def _exist(files: Sequence[Path]) -> bool:
    return all(file.exists() for file in files)


def _can_import(name: str) -> bool:
    try:
        load(name, "function")
    except ArborError:
        return False
    return True


def _rows_part(objects: dict[str, Any], name: str, source: DataConfig, config: RunConfig) -> dict[str, Any]:
    label = f"{OBJECT_PREFIX}stub_rows{'_' * bool(name)}{name}"
    labels = list(config.data.sources) if source is config.data and source.by else [name or "openai/gsm8k"]
    letters = {one: _compares_letters(config, one) for one in labels}

    def rows() -> list[dict[str, Any]]:
        chosen = [labels[number % len(labels)] for number in range(ROWS)]
        return [_row(source, number, one, letters[one]) for number, one in enumerate(chosen)]

    objects[label] = rows
    return {"name": label}


def _compares_letters(config: RunConfig, source: str) -> bool:
    """Whether the rewards of a source compare letters, as those of a multiple choice."""
    own = config.data.sources[source].rewards if source in config.data.sources else None
    return any(reward.name == "choice" for reward in own or config.rewards)


def _row(source: RowsConfig, number: int, label: str, is_letter: bool) -> dict[str, Any]:
    """A row with the columns that rewards of the library, and offline algorithms, read."""
    question, answer = f"What is {number + 7} - {number}?", LETTER if is_letter else ANSWER
    truth: Any = {"inputs": ["3 4"], "outputs": ["7"]} if label in CODE_SOURCES else answer
    reply = {"role": "assistant", "content": f"The answer is {answer}."}
    row: dict[str, Any] = {
        source.question: question,
        "prompt": question,
        "answer": truth,
        "data_source": label,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "ground_truth": answer,
        "golden_answers": [answer],
        "document_content": f"{number + 7} - {number} is {answer}. " * 20,
        "tests": TESTS,
        "test_cases": json.dumps(TESTS),
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
        "completion": reply["content"],
        "chosen": reply["content"],
        "rejected": "I do not know.",
        "label": True,
        "extra_info": {"index": number},
    }
    if isinstance(source, DataConfig) and source.by:
        row[source.by] = label
    messages = [{"role": "user", "content": question}, reply]
    for field, path in source.fields.items():
        _put(row, path.split("."), messages if field == "messages" else row.get(field))
    return row


def _put(row: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *above, last = path
    for part in above:
        inner = row.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        row = inner
    row.setdefault(last, value)


# ------------------------------------------------------------------------------------------------ environments


def _replace_envs(config: RunConfig, tree: dict[str, Any]) -> Iterator[str]:
    """Environments that need what this machine does not have: `rooms` in their place, with the same prompt."""
    for name in ("", *config.data.sources):
        env = config.data.sources[name].env if name else config.env
        section, where = (tree["data"]["sources"][name], f"data.sources.{name}.") if name else (tree, "")
        if env is None or env.name not in EXTRAS:
            continue
        try:
            ENVS.build(env.name, env.args, f"{where}env.args")
        except MissingRequirementError as error:
            section["env"] |= {"name": "rooms", "args": SMALL_ROOMS}
            yield f"{where}env.name={env.name} by rooms ({error})"


# ------------------------------------------------------------------------------------------------ rewards and tools


def _replace_parts(config: RunConfig, tree: dict[str, Any], objects: dict[str, Any]) -> Iterator[str]:
    sources = config.data.sources
    for name in ("", *sources):
        section, where = (tree["data"]["sources"][name], f"data.sources.{name}.") if name else (tree, "")
        rewards = sources[name].rewards if name else config.rewards
        tools = sources[name].tools if name else config.tools
        agent = (sources[name].agent if name else None) or config.agent
        for key in ("rewards", "tools"):
            section[key] = list(section[key]) if section[key] is not None else None
        for number, reward in enumerate(rewards or ()):
            if _needs_elsewhere(reward, f"{where}rewards.{number}.args"):
                objects[label := f"{OBJECT_PREFIX}{reward.name}"] = _stub_reward(reward.name)
                section["rewards"][number] |= {"name": label, "args": {}}
                yield f"{where}rewards.{number} ({reward.name})"
        for number, entry in enumerate(tools or ()):
            if not _is_there(entry, agent.tool_args):
                called = (entry.name or "stub_tool").rpartition(":")[2].rpartition(".")[2]
                objects[label := f"{OBJECT_PREFIX}{called}"] = tool(name=called)(_stub_tool)
                section["tools"][number] = {"name": label}
                (section["agent"] or tree["agent"])["tool_args"].pop(entry.name, None)
                yield f"{where}tools.{number} ({entry.name or entry.server or 'mcp'})"


def _needs_elsewhere(part: RewardConfig, where: str) -> bool:
    """Whether a reward needs a server, weights, or a function of a package that is not installed."""
    inner = part.args.get("open") if part.name == "choice" else None
    inner = inner.get("name") if isinstance(inner, Mapping) else inner
    if part.name in ENDPOINTS or inner in ENDPOINTS:
        check_arguments(REWARDS[part.name], part.args, where)
        return True
    return part.name == "score_function" and not _can_import(str(part.args.get("function")))


def _stub_reward(name: str) -> Callable[[Episode], float]:
    """0 or 1 by a hash of the episode, so that groups have variance."""

    def stub_reward(episode: Episode) -> float:
        return float(derive(0, name, episode.id) % 2)

    stub_reward.__name__ = name
    return stub_reward


def _is_there(entry: ToolConfig, tool_args: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a tool needs no server, and its corpus is there."""
    if entry.name is None:
        return False
    corpus = (entry.args | dict(tool_args.get(entry.name, {}))).get("corpus")
    return not isinstance(corpus, str) or Path(corpus).exists()


def _stub_tool(query: str) -> str:
    """Answer with a fixed text.

    Args:
        query: is ignored.
    """
    return f"stub result for {query}"
