"""The training command of a shell script: overrides, variables, configuration. A script is never run.

Overrides are Hydra's: `a.b=1`, `+a.b=[x, y]`, `++a.b={c: 2}`, `~a.b`. Arguments of a Python script (`CommandLine`) are
those of `argparse`: `--key value`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arborl.convert.reading.bash_scripts import ShellCommand, read_shell
from arborl.errors import ConfigError

OVERRIDE = re.compile(r"([+~]{0,2})([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
REMOVAL = re.compile(r"~([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)")
NUMBER = re.compile(r"[-+]?(?:\d[\d_]*)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
CLOSES = {"[": "]", "{": "}"}
DEEPEST = 50
STARTS = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed)")
"""Programs that start a training."""
FLAGS = {"--config-name": "--config-name", "-cn": "--config-name", "--config-path": "--config-path",
         "-cp": "--config-path", "--config-dir": "--config-path", "-cd": "--config-path"}  # fmt: skip
MODULE = "--module"
"""A key that no system has: what a script starts (`verl.trainer.main_ppo`)."""
START = "start_script"
"""A key that no system has: the script that starts a pipeline of ROLL (`start_agentic_pipeline.py`)."""
PIPELINE = re.compile(r"(?:.*/)?start_\w+_pipeline\.py")
PATH_COMMAND = re.compile(
    r"\$\(\s*(dirname|basename|realpath|readlink -f|cd)\s+(?:--\s+)?[\"']?([^$()\"'&]+?)[\"']?\s*(?:&&\s*pwd\s*)?\)"
)
"""A command on a known path."""
SHELL = (".sh", ".bash")
MAIN_FILE = re.compile(r"(?:[^=]*/)?main_\w+\.py")
LAUNCHER = re.compile(r"--(nproc|nnodes)(?:[-_]per[-_]node)?=(.+)")
"""Processes that `torchrun` starts."""
TRAINER = re.compile(r"\bmain_(?:ppo|dapo)\b|\bverl\.trainer\b")
TRAINING = re.compile(r"(?:^|[\s;&|'\"/])(?:python[\d.]*|torchrun)\s+(?:\S+\s+)*?(?:-m\s|\S*\.py\b)")
"""A training in one word, as for `ssh HOST '…'` and `tmux new-session -d '…'`."""


@dataclass(slots=True)
class ScriptSettings:
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted keys with their values; under `--config-name` a configuration that is not found near the script."""
    removed: list[str] = field(default_factory=list)
    """Keys that it takes away from what is below it."""
    variables: dict[str, Any] = field(default_factory=dict)
    """The script's own."""
    config: Path | None = None
    """The YAML that it starts from, if it is near the script."""
    mentions_trainer: bool = False
    """Whether a command or a variable mentions verl's trainer."""


def read(path: Path) -> ScriptSettings:
    found = read_script(read_text(path), str(path))
    named, folder = found.settings.get("--config-name"), found.settings.get("--config-path")
    file = near(path, f"{folder}/{named}" if folder else str(named)) if named is not None else None
    if file is not None and file.suffix in (".yaml", ".yml"):
        found.config = file
        found.settings = {key: value for key, value in found.settings.items() if not key.startswith("--config")}
    return found


