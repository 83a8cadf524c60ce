"""All files of a conversion: later ones over earlier ones, `defaults` composed, `${…}` resolved.

Nothing is imported or run, and no environment variable is read.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from arborl.config.load_config import MAX_DEPTH, bounded_yaml, check_yaml
from arborl.convert.reading.training_scripts import (
    PIPELINE,
    SHELL,
    ScriptSettings,
    near,
    overrides,
    read,
    read_pipeline,
    read_text,
)
from arborl.errors import ConfigError

YAML = (".yaml", ".yml")
ENVIRONMENT = re.compile(r"\$\{\s*(?:oc\.)?env:\s*'?(\w+)'?\s*(?:,\s*([^{}]*?)\s*)?\}")
PLACEHOLDER = re.compile("⟦environment (\\w+)⟧")
REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)")
FILES = re.compile(r".*(?:config_path|custom_reward_function\.path)")
"""Keys that name a file which belongs to the others."""
MAX_MISSING = 20
PLACEHOLDER_DEPTH = 5
"""Steps up (`../`) that a missing file of a `defaults` list may have."""


@dataclass(slots=True)
class SourceKeys:
    keys: dict[str, Any] = field(default_factory=dict)
    """Dotted, each with its value; lists are values."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Of scripts."""
    referred: set[str] = field(default_factory=set)
    """Sections and keys at the top that some `${…}` leads to."""
    environment: dict[str, str] = field(default_factory=dict)
    """Keys that depend on a variable of the environment, with its name."""
    mentions_trainer: bool = False
    """Whether a script mentions the trainer."""
    absent: list[tuple[str, str]] = field(default_factory=list)
    """Files of a `defaults` list that are not there: the file that names it, and what it looks for."""


def collect(files: Sequence[Path], plain_keys: bool = False, absent: re.Pattern[str] | None = None) -> SourceKeys:
    """Read files in order, later ones over earlier ones; then fill in references, so that what a later file changes
    reaches all that refers to it.

    Args:
        plain_keys: whether keys of override lists may have no dot.
        absent: names of files of a `defaults` list that need not be there.
    """
    out = SourceKeys()
    files_read = list(_read_files(files, plain_keys))
    for _, script in files_read:
        out.variables |= script.variables if script else {}
        out.mentions_trainer |= bool(script and script.mentions_trainer)
    if all(script for _, script in files_read):
        for _, script in files_read:
            assert script is not None
            out.keys = _without(out.keys, script.removed) | script.settings
    else:
        _merge(files_read, absent, out)
    if not plain_keys:
        _locate(out.keys, files)
    return out


# ------------------------------------------------------------------------------------------------ whose file it is


ROLL_KEYS = frozenset(
    {"actor_train", "actor_infer", "train_env_manager", "sft_train", "student_pretrain", "student_train"}
)
TEXTS = {
    "roll": re.compile(r"(?m)^[^#\n]*start_\w+_pipeline\.py\b"),
    "agentfly": re.compile(r"(?m)^[^#\n]*\bagent\.(?:agent_type|init_config)\b"),
    "verl": re.compile(r"(?m)^[^#\n]*(?:\bactor_rollout_ref\.|\bverl\.trainer\b)"),
}
"""What scripts and override lists of a system have in a line that is no comment; the first that is found counts."""
IMPORTS = {
    "trl": re.compile(r"(?m)^\s*(?:from|import)\s+trl\b"),
    "stateset": re.compile(r"(?m)^\s*(?:from|import)\s+stateset_agents\b"),
}


def system_of(file: Path) -> str | None:
    """The system that a file was written for: `roll`, `verl`, `agentfly`, `trl` or `stateset`; None where unknown."""
    try:
        text = read_text(file)
        if file.suffix in YAML:
            check_yaml(text, str(file))
            return _system_of_keys(yaml.safe_load(text))
    except (ConfigError, yaml.YAMLError, OSError, ValueError, RecursionError):
        return None
    signs = IMPORTS if file.suffix == ".py" else TEXTS
    return next((name for name, sign in signs.items() if sign.search(text)), None)


