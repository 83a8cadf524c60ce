"""Python scripts that train with TRL: what a script passes to its trainer, as keys with values.

Keys are named as the trainer's parameters: `args.learning_rate`, `peft_config.r`, `train_dataset`. `FunctionModule`
copies functions of the script, and the statements that make its rows, into a module without the training.
"""

from __future__ import annotations

import ast
import builtins
import copy
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml  # type: ignore[import-untyped]

from arborl.config.load_config import check_yaml
from arborl.convert.reading.python_scripts import (
    CallItem,
    ImportedName,
    PythonReader,
    RunTimeValue,
    ScriptDefinition,
    ScriptScope,
    UnevaluatedCall,
)
from arborl.convert.reading.source_files import SourceKeys
from arborl.convert.reading.training_scripts import CommandLine, code_of_notebook, near, plain, read_command, read_text
from arborl.errors import ConfigError

TRAINERS: dict[str, tuple[str, ...]] = {
    "GRPOTrainer": (
        "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class",
        "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools",
    ),
    "SFTTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "DPOTrainer": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "KTOTrainer": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
}  # fmt: skip
"""Trainers that are converted, with their positional parameters."""
OTHER_TRAINERS = {
    "PPOTrainer": " Write: arborl train algorithm=ppo (docs/algorithms.md).",
    "RLOOTrainer": " Write GRPOTrainer, convert, and write algorithm=rloo into the result.",
    "RewardTrainer": " Train a reward model with arborl.NeuralRewardTrainer (docs/rewards.md).",
    "GKDTrainer": " Write: arborl train algorithm=distill (docs/offline.md).",
    "DistillationTrainer": " Write: arborl train algorithm=distill (docs/offline.md).",
}
PARSERS = ("TrlParser", "HfArgumentParser")
PARSE = ("parse_args_and_config", "parse_args_into_dataclasses")
ARGS_READ: dict[str, Any] = {
    "eval_strategy": "no", "gradient_checkpointing": True, "push_to_hub": False, "do_eval": False, "use_vllm": False,
    "transformers_continuous_batching_config": None, "chat_template_kwargs": None, "model_init_kwargs": None,
    "trust_remote_code": False, "seed": 42, "dataset_num_proc": None, "max_steps": -1, "packing": False,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "ScriptArguments": {
        "dataset_name": None, "dataset_config": None, "dataset_train_split": "train", "dataset_test_split": "test",
        "dataset_streaming": False, "ignore_bias_buffers": False,
    },
    "ModelConfig": {
        "model_name_or_path": None, "model_revision": "main", "dtype": "float32", "torch_dtype": None,
        "attn_implementation": None, "trust_remote_code": False, "use_peft": False, "lora_r": 16, "lora_alpha": 32,
        "lora_dropout": 0.05, "lora_target_modules": None, "lora_target_parameters": None,
        "lora_modules_to_save": None, "lora_task_type": "CAUSAL_LM", "use_rslora": False, "use_dora": False,
        "load_in_8bit": False, "load_in_4bit": False, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False,
        "bnb_4bit_quant_storage": None,
    },
    "DatasetMixtureConfig": {"datasets": [], "streaming": False, "test_split_size": None},
    **dict.fromkeys(("GRPOConfig", "SFTConfig", "DPOConfig", "KTOConfig", "TrainingArguments"), ARGS_READ),
}  # fmt: skip
"""Fields with their defaults, by class; of training arguments those that scripts read."""
SECTIONS = {"ModelConfig": "model_config", "DatasetMixtureConfig": "dataset_args"}