def read_pipeline(path: Path) -> ScriptSettings:
    """The configuration that a script starts a pipeline of ROLL with:

    python examples/start_agentic_pipeline.py --config_path DIR --config_name NAME
    """
    where = str(path)
    found: dict[tuple[str, str, str], int] = {}
    for command in inner_commands(read_shell(read_text(path), where).commands, where):
        start = next((at for at, word in enumerate(command.words) if PIPELINE.fullmatch(word)), None)
        if start is not None:
            flags = _flags(command.words[start + 1 :])
            folder, name = (script_folder(flags.get(flag, ""), path) for flag in ("--config_path", "--config_name"))
            found.setdefault((command.words[start], folder, name), command.line)
    if not found:
        raise ConfigError(
            f"{path}: starts no pipeline of ROLL (python …/start_NAME_pipeline.py --config_path DIR --config_name "
            "NAME), so there is nothing to convert. Give the YAML file, or a script that starts one."
        )
    if len(found) > 1:
        lines = ", ".join(str(line) for line in list(found.values())[:5])
        raise ConfigError(f"{path}: starts several pipelines (lines {lines}). Keep one of them.")
    ((start_script, folder, name),) = found
    if not name:
        raise ConfigError(f"{path}: {start_script} without --config_name. Write it, or give the YAML file.")
    inner = f"{folder}/{name}" if folder else name
    beside = f"{Path(start_script).parent}/{inner}"  # Hydra looks from the folder of the Python script
    config = near(path, beside) or near(path, inner)
    if config is None:
        there = sorted(file.name for file in path.resolve().parent.glob("*.yaml"))
        more = f" Beside it: {', '.join(there[:5])}." if there else ""
        raise ConfigError(f"{path}: names the configuration {inner!r}, which is not there.{more} Give the YAML file.")
    return ScriptSettings({START: Path(start_script).name}, config=config)


def _flags(words: Sequence[str]) -> dict[str, str]:
    """`--flag value` and `--flag=value`."""
    found = {}
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found[name] = value if equals else following
    return found


def script_folder(text: str, script: Path) -> str:
    """The text with `$0` and commands on its path filled in: `$(basename $(dirname $0))` is the script's folder."""
    text = re.sub(r"\$0|\$\{?BASH_SOURCE(?:\[0\])?\}?", lambda _: str(script.resolve()), text)
    while found := PATH_COMMAND.search(text):
        path = Path(found[2])
        part = {"dirname": str(path.parent), "basename": path.name}.get(found[1], str(path))
        text = text[: found.start()] + part + text[found.end() :]
    return text