def _system_of_keys(tree: Any) -> str | None:
    if not isinstance(tree, Mapping):
        return None
    agent = tree.get("agent")
    if isinstance(agent, Mapping) and {"agent_type", "init_config"} & agent.keys():
        return "agentfly"
    if "actor_rollout_ref" in tree:
        return "verl"
    return "roll" if ROLL_KEYS & tree.keys() or {"exp_name", "pretrain"} <= tree.keys() else None


# ------------------------------------------------------------------------------------------------ files


def _read_files(files: Sequence[Path], plain_keys: bool) -> Iterator[tuple[Path, ScriptSettings | None]]:
    """Files in order, each script after the configuration that it names; None stands for YAML."""
    for file in files:
        if file.suffix in YAML:
            yield file, None
            continue
        if not plain_keys:
            script = read(file)
        elif file.suffix in SHELL or any(map(PIPELINE.search, read_text(file).splitlines())):
            script = read_pipeline(file)
        else:
            script = ScriptSettings(overrides(read_text(file), str(file)))
        if script.config is not None:
            yield script.config, None
        yield file, script


def _merge(
    files_read: Sequence[tuple[Path, ScriptSettings | None]], absent: re.Pattern[str] | None, out: SourceKeys
) -> None:
    """Merge YAML and overrides into one tree, so that references see the last value."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    beside: dict[str, Any] = {}
    tree: Any = OmegaConf.create({})
    with bounded_yaml():
        for file, script in files_read:
            if script is None:
                own = _without_environment(_composed(file, absent, out))
                try:
                    tree = OmegaConf.merge(tree, OmegaConf.create(own))
                except OmegaConfBaseException as error:
                    where = _clash(own, OmegaConf.to_container(tree, resolve=False))
                    why = "keys in one file, and a list in another: write it alike in both."
                    raise ConfigError(f"{file}: {where or 'a section'} has {why}") from error
                continue
            for key in script.removed:
                _remove(tree, key)
            beside = _without(beside, script.removed)
            for key, value in script.settings.items():
                if not _update(tree, key, _without_environment(value)):
                    beside[key] = value
        raw = OmegaConf.to_container(tree, resolve=False)
        out.referred = {name for text in _texts(raw) for name in REFERENCE.findall(text)}
        _flatten(tree, "", out, 0)
    out.keys |= beside


def _clash(one: Any, other: Any, above: str = "") -> str:
    """The first key that has keys in one tree and a list in the other; empty where there is none."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return above if {isinstance(one, list), isinstance(other, list)} == {True, False} else ""
    both = (key for key in one if key in other)
    return next((found for key in both if (found := _clash(one[key], other[key], f"{above}.{key}".lstrip(".")))), "")


def _without(keys: dict[str, Any], removed: Sequence[str]) -> dict[str, Any]:
    gone = tuple(f"{key}." for key in removed)
    return {key: value for key, value in keys.items() if key not in removed and not key.startswith(gone)}


def _remove(tree: Any, key: str) -> None:
    above, _, last = key.rpartition(".")
    from omegaconf import DictConfig, OmegaConf

    node = OmegaConf.select(tree, above, throw_on_resolution_failure=False) if above else tree
    if isinstance(node, DictConfig) and last in node:
        del node[last]


def _locate(keys: dict[str, Any], files: Sequence[Path]) -> None:
    """Put the paths where they are in place of names of files that belong to these."""
    for key, value in keys.items():
        if isinstance(value, str) and FILES.fullmatch(key):
            keys[key] = next((str(found) for file in reversed(files) if (found := near(file, value))), value)


