"""Load a `RunConfig` from a file, `a.b=c` overrides or Python keywords.

Hydra composes the file with its `defaults` list and the config groups beside it; overrides are applied in order. YAML
is bounded in size, depth and aliases before it is built. All errors are `ConfigError`.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from arborl.config.algorithm_config import PRESETS, AlgorithmConfig
from arborl.config.config_base import (
    Config,
    expand_shorthand,
    item_model,
    section_model,
    setting_paths,
    to_plain,
    validate,
)  # fmt: skip
from arborl.config.run_config import RunConfig, folder_name
from arborl.config.secrets import require_unmasked
from arborl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

ALIASES = {"steps": "trainer.steps"}
"""Short keys, in Python, files and overrides, and the keys they set."""


def load(file: Path | None = None, overrides: Sequence[str] = (), unset: str | None = None) -> RunConfig:
    """Load the configuration of a run.

    Args:
        file: a YAML file; None for the defaults.
        overrides: `key=value`, also for keys that are not in the file; `~key` removes a key. A bare name for a section
            sets its `name`; a new name drops the `args` of the file, and a new algorithm the settings of the former
            preset. If a folder of YAML files beside the file has the name of the key, `key=value` selects one of
            them, as in Hydra. `trainer.steps` replaces `trainer.epochs` of the file, and the reverse.
        unset: value of environment variables that are not set; None: an error.

    Example:
        load(Path("run.yaml"), ["env=frozen_lake", "env.args.size=6", "learner.lr=3e-4"])
    """
    return load_with_variables(file, overrides, unset)[0]


def load_with_variables(
    file: Path | None = None, overrides: Sequence[str] = (), unset: str | None = None
) -> tuple[RunConfig, list[str]]:
    """`load`, and the names of the environment variables that `${oc.env:NAME}` read."""
    from omegaconf import OmegaConf

    file = file.expanduser().absolute() if file is not None else None
    parsed = [_parse_override(_long_key(text)) for text in overrides]
    groups = [override for override in parsed if file is not None and _selects_group(file.parent, override)]
    with _config_errors(file), bounded_yaml(unset) as variables:
        tree = _compose(_check_file(file), groups) if file is not None else OmegaConf.create({})
        for short in ALIASES.keys() & tree.keys():
            tree[ALIASES[short]] = tree.pop(short)
        _expand_names(tree)
        _expand_dotted(tree, RunConfig)
        _drop_other_length(tree, {override.key_or_group for override in parsed})
        for override in parsed:
            if override not in groups:
                _expand_names(tree)
                _apply(tree, override)
        data = _resolved(tree)
    require_unmasked(data, f"{file}: " if file is not None else "")
    if file is not None and not data.get("name"):
        data["name"] = folder_name(file.parent.name if file.stem in ("run", "config", "train") else file.stem)
    return validate(RunConfig, data), list(dict.fromkeys(variables))


def load_yaml(file: Path) -> Any:
    """Load another YAML file as plain data, with the same bounds and errors."""
    from omegaconf import OmegaConf

    with _config_errors(file), bounded_yaml():
        return _resolved(OmegaConf.load(_check_file(file.expanduser())))  # type: ignore[arg-type]


def from_kwargs(**kwargs: Any) -> RunConfig:
    """`RunConfig` from Python keywords: nested dicts, dotted names and the short forms of a file.

    Example:
        from_kwargs(model="seedling", data="train.json", agent="tool", steps=50, **{"learner.lr": 3e-4})
    """
    tree: dict[str, Any] = {}
    for key in sorted(kwargs, key=lambda key: key.count(".")):  # sections before their keys
        _place(tree, RunConfig, ALIASES.get(key, key), kwargs[key])
    return validate(RunConfig, tree)


def find_setting(name: str) -> str | None:
    """The setting that a command-line option was probably meant as: `save-every` is `trainer.save_every`."""
    name = ALIASES.get(name, name.replace("-", "_"))
    all_paths = list(setting_paths(RunConfig))
    matches = [path for path in all_paths if path.rpartition(".")[2] == name]
    return name if name in all_paths else matches[0] if len(matches) == 1 else None


def parse_value(text: str) -> Any:
    """Parse the value of an override: `1e-4`, `[4, 8]`, `true`."""
    return _parse_override(f"value={text}").value()


def format_override(key: str, value: str | float | bool | None) -> str:
    """The override that sets `key` to this value: `learner.lr=0.0001`, `name="a b"`."""
    if value is None or isinstance(value, bool):
        return f"{key}={'null' if value is None else str(value).lower()}"
    if not isinstance(value, str):
        return f"{key}={value!r}"
    if re.fullmatch(r"[A-Za-z_/][\w./:@-]*", value, re.ASCII) and parse_value(value) == value:
        return f"{key}={value}"
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    ended = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'{key}="{ended}"'


def _place(tree: dict[str, Any], model: type[Config] | None, key: str, value: Any, above: str = "") -> None:
    """Set the dotted `key` to `value`; two different values for one key are an error."""
    head, _, rest = key.partition(".")
    path = f"{above}{head}"
    inner = section_model(model, head) if model else None
    if isinstance(value, Config):
        value = value.model_dump(exclude_unset=True)
    if rest:
        value = {rest: value}
    elif inner:
        value = expand_shorthand(inner, value)
    if isinstance(value, Mapping) and (rest or inner):
        branch = tree.setdefault(head, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"{path}: given twice, as {branch!r} and with {', '.join(map(str, value))}.")
        for name, item in value.items():
            _place(branch, inner, str(name), item, f"{path}.")
    elif head in tree and tree[head] != value:
        raise ConfigError(f"{path}: given twice, as {tree[head]!r} and {value!r}. Keep one.")
    else:
        tree[head] = copy.deepcopy(value) if isinstance(value, dict) else value


# ------------------------------------------------------------------------------------------------ YAML files


def _check_file(path: Path) -> Path:
    """The path, if it is a YAML file."""
    if not path.is_file():
        raise ConfigError(_no_file_message(path))
    if path.suffix != ".yaml":
        raise ConfigError(f"{path}: a configuration file ends in .yaml. Rename it to {path.stem}.yaml.")
    return path


def _no_file_message(path: Path) -> str:
    if path.is_dir():
        what = f"{path}: is a folder, not a file."
    elif not path.parent.is_dir():
        what = f"{path}: no such file; there is no folder {path.parent}."
    else:
        what = f"{path}: no such file."
    folder = path if path.is_dir() else path.parent
    there = sorted(file.stem for file in folder.glob("*.yaml")) if folder.is_dir() else []
    if near := difflib.get_close_matches(path.stem, there, n=3, cutoff=0.5):
        what += f" Near it: {', '.join(f'{stem}.yaml' for stem in near)}."
    elif there:
        what += f" There: {', '.join(f'{stem}.yaml' for stem in there[:5])}."
    if not path.suffix or path.name.split(".")[0] in RunConfig.model_fields:
        what += f" A setting is written {path.name}=VALUE."
    return what


def _compose(path: Path, groups: Sequence[Override]) -> DictConfig:
    """Compose the file, its `defaults` list and the selected config groups; Hydra's global state is restored."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig, OmegaConf

    tree = OmegaConf.load(path)
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: must be keys with values (key: value), not a list.")
    if "hydra" in tree:
        raise ConfigError(f"{path}: hydra: unknown key. Only the `defaults` list is for Hydra; remove it.")
    hydra = GlobalHydra.instance()
    before, hydra.hydra = hydra.hydra, None
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(path.parent), version_base="1.3"):
            # without `_self_` the file itself comes last and takes precedence
            warnings.filterwarnings("ignore", message=".*_self_")
            tree = compose(path.name, _group_overrides(path.name, groups))
    finally:
        GlobalHydra.instance().hydra = before
    OmegaConf.set_struct(tree, False)
    return tree