@dataclass(slots=True)
class TrainingScript:
    """A script with its one training."""

    path: Path
    source: str
    reader: TrlReader
    trainer: UnevaluatedCall
    parameters: dict[str, Any]
    """Arguments of the trainer, by name."""

    @property
    def module(self) -> str:
        """Name of the module of its functions."""
        name = "".join(sign if sign.isalnum() or sign == "_" else "_" for sign in self.path.stem)
        return f"{'_' if name[:1].isdigit() else ''}{name}_parts"

    def expression(self, parameter: str) -> ast.expr:
        """What is written for a parameter of the trainer."""
        call = self.trainer.node
        assert isinstance(call, ast.Call)
        positional = zip(TRAINERS[self.trainer.name], call.args, strict=False)
        written = dict(positional) | {one.arg: one.value for one in call.keywords if one.arg is not None}
        if parameter not in written:
            raise NotCopied("is passed in a dictionary")
        return written[parameter]


def read_training(files: Sequence[Path]) -> SourceKeys:
    """Keys and values of a script. Further files are its command line: a YAML file of `--config`, or a text with the
    command; without them the first command of the docstring is read."""
    path = files[0]
    if path.suffix not in (".py", ".ipynb"):
        raise ConfigError(f"{path}: not a Python script. Write a .py file, or a notebook (.ipynb).")
    source = read_text(path).removeprefix("\ufeff")
    source = code_of_notebook(source, str(path)) if path.suffix == ".ipynb" else source
    try:
        tree = ast.parse(source)
        reader = TrlReader(tree, path, _command(ast.get_docstring(tree) or "", path, files[1:]))
        reader.read()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: not a valid Python script: {error}.") from error
    trainer = reader.only_trainer()
    parameters = dict(zip(TRAINERS[trainer.name], trainer.args, strict=False)) | trainer.keywords
    script = TrainingScript(path, source, reader, trainer, parameters)
    return SourceKeys(keys=dict(_keys(script)), variables={"script": script})


def _command(docstring: str, path: Path, files: Sequence[Path]) -> CommandLine:
    found = read_command("" if files else docstring, path.name, "its docstring", is_shell=False)
    configured: dict[str, Any] = {}
    for file in files:
        if file.suffix in (".yaml", ".yml"):
            configured |= _config_file(file)
            continue
        found = read_command(read_text(file), path.name, str(file), is_shell=True)
        if not found.count:
            raise ConfigError(f"{file}: no command starts {path.name}. Write python {path.name} --model_name_or_path …")
    if isinstance(named := found.arguments.pop("config", None), str):
        file_named = near(path, named)
        if file_named is None:
            raise ConfigError(
                f"--config {named}: no such file near {path}. Add it: arborl convert trl {path} FILE.yaml"
            )
        configured = _config_file(file_named) | configured
    found.arguments = configured | found.arguments
    if isinstance(named := found.launcher.get("config_file"), str) and (launched := near(path, named)) is not None:
        found.launcher = _config_file(launched) | found.launcher
    return found


def _config_file(file: Path) -> dict[str, Any]:
    text = read_text(file)
    check_yaml(text, str(file))
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{file}: must be keys with values.")
    return {str(key): plain(value) if isinstance(value, str) else value for key, value in tree.items()}