def _composed(file: Path, absent: re.Pattern[str] | None, out: SourceKeys) -> dict[str, Any]:
    """The file with its `defaults` list, as Hydra composes them, references as they are written."""
    own = _own(file)
    own.pop("hydra", None)
    if "defaults" not in own:
        return own
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    hydra = GlobalHydra.instance()
    before, hydra.hydra = hydra.hydra, None
    try:
        with (
            tempfile.TemporaryDirectory() as temporary,
            warnings.catch_warnings(),
            initialize_config_dir(str(file.resolve().parent), version_base=None),
        ):
            placeholders = Path(temporary, *["deeper"] * PLACEHOLDER_DEPTH)
            placeholders.mkdir(parents=True)
            warnings.simplefilter("ignore")  # without `_self_` the file itself comes last and wins, as they rely on
            for _ in range(MAX_MISSING):
                try:
                    composed = compose(file.name, overrides=[f"hydra.searchpath=[file://{placeholders}]"])
                    break
                except MissingConfigException as error:
                    _write_placeholder(placeholders, file, str(error.missing_cfg_file), absent)
                    out.absent.append((str(file), str(error.missing_cfg_file)))
            else:
                raise ConfigError(f"{file}: more than {MAX_MISSING} files that its defaults name are not there.")
            tree = OmegaConf.to_container(composed, resolve=False)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from error
    finally:
        GlobalHydra.instance().hydra = before
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _write_placeholder(folder: Path, file: Path, name: str, absent: re.Pattern[str] | None) -> None:
    """An empty file in the place of one that is not there, where that may be. `folder` is deep enough for `../`."""
    empty = Path(os.path.normpath(folder / name)).with_suffix(".yaml")
    inside = empty.is_relative_to(folder.parents[PLACEHOLDER_DEPTH - 1])
    if absent is None or not absent.fullmatch(name) or not inside or empty.exists():
        raise ConfigError(
            f"{file}: its defaults name {name!r}, and there is no such file. Give the file at its place in their "
            "repository, with the folders beside it; or write what it takes from there into it."
        )
    empty.parent.mkdir(parents=True, exist_ok=True)
    empty.touch()


def _own(file: Path) -> dict[str, Any]:
    text = read_text(file)
    check_yaml(text, str(file))
    try:
        from omegaconf._utils import get_yaml_loader

        tree = yaml.load(text, Loader=get_yaml_loader())  # a safe loader, which reads 1e-6 as a number
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigError(f"{file}: {place}not valid YAML: {_first_line(error)}") from error
    if not isinstance(tree, Mapping):
        what = "is empty" if tree is None else "must be keys with values (key: value)"
        raise ConfigError(f"{file}: {what}.")
    return dict(tree)


def _without_environment(value: Any) -> Any:
    """The same with a stand-in for each variable of the environment, or with what stands in for it in the file."""
    if isinstance(value, Mapping):
        return {key: _without_environment(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_environment(item) for item in value]
    if not isinstance(value, str):
        return value
    if (whole := ENVIRONMENT.fullmatch(value)) and whole[2] is not None:
        return yaml.safe_load(whole[2]) if whole[2] else ""
    return ENVIRONMENT.sub(lambda m: m[2] if m[2] is not None else f"⟦environment {m[1]}⟧", value)


def _update(tree: Any, key: str, value: Any) -> bool:
    """Set one key; False where what is above it has a value of its own and no keys."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.update(tree, key, value, merge=False, force_add=True)
    except (OmegaConfBaseException, AssertionError, TypeError, ValueError):
        return False
    return True


def _flatten(node: Any, above: str, out: SourceKeys, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{above.rstrip('.')}: its ${{…}} contain themselves.")
    from omegaconf import DictConfig

    for key in node:
        path = f"{above}{key}"
        value = _value(node, key)
        if isinstance(value, DictConfig) and len(value):
            _flatten(value, f"{path}.", out, depth + 1)
            continue
        out.keys[path] = _plain(value, path, out, depth)


def _value(node: Any, key: Any) -> Any:
    """The value with references filled in; where they lead nowhere, as written."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        return node[key]
    except (OmegaConfBaseException, RecursionError):
        raw = node._get_node(key)
        return raw._value() if hasattr(raw, "_value") else str(raw)


def _plain(value: Any, path: str, out: SourceKeys, depth: int) -> Any:
    from omegaconf import DictConfig, ListConfig

    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}: its ${{…}} contain themselves.")
    if isinstance(value, DictConfig):
        return {str(key): _plain(_value(value, key), path, out, depth + 1) for key in value}
    if isinstance(value, ListConfig):
        return [_plain(_value(value, index), path, out, depth + 1) for index in range(len(value))]
    if isinstance(value, str) and (found := PLACEHOLDER.search(value)):
        out.environment[path] = found[1]
        return PLACEHOLDER.sub(r"${oc.env:\1}", value)
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