def _selects_group(folder: Path, override: Override) -> bool:
    """Whether the override selects from a config group: a folder of YAML files beside the file."""
    group = folder / override.key_or_group
    return not isinstance(override.value(), dict) and group.is_dir() and any(group.glob("*.yaml"))


def _group_overrides(name: str, groups: Sequence[Override]) -> list[str]:
    """The overrides in Hydra's notation: a group that is not in the `defaults` list needs a `+`."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    if not groups:
        return []
    listed = GlobalHydra.instance().config_loader().compute_defaults_list(name, [], RunMode.RUN).defaults
    known = {default.override_key for default in listed}
    lines = {override.get_key_element().lstrip("+"): str(override.input_line).lstrip("+") for override in groups}
    return [text if text.startswith("~") or key in known else f"+{text}" for key, text in lines.items()]


# ------------------------------------------------------------------------------------------------ overrides


def _long_key(text: str) -> str:
    """The override with the key that a short one stands for: `steps=50` is `trainer.steps=50`."""
    key, equals, value = text.partition("=")
    return f"{ALIASES.get(key.lstrip('+'), key)}{equals}{value}"


def _parse_override(text: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    key, equals, value = text.partition("=")
    if not key.strip("+~ ") or not (equals or text.startswith("~")):
        key = key.strip("+~ ") or "key"
        raise ConfigError(f"{text!r} is not a setting. Write {key}={value or 'VALUE'}.")
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except OverrideParseException as error:
        raise ConfigError(f"cannot read the value of {text!r}. Put it in quotes: '{key}=\"{value}\"'.") from error
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} holds several values. Write a list, {key}=[{value}], or one value.")
    return override


def _expand_names(tree: DictConfig, above: type[Config] = RunConfig) -> None:
    """Expand every bare name in `tree` to its section, so that overrides can set its keys."""
    from omegaconf import DictConfig, ListConfig

    for key in list(tree):
        if model := section_model(above, str(key)):
            if model.shorthand and isinstance(_raw(tree, key), str) and isinstance(tree[key], str):
                tree[key] = {model.shorthand: _raw(tree, key)}
            elif isinstance(_raw(tree, key), dict) and isinstance(tree[key], DictConfig):
                _expand_names(tree[key], model)
        elif (model := item_model(above, str(key))) and isinstance(tree[key], ListConfig):
            for index, item in enumerate(tree[key]):
                if isinstance(item, str):
                    tree[key][index] = {model.shorthand: _raw(tree[key], index)}


def _expand_dotted(tree: DictConfig, model: type[Config], above: str = "") -> None:
    """Expand dotted keys: `learner.lr: 1` is `learner: {lr: 1}`. Different values for one key are an error."""
    from omegaconf import DictConfig, OmegaConf

    for key in [key for key in tree if isinstance(key, str) and key.partition(".")[0] in model.model_fields]:
        if "." not in key:
            inner = section_model(model, key)
            if inner is not None and isinstance(tree[key], DictConfig):
                _expand_dotted(tree[key], inner, f"{above}{key}.")
            continue
        value = _raw(tree, key)
        tree.pop(key)
        before = OmegaConf.select(tree, key)
        if before not in (None, value):
            raise ConfigError(f"{above}{key}: given twice, as {before!r} and {value!r}. Keep one.")
        OmegaConf.update(tree, key, value, merge=True, force_add=True)


def _raw(node: Any, key: Any) -> Any:
    """The value before interpolation."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]