def read_text(path: Path, newline: str | None = None) -> str:
    """The text of a regular file; `newline` as in `open`."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file.")
    try:
        with path.open(encoding="utf-8", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file.") from error


def near(script: Path, name: str) -> Path | None:
    """The file that a script means by `name`, relative to the folder of the script or a folder above it.

    What a script only learns by running, such as `$(git rev-parse --show-toplevel)`, stands for some folder above.
    """
    tail = re.sub(r"^.*(?:\$\([^()]*\)|\$\{?\w+\}?)/?", "", name)
    folder = script.resolve().parent
    names = [tail, f"{tail}.yaml"]
    places = [Path(tail).expanduser().parent] if Path(tail).expanduser().is_absolute() else []
    places += [Path(), folder, *folder.parents]
    for place in places:
        for one in names:
            found = place / (Path(one).name if place.is_absolute() and Path(one).expanduser().is_absolute() else one)
            if tail and found.is_file():
                return found
    return None


def read_script(text: str, where: str) -> ScriptSettings:
    """Overrides and variables of a shell script, or of a plain list of overrides, one or more a line.

    A script that starts several trainings with different settings is refused: it is not one run.
    """
    script = read_shell(text, where)
    loose = ScriptSettings()
    runs: list[tuple[ShellCommand, ScriptSettings]] = []
    for command in inner_commands(script.commands, where):
        started = next((at for at, word in enumerate(command.words) if STARTS.fullmatch(word)), None)
        if started is not None:
            found = _settings(command.words[started + 1 :])
            if found.removed or any(not key.startswith("--") for key in found.settings):
                runs.append((command, found))
        elif command.words[0].strip("+~").partition("=")[0].count("."):
            _settings(command.words, loose)
    if any(found != runs[0][1] for _, found in runs):
        lines = ", ".join(str(command.line) for command, _ in runs[:5])
        raise ConfigError(f"{where}: starts several trainings (lines {lines}). Keep one of them.")
    variables = {
        name: [plain(one) for one in value] if isinstance(value, list) else plain(value)
        for name, value in script.variables.items()
    }
    run = runs[0][1] if runs else ScriptSettings()
    words = [word for command in script.commands for word in command.words]
    values = [str(value) for value in script.variables.values()]
    mentions = any(TRAINER.search(text) for text in (*words, *values))
    return ScriptSettings(
        loose.settings | run.settings, loose.removed + run.removed, variables, mentions_trainer=mentions
    )


def inner_commands(
    commands: Sequence[ShellCommand], where: str, quoted: re.Pattern[str] = TRAINING, depth: int = 0
) -> Iterator[ShellCommand]:
    """Commands, and those that stand in quotes behind `bash -c`, `ssh` or `tmux` and match `quoted`."""
    for command in commands:
        words = command.words
        inside = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("-c", "-lc")]
        if not inside or not any(word in ("bash", "sh") for word in words):
            inside = [word for word in words[1:] if " " in word.strip() and quoted.search(word)]
        if inside and depth < DEEPEST and not STARTS.fullmatch(words[0]) and not OVERRIDE.fullmatch(words[0]):
            for text in inside:
                nested = [ShellCommand(one.words, command.line) for one in read_shell(text, where).commands]
                yield from inner_commands(nested, where, quoted, depth + 1)
        else:
            yield command


def _settings(words: Sequence[str], found: ScriptSettings | None = None) -> ScriptSettings:
    """Module, configuration and overrides in the words after a program, added to `settings`."""
    found = ScriptSettings() if found is None else found
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in FLAGS and (equals or at + 1 < len(words)):
            found.settings[FLAGS[flag]] = value if equals else words[at + 1]
        elif word == "-m" and at + 1 < len(words):
            found.settings[MODULE] = words[at + 1]
        elif MAIN_FILE.fullmatch(word) and MODULE not in found.settings:
            found.settings[MODULE] = word
        elif launcher := LAUNCHER.fullmatch(word):
            found.settings["--nnodes" if launcher[1] == "nnodes" else "--nproc_per_node"] = plain(launcher[2])
        elif (override := OVERRIDE.fullmatch(word)) and override[1] != "~":
            if "." in override[2] or found.settings:
                found.settings |= _flattened(override[2], plain(override[3]))
        elif removal := override or REMOVAL.fullmatch(word):
            key = removal[2] if override else removal[1]
            found.removed.append(key)
            found.settings.pop(key, None)
    return found


def _flattened(key: str, value: Any) -> dict[str, Any]:
    """A table given at once as its keys, one by one."""
    return dict(_flat(value, f"{key}.")) if isinstance(value, dict) and value else {key: value}


def _flat(tree: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


# ------------------------------------------------------------------------------------------------ overrides


def overrides(text: str, where: str) -> dict[str, Any]:
    """A list of overrides, one or more a line; keys may have no dot."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{where}: line {number}: cannot read {line[:60]!r}: {error}") from error
        for word in words:
            if (match := OVERRIDE.fullmatch(word)) and "~" not in match[1]:
                found[match[2]] = plain(match[3])
    return found


def plain(text: str) -> Any:
    """A value as Hydra reads it."""
    text = text.strip()
    try:
        value, at = _value(text, 0, "", 0)
    except ValueError:
        return text
    return value if at == len(text) else text


def _value(text: str, at: int, ends: str, depth: int) -> tuple[Any, int]:
    """A value, up to the end or one of `ends`, and where it stops; ValueError where there is none."""
    at = _blanks(text, at)
    sign = text[at : at + 1]
    if depth > DEEPEST:
        raise ValueError("too deep")
    if sign in ("'", '"'):
        return _quoted(text, at)
    if sign in CLOSES:
        return _several(text, at, depth)
    stop = at
    while stop < len(text) and text[stop] not in ends:
        if text.startswith("${", stop):
            stop = max(text.find("}", stop), stop)
        stop += 1
    return primitive(text[at:stop].strip()), stop