class TrlReader(PythonReader):
    """Finds the trainer of a script, and fills the dataclasses of a `TrlParser` from the command line."""

    library = FIELDS
    star_imports = {"trl": (*TRAINERS, *OTHER_TRAINERS, *PARSERS, *FIELDS)}

    def __init__(self, tree: ast.Module, path: Path, command: CommandLine):
        super().__init__(tree, path)
        self.command = command
        self.trainers: list[UnevaluatedCall] = []
        self.trained: list[UnevaluatedCall] = []
        """Calls of `train`."""
        self.parsed: list[UnevaluatedCall] = []
        """Objects that a parser makes of the command line."""

    def read(self) -> None:
        self.run(self.tree.body)
        for found in [] if self.trainers else list(self.module.names.values()):
            # functions that a library calls, such as `fire.Fire(main)`
            inside = ast.walk(found.node) if isinstance(found, ScriptDefinition) else ()
            if any(isinstance(node, ast.expr) and _last(node) in TRAINERS for node in inside):
                self.apply(found, (), {}, found.node)

    def made(self, call: UnevaluatedCall) -> Any:
        bases = call.of.node.bases if call.of is not None and isinstance(call.of.node, ast.ClassDef) else ()
        if call.name.endswith("Trainer") or any(_last(base).endswith("Trainer") for base in bases):
            self.trainers.append(call)
        return call

    def made_certain(self, value: Any) -> Any:
        return value if isinstance(value, UnevaluatedCall) and value in self.trainers else None

    def method(self, call: UnevaluatedCall) -> Any:
        owner = call.on
        if call.path == "train" and owner in self.trainers:
            self.trained += [call] * (2 if self.loops else 1)
        elif isinstance(owner, UnevaluatedCall) and owner.name in PARSERS and call.path in PARSE:
            return self._parse(owner)
        return call

    def stopped(self, node: ast.Raise) -> None:
        given = f"With the command of {self.command.where}" if self.command.count else "Without a command line"
        how = f" Add a file with its command, or its YAML: arborl convert trl {self.path} COMMAND.sh"
        what = f"{given if self.parsed else 'With its constants'} the script stops here: {ast.unparse(node)}."
        raise ConfigError(f"{self.path}:{node.lineno}: {what}{how if self.parsed else ''}")

    def _parse(self, parser: UnevaluatedCall) -> tuple[UnevaluatedCall, ...]:
        classes = parser.args[0] if parser.args else parser.keywords.get("dataclass_types", ())
        made = [
            UnevaluatedCall(
                str(one), parser.node, of=one if isinstance(one, ScriptDefinition) else None, frame=self.frame
            )
            for one in (classes if isinstance(classes, list | tuple) else (classes,))
        ]
        left = dict(self.command.arguments)
        for one in sorted(made, key=self.is_training):
            known = FIELDS.get(one.name, {}) if one.of is None else self.fields(one.of)
            taken = [key for key in left if key in known or self.is_training(one)]
            one.keywords = {key: left.pop(key) for key in taken}
        self.parsed += made
        return tuple(made)

    def is_training(self, made: UnevaluatedCall) -> bool:
        """Whether it is a `GRPOConfig`, or of another class of training arguments."""
        bases = made.of.node.bases if made.of is not None and isinstance(made.of.node, ast.ClassDef) else ()
        return any(FIELDS.get(name) is ARGS_READ for name in (made.name, *map(_last, bases)))

    def only_trainer(self) -> UnevaluatedCall:
        """The trainer whose `train` is called."""
        kinds, owners = ", ".join(TRAINERS), [call.on for call in self.trained]
        for found in owners or self.trainers:
            if found.name not in TRAINERS or found.of is not None:
                what = "is a class of the script, whose methods are not converted" if found.of else "is not converted"
                advice = OTHER_TRAINERS.get(found.name, "")
                raise ConfigError(f"{self.path}:{found.node.lineno}: {found.name} {what}. Converted: {kinds}.{advice}")
        if not owners:
            made = f"none of {kinds} is made at its top level or in a function that it calls"
            why = f"{self.trainers[0].name}.train is not called" if self.trainers else made
            raise ConfigError(f"{self.path}: starts no training: {why}. Write a script that calls trainer.train().")
        if len(owners) > 1:
            lines = ", ".join(str(call.node.lineno) for call in self.trained[:5])
            advice = "Keep one of them, and convert each on its own."
            raise ConfigError(f"{self.path}: starts several trainings (lines {lines}). {advice}")
        return owners[0]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ keys


def _keys(script: TrainingScript) -> Iterator[tuple[str, Any]]:
    reader = script.reader
    yield "trainer", script.trainer.name
    for name, value in script.parameters.items():
        if name == "model":
            yield from _model(value)
        elif (
            name == "args"
            and isinstance(value, UnevaluatedCall)
            and (reader.is_training(value) or _is_configuration(value))
        ):
            yield from _arguments(reader, value)
        elif (
            isinstance(value, UnevaluatedCall)
            and name in ("peft_config", "quantization_config")
            and "get_" not in value.name
        ):
            yield f"{name}.class", value.name
            yield from _flat(f"{name}.", value.keywords)
        elif value is not None:
            yield from _flat("", {name: value})
    for made in reader.parsed:
        if not reader.is_training(made):
            yield from _flat(f"{SECTIONS.get(made.name, 'script_args')}.", made.keywords)
    yield from _flat("accelerate.", reader.command.launcher)
    yield from _flat("train.", reader.trained[0].keywords)
    if reader.command.count:
        yield "command", f"{reader.command.where}, number 1 of {reader.command.count}"