def _apply(tree: DictConfig, override: Override) -> None:
    """Set or delete one key of `tree`. `+` and `++` have no effect."""
    from omegaconf import Container, DictConfig, OmegaConf

    key, value, text = override.key_or_group, override.value(), override.input_line
    above, _, last = key.rpartition(".")
    parts = key.split(".")
    for depth in range(1, len(parts)):
        upper = ".".join(parts[:depth])
        node = OmegaConf.select(tree, upper)
        if node is not None and not isinstance(node, Container):
            raise ConfigError(f"{text!r}: {upper} is {node!r}, which has no keys inside.")
    if override.package is not None:
        raise ConfigError(f"{text!r}: no folder {key!r} of YAML files is beside the configuration file.")
    if override.is_delete():
        parent = OmegaConf.select(tree, above) if above else tree
        if not isinstance(parent, Container) or last not in parent:
            raise ConfigError(f"{text!r}: {key} is not set, so it cannot be removed.")
        del parent[last]
        return
    whole, around = _section_at(key), _section_at(above)
    model, place = (whole, key) if whole else (around, above) if around and last == around.shorthand else (None, "")
    if model and model.shorthand and isinstance(value, str):
        before = OmegaConf.select(tree, place)
        if isinstance(before, DictConfig) and before.get(model.shorthand) not in (None, value):
            _drop_part_settings(before, model)
        key = f"{place}.{model.shorthand}"
    OmegaConf.update(tree, key, value, merge=True, force_add=True)


