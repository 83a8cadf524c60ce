"""Keys and values out of Hydra's YAML: `defaults` composed, `${…}` filled in, later files and overrides over earlier
ones. Nothing is imported or run, and no variable of the environment is read."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from arborl.config.bounds import MAX_DEPTH, bounded, check_yaml
from arborl.convert.reading import read
from arborl.errors import ConfigError

YAML = (".yaml", ".yml")
ENVIRONMENT = re.compile(r"\$\{\s*(?:oc\.)?env:\s*'?(\w+)'?\s*(?:,\s*([^{}]*?)\s*)?\}")
STAND_IN = re.compile("⟦environment (\\w+)⟧")
OVERRIDE = re.compile(r"[+]{0,2}([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)")


@dataclass(slots=True)
class Collected:
    """What files say, all of them together."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Dotted, each with its value; lists are values."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Of scripts."""
    referred: set[str] = field(default_factory=set)
    """Sections and keys at the top that some `${…}` leads to."""
    environment: dict[str, str] = field(default_factory=dict)
    """Keys that depend on a variable of the environment, with its name."""
    absent: list[tuple[str, str]] = field(default_factory=list)
    """Files of a `defaults` list that are not there: the file that names it, and what it looks for."""


def collect(files: Sequence[Path], plain_keys: bool = False, absent: bool = False) -> Collected:
    """Read files in order, later ones over earlier ones; then fill in references, so that what a later file changes
    reaches all that refers to it.

    Args:
        files: YAML, or scripts and lists of overrides.
        plain_keys: an assignment without a dot in a list of overrides (`max_steps=10`) is a key too.
        absent: go on where a file of a `defaults` list is missing, and keep account of it.

    Example:
        collect([Path("agent_val_frozen_lake.yaml")]).keys["train_env_manager.group_size"]      # 8
    """
    from omegaconf import OmegaConf

    out = Collected()
    if not any(file.suffix in YAML for file in files):
        for file in files:
            keys, variables = ({}, {}) if plain_keys else read(file)
            out.keys |= overrides(file) if plain_keys else keys
            out.variables |= variables
        return out
    beside: dict[str, Any] = {}
    tree: Any = OmegaConf.create({})
    with bounded():
        for file in files:
            if file.suffix in YAML:
                tree = OmegaConf.merge(tree, OmegaConf.create(_without_environment(_composed(file, absent, out))))
                continue
            keys, variables = (overrides(file), {}) if plain_keys else read(file)
            out.variables |= variables
            for key, value in keys.items():
                if not _update(tree, key, _without_environment(value)):
                    beside[key] = value
        raw = OmegaConf.to_container(tree, resolve=False)
        out.referred = {name for text in _texts(raw) for name in REFERENCE.findall(text)}
        _flatten(tree, "", out, 0)
    out.keys |= beside
    return out


def overrides(file: Path) -> dict[str, Any]:
    """A list of overrides, one or more a line; keys may have no dot.

    Example:
        max_steps=10 actor_train.training_args.learning_rate=1e-5
    """
    found = {}
    for number, line in enumerate(_text(file).splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{file}: line {number}: cannot read {line[:60]!r}: {error}") from error
        for word in words:
            if match := OVERRIDE.fullmatch(word):
                found[match[1]] = _scalar(match[2])
    return found


def _scalar(text: str) -> Any:
    from omegaconf._utils import get_yaml_loader

    try:
        return yaml.load(text, Loader=get_yaml_loader())
    except yaml.YAMLError:
        return text


def _text(file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"{file}: no such file.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not a text file.") from error


def _composed(file: Path, absent: bool, out: Collected) -> dict[str, Any]:
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
        with warnings.catch_warnings(), initialize_config_dir(str(file.resolve().parent), version_base=None):
            warnings.simplefilter("ignore")  # without `_self_` the file itself comes last and wins, as they rely on
            tree = OmegaConf.to_container(compose(file.name), resolve=False)
    except MissingConfigException as error:
        if not absent:
            raise ConfigError(
                f"{file}: its defaults name {error.missing_cfg_file!r}, and there is no such file. Give the file where "
                "it lies in their repository, with the folders beside it; or write what it takes from there into it."
            ) from error
        out.absent.append((str(file), str(error.missing_cfg_file)))
        return {key: value for key, value in own.items() if key != "defaults"}
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from error
    finally:
        GlobalHydra.instance().hydra = before
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _own(file: Path) -> dict[str, Any]:
    text = _text(file)
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


def _flatten(node: Any, above: str, out: Collected, depth: int) -> None:
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


def _plain(value: Any, path: str, out: Collected, depth: int) -> Any:
    from omegaconf import DictConfig, ListConfig

    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}: its ${{…}} contain themselves.")
    if isinstance(value, DictConfig):
        return {str(key): _plain(_value(value, key), path, out, depth + 1) for key in value}
    if isinstance(value, ListConfig):
        return [_plain(_value(value, index), path, out, depth + 1) for index in range(len(value))]
    if isinstance(value, str) and (found := STAND_IN.search(value)):
        out.environment[path] = found[1]
        return STAND_IN.sub(r"${oc.env:\1}", value)
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
