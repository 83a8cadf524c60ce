"""From a file, `a.b=c` overrides or Python keywords to a `RunConfig`.

Hydra composes the file with its `defaults` list and the config groups beside it; overrides go on top, in order.
Whatever is wrong is a `ConfigError`.
"""

from __future__ import annotations

import copy
import difflib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl.config.algorithm import AlgorithmConfig
from arborl.config.base import Config, element, paths, plain, section, spelt_out, validate
from arborl.config.bounds import bounded
from arborl.config.presets import PRESETS
from arborl.config.run import RunConfig, as_name
from arborl.config.secrets import require_unmasked
from arborl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

ALIASES = {"steps": "trainer.steps"}
"""Keywords of the Python door that are short for a longer key."""


def load(file: Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration.

    Args:
        file: a YAML file; without one the defaults are the base.
        overrides: `key=value`, whether or not the file mentions the key; `~key` takes a key out. A name in place of a
            section is short for its `name`; another name than the file's leaves the file's `args` behind, and
            another algorithm what the former's preset had set. Where a folder of YAML files beside the file has the
            key's name, `key=value` picks one of them, as in Hydra.

    Example:
        load(Path("run.yaml"), ["env=frozen_lake", "env.args.size=6", "learner.lr=3e-4"])
    """
    return load_with_variables(file, overrides)[0]


def load_with_variables(file: Path | None = None, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
    """The same, with the names of the environment variables that `${oc.env:NAME}` filled in."""
    from omegaconf import OmegaConf

    file = file.expanduser().absolute() if file is not None else None
    parsed = [_parse(text) for text in overrides]
    groups = [override for override in parsed if file is not None and _picks_from(file.parent, override)]
    with _refusals(file), bounded() as variables:
        tree = _compose(_checked(file), groups) if file is not None else OmegaConf.create({})
        _spell_out(tree)
        _nest(tree, RunConfig)
        for override in parsed:
            if override not in groups:
                _spell_out(tree)
                _apply(tree, override)
        data = _resolved(tree)
    require_unmasked(data, f"{file}: " if file is not None else "")
    if file is not None and not data.get("name"):
        data["name"] = as_name(file.parent.name if file.stem in ("run", "config", "train") else file.stem)
    return validate(RunConfig, data), list(dict.fromkeys(variables))


def read_tree(file: Path) -> Any:
    """Another file than a run's, as plain data; what is wrong with it is said in the same words."""
    from omegaconf import OmegaConf

    with _refusals(file), bounded():
        return _resolved(OmegaConf.load(_checked(file.expanduser())))  # type: ignore[arg-type]


def from_kwargs(**kwargs: Any) -> RunConfig:
    """The same, from Python keywords: nested dicts, dotted names, and the short forms of a file.

    Example:
        from_kwargs(model="seedling", data="train.json", agent="tool", steps=50, **{"learner.lr": 3e-4})
    """
    tree: dict[str, Any] = {}
    for key in sorted(kwargs, key=lambda key: key.count(".")):  # whole sections first, then what goes into them
        _place(tree, RunConfig, ALIASES.get(key, key), kwargs[key])
    return validate(RunConfig, tree)


def named_key(name: str) -> str | None:
    """The configuration's key that a command-line option was probably meant as.

    Example:
        named_key("seed"), named_key("lr"), named_key("save-every")     # seed, learner.lr, trainer.save_every
    """
    name = ALIASES.get(name, name.replace("-", "_"))
    everywhere = list(paths(RunConfig))
    below = [path for path in everywhere if path.rpartition(".")[2] == name]
    return name if name in everywhere else below[0] if len(below) == 1 else None


def read_value(text: str) -> Any:
    """A value as an override reads it.

    Example:
        read_value("1e-4"), read_value("[4, 8]"), read_value("true")     # 0.0001, [4, 8], True
    """
    return _parse(f"value={text}").value()


def write_setting(key: str, value: str | float | bool | None) -> str:
    """The override that sets `key` to exactly this.

    Example:
        write_setting("learner.lr", 1e-4), write_setting("name", "a b")     # learner.lr=0.0001, name="a b"
    """
    if value is None or isinstance(value, bool):
        return f"{key}={'null' if value is None else str(value).lower()}"
    if not isinstance(value, str):
        return f"{key}={value!r}"
    plain = re.fullmatch(r"[A-Za-z_/][\w./:@-]*", value, re.ASCII) and read_value(value) == value
    if plain:
        return f"{key}={value}"
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    ended = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'{key}="{ended}"'


def _place(tree: dict[str, Any], model: type[Config] | None, key: str, value: Any, above: str = "") -> None:
    """Put `value` at the dotted `key`; two different values for one key are an error."""
    head, _, rest = key.partition(".")
    path = f"{above}{head}"
    inner = section(model, head) if model else None
    if isinstance(value, Config):
        value = value.model_dump(exclude_unset=True)
    if rest:
        value = {rest: value}
    elif inner:
        value = spelt_out(inner, value)
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


# ------------------------------------------------------------------------------------------------ the file


def _checked(path: Path) -> Path:
    """The same path, when Hydra can read it."""
    if not path.is_file():
        raise ConfigError(_no_file(path))
    if path.suffix != ".yaml":
        raise ConfigError(f"{path}: a configuration file ends in .yaml. Rename it to {path.stem}.yaml.")
    return path


def _no_file(path: Path) -> str:
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
    """Hydra's composition of the file, its `defaults` list and the groups picked; Hydra's own state stays as it was."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig, OmegaConf

    own = OmegaConf.load(path)
    if not isinstance(own, DictConfig):
        raise ConfigError(f"{path}: must be keys with values (key: value), not a list.")
    if "hydra" in own:
        raise ConfigError(f"{path}: hydra: unknown key. Only the `defaults` list is for Hydra; take it out.")
    hydra = GlobalHydra.instance()
    before, hydra.hydra = hydra.hydra, None
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(path.parent), version_base="1.3"):
            # Without `_self_` the file itself comes last and wins, which is what a reader expects.
            warnings.filterwarnings("ignore", message=".*_self_")
            tree = compose(path.name, _picks(path.name, groups))
    finally:
        GlobalHydra.instance().hydra = before
    OmegaConf.set_struct(tree, False)
    return tree


def _picks_from(folder: Path, override: Override) -> bool:
    """Whether the override names a config group: a folder of YAML files beside the file."""
    group = folder / override.key_or_group
    return not isinstance(override.value(), dict) and group.is_dir() and any(group.glob("*.yaml"))


def _picks(name: str, groups: Sequence[Override]) -> list[str]:
    """The overrides as Hydra wants them: a group that the `defaults` list does not mention needs a `+`."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    if not groups:
        return []
    listed = GlobalHydra.instance().config_loader().compute_defaults_list(name, [], RunMode.RUN).defaults
    known = {default.override_key for default in listed}
    plain = {override.get_key_element().lstrip("+"): str(override.input_line).lstrip("+") for override in groups}
    return [text if text.startswith("~") or key in known else f"+{text}" for key, text in plain.items()]


# ------------------------------------------------------------------------------------------------ the overrides


def _parse(text: str) -> Override:
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


def _spell_out(tree: DictConfig, above: type[Config] = RunConfig) -> None:
    """Turn every bare name in `tree` into the section it is short for, so that overrides can reach inside."""
    from omegaconf import DictConfig, ListConfig

    for key in list(tree):
        if model := section(above, str(key)):
            if model.shorthand and isinstance(_raw(tree, key), str) and isinstance(tree[key], str):
                tree[key] = {model.shorthand: _raw(tree, key)}
            elif isinstance(_raw(tree, key), dict) and isinstance(tree[key], DictConfig):
                _spell_out(tree[key], model)
        elif (model := element(above, str(key))) and isinstance(tree[key], ListConfig):
            for index, item in enumerate(tree[key]):
                if isinstance(item, str):
                    tree[key][index] = {model.shorthand: _raw(tree[key], index)}


def _nest(tree: DictConfig, model: type[Config], above: str = "") -> None:
    """Take dotted keys apart: `learner.lr: 1` is `learner: {lr: 1}`. What the two say of one key must be the same."""
    from omegaconf import DictConfig, OmegaConf

    for key in [key for key in tree if isinstance(key, str) and key.partition(".")[0] in model.model_fields]:
        if "." not in key:
            inner = section(model, key)
            if inner is not None and isinstance(tree[key], DictConfig):
                _nest(tree[key], inner, f"{above}{key}.")
            continue
        value = _raw(tree, key)
        tree.pop(key)
        before = OmegaConf.select(tree, key)
        if before not in (None, value):
            raise ConfigError(f"{above}{key}: given twice, as {before!r} and {value!r}. Keep one.")
        OmegaConf.update(tree, key, value, merge=True, force_add=True)


def _raw(node: Any, key: Any) -> Any:
    """The value as written, before interpolation."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]


def _apply(tree: DictConfig, override: Override) -> None:
    """Set or delete one key of `tree`. `+` and `++` say what a plain override does anyway."""
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
        home = OmegaConf.select(tree, above) if above else tree
        if not isinstance(home, Container) or last not in home:
            raise ConfigError(f"{text!r}: {key} is not set, so there is nothing to take out.")
        del home[last]
        return
    whole, around = _section_at(key), _section_at(above)
    model, place = (whole, key) if whole else (around, above) if around and last == around.shorthand else (None, "")
    if model and model.shorthand and isinstance(value, str):
        before = OmegaConf.select(tree, place)
        if isinstance(before, DictConfig) and before.get(model.shorthand) not in (None, value):
            _leave_behind(before, model)
        key = f"{place}.{model.shorthand}"
    OmegaConf.update(tree, key, value, merge=True, force_add=True)


def _section_at(path: str) -> type[Config] | None:
    """The model of the section at a dotted path."""
    model: type[Config] | None = RunConfig
    for part in path.split("."):
        model = section(model, part) if model else None
    return model


def _leave_behind(before: DictConfig, model: type[Config]) -> None:
    """Take out what was the former part's own: its arguments, or of an algorithm what its preset had set.

    A run's own file has every key of the preset; left there, they would win over those of the new one.
    """
    from omegaconf import OmegaConf

    before.pop("args", None)
    if model is AlgorithmConfig and before.get("name") in PRESETS:
        given = OmegaConf.to_container(before)
        assert isinstance(given, dict)
        preset = plain(AlgorithmConfig(name=before["name"]))
        for key in [key for key, value in given.items() if key in preset and value == preset[key]]:
            before.pop(key)


def _resolved(tree: DictConfig) -> Any:
    """Plain data, every `${…}` filled in."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue

    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: has no value yet (???). Write {error.full_key}=VALUE.") from error


# ------------------------------------------------------------------------------------------------ what went wrong


@contextmanager
def _refusals(file: Path | None) -> Iterator[None]:
    """What Hydra, OmegaConf and the YAML parser raise, as one line."""
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    where = f"{file}: " if file is not None else ""
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(where + _missing(error.missing_cfg_file or "", error.options or ())) from error
    except YAMLError as error:
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
    if (model := section(RunConfig, group)) and model.shorthand:
        what += f" For {group} itself write {group}.{model.shorthand}={wanted}."
    return what


def _syntax(error: Any, where: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{where}not valid YAML: {_first_line(error)}"
    return f"{mark.name}: line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {error.problem}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