def _drop_other_length(tree: DictConfig, overridden: set[str]) -> None:
    """`trainer.steps` in an override replaces `trainer.epochs` of the file, and the reverse."""
    from omegaconf import DictConfig

    trainer = tree.get("trainer")
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        if (
            isinstance(trainer, DictConfig)
            and f"trainer.{given}" in overridden
            and f"trainer.{other}" not in overridden
        ):
            trainer.pop(other, None)


def _section_at(path: str) -> type[Config] | None:
    """The model of the section at a dotted path."""
    model: type[Config] | None = RunConfig
    for part in path.split("."):
        model = section_model(model, part) if model else None
    return model


def _drop_part_settings(before: DictConfig, model: type[Config]) -> None:
    """Remove the arguments of the former part, or the settings of the former algorithm's preset.

    The `config.yaml` of a run contains all settings of its preset; they would override those of the new one.
    """
    from omegaconf import OmegaConf

    before.pop("args", None)
    if model is AlgorithmConfig and before.get("name") in PRESETS:
        written = OmegaConf.to_container(before)
        assert isinstance(written, dict)
        preset = to_plain(AlgorithmConfig(name=before["name"]))
        for key in [key for key, value in written.items() if key in preset and value == preset[key]]:
            before.pop(key)


def _resolved(tree: DictConfig) -> Any:
    """Plain data with all `${…}` resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue

    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: has no value yet (???). Write {error.full_key}=VALUE.") from error


# ------------------------------------------------------------------------------------------------ errors


@contextmanager
def _config_errors(file: Path | None) -> Iterator[None]:
    """Convert errors of Hydra, OmegaConf and the YAML parser to `ConfigError`."""
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

    where = f"{file}: " if file is not None else ""
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(where + _missing(error.missing_cfg_file or "", error.options or ())) from error
    except yaml.YAMLError as error:
        raise ConfigError(_syntax(error, where)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}is not a text file.") from error
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        advice = ". Set that key as well." if isinstance(error, InterpolationKeyError) else ""
        raise ConfigError(f"{where}{key}{_first_line(error)}{advice}") from error
    except (HydraException, OSError, IndexError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}{_first_line(error)}") from error


def _missing(name: str, options: Sequence[str]) -> str:
    group, _, wanted = name.rpartition("/")
    what = f"there is no {name.removesuffix('.yaml')}.yaml beside it."
    what += did_you_mean(wanted, options)
    if options:
        what += f" Known: {', '.join(options)}."
    if (model := section_model(RunConfig, group)) and model.shorthand:
        what += f" For {group} itself write {group}.{model.shorthand}={wanted}."
    return what


def _syntax(error: Any, where: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{where}not valid YAML: {_first_line(error)}"
    return f"{mark.name}: line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {error.problem}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ------------------------------------------------------------------------------------------------ bounds of YAML

MAX_CHARS = 2**18
MAX_DEPTH = 64
MAX_VALUES = 100_000
"""With all aliases expanded."""
MAX_INTERPOLATIONS = 300
"""Nested resolutions of `${…}`: two in each of twenty lines would be a million."""

PARSERS = [getattr(yaml, "CSafeLoader", yaml.SafeLoader), yaml.SafeLoader]
"""The C parser is faster; OmegaConf uses the second, and they may differ."""


def check_yaml(text: str, where: object, parsers: Sequence[Any] = PARSERS) -> None:
    """Refuse YAML that is too large, too deep, recursive, or too large with its aliases expanded.

    Reads parser events and builds nothing. Syntax errors are left to the loader.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{where}: more than {MAX_CHARS:,} characters, too many for a configuration.")
    for parser in parsers:
        with suppress(yaml.YAMLError):
            _check_events(yaml.parse(text, parser), where)