def _is_configuration(value: UnevaluatedCall) -> bool:
    return value.on is None and value.name.endswith(("Config", "Arguments"))


def _arguments(reader: TrlReader, made: UnevaluatedCall) -> Iterator[tuple[str, Any]]:
    given = dict(zip(["output_dir"], made.args, strict=False)) | made.keywords
    if made.of is not None and isinstance(made.of.node, ast.ClassDef):  # a dataclass of the script with other defaults
        own = {one.target.id for one in made.of.node.body if isinstance(one, ast.AnnAssign) and _last(one.target)}  # type: ignore[union-attr]
        given = {name: value for name, value in reader.fields(made.of).items() if name in own} | given
    elif made.name == "TrainingArguments":
        yield "args.class", made.name
    yield from _flat("args.", given)


def _model(value: Any) -> Iterator[tuple[str, Any]]:
    """The name of a model, also behind `from_pretrained`, `get_peft_model` and methods that return the model."""
    if isinstance(value, CallItem):
        yield from _model(value.of)
    elif isinstance(value, UnevaluatedCall) and value.name == "from_pretrained":
        names = ("pretrained_model_name_or_path", "model_name")
        named = next((value.keywords[name] for name in names if name in value.keywords), None)
        yield "model", _shown(value.args[0] if value.args else named)
        yield "from_pretrained.class", value.path.split(".")[-2]
        yield from _flat("from_pretrained.", {k: v for k, v in value.keywords.items() if k not in names})
    elif isinstance(value, UnevaluatedCall) and value.name == "get_peft_model":
        yield from _model(value.args[0] if value.args else value.keywords.get("model"))
        config = value.args[1] if len(value.args) > 1 else value.keywords.get("peft_config")
        yield "peft_config.class", config.name if isinstance(config, UnevaluatedCall) else "get_peft_model"
        yield from _flat("peft_config.", config.keywords if isinstance(config, UnevaluatedCall) else value.keywords)
    elif isinstance(value, UnevaluatedCall) and (value.on is not None or value.args):
        yield from _model(value.on if value.on is not None else value.args[0])
    else:
        yield "model", _shown(value)