def _quoted(text: str, at: int) -> tuple[str, int]:
    found = re.compile(r"""(['"])((?:\\.|(?!\1).)*)\1""", re.DOTALL).match(text, at)
    if found is None:
        raise ValueError("not closed")
    return re.sub(r"\\(['\"\\])", r"\1", found[2]), found.end()


def _several(text: str, at: int, depth: int) -> tuple[Any, int]:
    closes, named = CLOSES[text[at]], text[at] == "{"
    items: list[Any] = []
    table: dict[str, Any] = {}
    at = _blanks(text, at + 1)
    while text[at : at + 1] != closes:
        if named:
            key, at = _value(text, at, ":", depth + 1)
            if text[at : at + 1] != ":":
                raise ValueError("no colon")
            table[str(key)], at = _value(text, at + 1, ",}", depth + 1)
        else:
            item, at = _value(text, at, ",]", depth + 1)
            items.append(item)
        at = _blanks(text, at)
        if text[at : at + 1] == ",":
            at = _blanks(text, at + 1)
        elif text[at : at + 1] != closes:
            raise ValueError("neither a comma nor an end")
    return (table if named else items), at + 1


def _blanks(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def primitive(text: str) -> Any:
    """A word as a number, truth value or nothing, where it is one."""
    known = {"null": None, "": None, "true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()]
    if NUMBER.fullmatch(text) and any(sign.isdigit() for sign in text):
        try:
            return int(text)
        except ValueError:
            return float(text)
    return text


# ------------------------------------------------------------------------------------------------ Python scripts


@dataclass(slots=True)
class CommandLine:
    """The command that starts a Python script."""

    arguments: dict[str, Any] = field(default_factory=dict)
    launcher: dict[str, Any] = field(default_factory=dict)
    """Arguments of `accelerate launch` before it."""
    where: str = ""
    count: int = 0
    """Number of commands that start the script; the first is read."""


LAUNCHERS = {"python", "python3", "accelerate", "torchrun"}


def read_command(text: str, script: str, where: str, is_shell: bool) -> CommandLine:
    """The first command that starts `script`, in a shell script or in another text, such as a docstring."""
    commands = (
        [one.words for one in inner_commands(read_shell(text, where).commands, where)] if is_shell else _commands(text)
    )
    found = []
    for words in commands:
        at = next((i for i, word in enumerate(words) if Path(word).name == script), None)
        if at is None:
            continue
        before, after = words[:at], words[at + 1 :]
        if after[0].startswith("--") if after else is_shell and LAUNCHERS & {Path(word).name for word in before}:
            found.append((before, after))
    if not found:
        return CommandLine(where=where)
    before, after = found[0]
    launched = before[before.index("launch") + 1 :] if "launch" in before else []
    return CommandLine(_arguments(after), _arguments(launched), where, len(found))


def _commands(text: str) -> Iterator[list[str]]:
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        try:
            yield shlex.split(line, comments=True)
        except ValueError:  # prose with an apostrophe
            continue


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key a b`, `--flag`, `--no_flag`."""
    given: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            given[key] = [value] if equals else []
        elif key:
            given[key].append(word.rstrip(",") or word)
    out: dict[str, Any] = {}
    for key, values in given.items():
        if not values:
            out[key.removeprefix("no_")] = not key.startswith("no_")
        else:
            out[key] = plain(values[0]) if len(values) == 1 else [plain(value) for value in values]
    return out


def code_of_notebook(text: str, where: str) -> str:
    """The code cells of a Jupyter notebook; commands of IPython become comments."""
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        lines = [line for cell in cells for line in [*"".join(cell["source"]).splitlines(), ""]]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: not a Jupyter notebook: {error}.") from error
    return "\n".join(f"# {line}" if line.startswith(("%", "!", "?")) else line for line in lines)