def _check_events(events: Iterator[Any], where: object) -> None:
    sizes: dict[str, int | None] = {}  # expanded size by anchor; None while it is open
    open_: list[tuple[str | None, int]] = [(None, 0)]  # of each open collection: anchor, size before
    total = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, total))
            sizes |= {event.anchor: None} if event.anchor else {}
            if len(open_) > MAX_DEPTH:
                raise ConfigError(f"{where}: line {line}: nested more than {MAX_DEPTH} deep.")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            sizes |= {anchor: total - before + 1} if anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 0)
            if size is None:
                raise ConfigError(f"{where}: line {line}: *{event.anchor} is inside the node it refers to.")
            total += size
        elif isinstance(event, yaml.ScalarEvent):
            sizes |= {event.anchor: 1} if event.anchor else {}
            if not is_text(event.value):
                raise ConfigError(f"{where}: line {line}: half of a surrogate pair is not text.")
        total += isinstance(event, yaml.NodeEvent)
        if total > MAX_VALUES:
            raise ConfigError(f"{where}: line {line}: more than {MAX_VALUES:,} values, aliases (*name) expanded.")


def is_text(value: str) -> bool:
    """Whether it can be encoded as UTF-8: has no half of a surrogate pair."""
    return re.search("[\ud800-\udfff]", value) is None


@contextmanager
def bounded_yaml(unset: str | None = None) -> Iterator[list[str]]:
    """Check every file that OmegaConf loads (Hydra loads several), and bound the resolution of `${…}`. `unset` is the
    value of environment variables that are not set.

    Yields the names of the environment variables that `${oc.env:NAME}` reads.
    """
    from omegaconf import OmegaConf
    from omegaconf.basecontainer import BaseContainer

    original_load, original_resolve = OmegaConf.load, BaseContainer.resolve_parse_tree
    original_call = BaseContainer._evaluate_custom_resolver
    depth = resolved = 0
    variables: list[str] = []

    def load(file: Any) -> Any:
        if hasattr(file, "read"):
            check_yaml(file.read(MAX_CHARS + 1), getattr(file, "name", "the configuration"))
            file.seek(0)
        else:
            with Path(file).open(encoding="utf-8") as stream:
                check_yaml(stream.read(MAX_CHARS + 1), file)
        return original_load(file)

    def resolve(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth, resolved
        depth += 1
        resolved += depth > 1
        try:
            if resolved > MAX_INTERPOLATIONS:
                raise ConfigError("too many nested ${…} references.")
            return original_resolve(self, *args, **kwargs)
        finally:
            depth -= 1

    def call(self: Any, **kwargs: Any) -> Any:
        if kwargs["inter_type"] == "oc.env":
            variables.extend(str(name) for name in kwargs["inter_args"][:1])
            if unset is not None and len(kwargs["inter_args"]) == 1 and variables[-1] not in os.environ:
                return unset
        return original_call(self, **kwargs)

    with (
        _replaced(OmegaConf, "load", staticmethod(load)),
        _replaced(BaseContainer, "resolve_parse_tree", resolve),
        _replaced(BaseContainer, "_evaluate_custom_resolver", call),
    ):
        yield variables


@contextmanager
def _replaced(owner: type, name: str, by: Callable[..., Any]) -> Iterator[None]:
    before = owner.__dict__.get(name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