def _flat(above: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys; objects that are not constant are `RunTimeValue`s."""
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, UnevaluatedCall) and value.name == "BitsAndBytesConfig":
            yield from _flat(f"{name}.", value.keywords)
        elif isinstance(value, Mapping) and value:
            yield from _flat(f"{name}.", value)
        else:
            yield name, _shown(value)


def _shown(value: Any) -> Any:
    if isinstance(value, list | tuple | range):
        return [_shown(one) for one in value]
    if isinstance(value, ImportedName | PurePath):
        return str(value)
    return RunTimeValue(str(value)) if isinstance(value, UnevaluatedCall | CallItem | ScriptDefinition) else value


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# ------------------------------------------------------------------------------------------------ functions


class NotCopied(Exception):
    """A function cannot be copied; the text says what it reads."""


class FunctionModule:
    """A module with functions of a script and the statements that they need, without the training."""

    def __init__(self, script: TrainingScript):
        self.script, self.reader, self.lines = script, script.reader, script.source.split("\n")
        self.statements: list[ast.stmt] = []
        self.blocked: set[str] = set()
        """Names of objects that only the running script has: its trainer and its command line."""
        frames, frame = list[ScriptScope](), script.trainer.frame
        while frame is not None:
            frames, frame = [frame, *frames], frame.parent
        for one in frames:
            self._add(one, is_last=one is frames[-1])
        self.bound = [bound_names(one) for one in self.statements]
        self.free: dict[int, set[str]] = {}
        self.kept: set[int] = set()
        """Statements of the module, by number."""
        self.written: list[str] = []

    def _add(self, frame: ScriptScope, is_last: bool) -> None:
        special = [*self.reader.trainers, *self.reader.parsed]
        for name, value in frame.names.items():
            if isinstance(value, UnevaluatedCall) and (value in special or value.name in PARSERS):
                self.blocked.add(name)
            is_constant = isinstance(value, str | int | float) and not isinstance(value, RunTimeValue)
            is_argument = frame.parent is not None and not any(name in bound_names(one) for one in frame.body)
            if is_constant and is_argument:
                assignment = ast.parse(f"{name} = {value!r}").body[0]
                assignment.col_offset = -1  # it is not in the script
                self.statements.append(assignment)
        self.statements += self._before_trainer(frame.body) if is_last else [s for s in frame.body if not _is_guard(s)]

    def _before_trainer(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Statements up to the trainer, those of blocks around it included; definitions also after it."""
        found: list[ast.stmt] = []
        for number, statement in enumerate(body):
            if any(node is self.script.trainer.node for node in ast.walk(statement)):
                blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
                inside = [] if isinstance(statement, ast.FunctionDef) else [s for block in blocks for s in block]
                found += self._before_trainer(inside)
                bound = {name for one in found for name in bound_names(one)}
                after = [one for one in body[number + 1 :] if _is_definition(one) and not bound_names(one) & bound]
                return [*found, *after]
            found.append(statement)
        return found

    def add_function(self, name: str, expression: ast.expr | None = None) -> str:
        """Copy what `name`, or `name = expression`, needs. Returns the name."""
        if expression is not None:
            self.kept |= self._needed(free_names(self._constant(expression)))
            self.written.append(f"{name} = {ast.unparse(self._constant(expression))}")
            return name
        self.kept |= self._needed({name})
        return name

    def add_text(self, name: str, body: str) -> str:
        """Write a function with this body. Returns its name."""
        while any(name in bound for bound in self.bound):
            name += "_"
        self.written.append(f"def {name}():\n" + textwrap.indent(body, "    "))
        return name

    def add_rows(self, name: str, expression: ast.expr) -> str:
        """Write a function that makes the value of an expression, such as the rows of a dataset. Returns its name."""
        result = self._constant(expression)
        needed = self._needed(free_names(result))
        names = {one for i in needed for one in bound_names(self.statements[i]) if _is_definition(self.statements[i])}
        self.kept |= self._needed(names)
        body = [self._constant(self.statements[i]) for i in sorted(needed - self.kept)]
        return self.add_text(name, ast.unparse(ast.Module([*body, ast.Return(result)], [])))

    def _needed(self, names: set[str]) -> set[int]:
        """Numbers of the statements that bind these names, and those that these need."""
        found: set[int] = set()
        names, seen = set(names), set[str]()
        while names - seen:
            for name in names - seen:
                binding = {i for i, bound in enumerate(self.bound) if name in bound}
                if name in self.blocked or not (binding or hasattr(builtins, name) or name == "__file__"):
                    raise NotCopied(f"reads {name}, which is only known when the script runs")
                seen.add(name)
                found |= binding
            names |= {name for i in found for name in self._free(i)}
        if any(getattr(self.statements[i], "level", 0) for i in found):
            raise NotCopied("imports from the package it is in")
        return found

    def _free(self, number: int) -> set[str]:
        """Names that a statement reads; stored."""
        if number not in self.free:
            self.free[number] = free_names(self._constant(self.statements[number]))
        return self.free[number]

    def _constant(self, node: Any) -> Any:
        """A copy of the node with values of the command line in place of `script_args.dataset_name`."""
        if not any(_last(one) in self.blocked for one in ast.walk(node)):
            return node
        return _Constants(self.reader, self.blocked, self.script.trainer.frame).visit(copy.deepcopy(node))

    def text(self) -> str:
        """The module; empty if nothing was copied."""
        if not self.written and not self.kept:
            return ""
        self.kept |= {i for i, one in enumerate(self.statements) if _is_future(one)}
        names = {name for i in self.kept for name in self._free(i)}
        names |= {name for text in self.written for name in free_names(ast.parse(text))}
        lines = [repr(f"Functions of {self.script.path.name}."), ""]
        for i in sorted(self.kept):
            after_import = lines[-1].startswith(("import ", "from ")) and not _is_import(self.statements[i])
            lines += [""] * after_import + self._copy(self.statements[i], names)
        for text in self.written:
            lines += ["", "", text] if text.startswith("def ") else [text]
        return "\n".join(lines) + "\n"

    def _copy(self, statement: ast.stmt, names: set[str]) -> list[str]:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            used = [one for one in statement.names if (one.asname or one.name.partition(".")[0]) in names]
            return [ast.unparse(type(statement)(**{**vars(statement), "names": used or statement.names}))]
        space = ["", ""] if _is_definition(statement) else []
        constant, end = self._constant(statement), statement.end_lineno or 0
        rest = self.lines[end - 1].encode()[statement.end_col_offset or 0 :].strip()
        is_alone = rest in (b"", b";") or rest.startswith(b"#")
        if constant is not statement or statement.col_offset or not is_alone:
            return [*space, ast.unparse(constant)]
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", ()))])
        return [*space, *self.lines[first - 1 : end]]  # as written, with its comments


class _Constants(ast.NodeTransformer):
    def __init__(self, reader: TrlReader, blocked: set[str], frame: ScriptScope | None):
        self.reader, self.blocked, self.frame = reader, blocked, frame or reader.module

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        root = node.value
        if isinstance(root, ast.Name) and root.id in self.blocked:
            before, self.reader.frame = self.reader.frame, self.frame
            value = self.reader.value(node)
            self.reader.frame = before
            if value is None or (isinstance(value, str | int | float | list) and not isinstance(value, RunTimeValue)):
                return ast.parse(repr(value), mode="eval").body
        return self.generic_visit(node)


def _is_guard(statement: ast.stmt) -> bool:
    """`if __name__ == "__main__":`."""
    return isinstance(statement, ast.If) and any(_last(node) == "__name__" for node in ast.walk(statement.test))


def _is_future(statement: ast.AST) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _is_import(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Import | ast.ImportFrom)


def _is_definition(statement: ast.AST) -> bool:
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or _is_import(statement)


def bound_names(statement: ast.AST) -> set[str]:
    """Names that a statement binds, or whose objects it changes."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Expr):
        call = statement.value
        changes = isinstance(call, ast.Call) and _last(call.func) in ("append", "extend", "insert", "update", "add")
        return {_root(call)} - {""} if changes else set()
    found: set[str] = set()
    for name, value in ast.iter_fields(statement):
        for one in value if isinstance(value, list) else [value]:
            if name in ("target", "targets", "optional_vars"):
                found |= {_root(each) for each in (one.elts if isinstance(one, ast.Tuple | ast.List) else [one])}
            elif isinstance(one, ast.stmt | ast.withitem | ast.excepthandler):
                found |= bound_names(one)
    return found - {""}


def _root(node: Any) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def free_names(node: ast.AST) -> set[str]:
    """Names that a node reads from outside of its own functions."""
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    found = {name for child in ast.iter_child_nodes(node) for name in free_names(child)}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        inner = [one for part in (node.body if isinstance(node.body, list) else [node.body]) for one in ast.walk(part)]
        outer = {name for one in inner if isinstance(one, ast.Global) for name in one.names}
        own = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        own |= {one.id for one in inner if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        own |= {name for one in inner if _is_definition(one) for name in bound_names(one)}
        return (found - own) | outer
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return found - {
            one.id for each in node.generators for one in ast.walk(each.target) if isinstance(one, ast.Name)
        }
    return found
