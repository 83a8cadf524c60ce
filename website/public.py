"""The page of the public names of `arborl`, from their source: signatures, fields and docstrings as they are written.

The source is read and nothing of it imported, so the page is made at once, and is the same on every version of Python.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from arborl import _MODULES

SOURCE = Path(__file__).parents[1] / "src"
HEAD = """# Public names

What `from arborl import …` has. Other names may change without notice; [packages.md](packages.md) lists them.

This page is generated: `python -m website`.
"""
Definition = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """The whole page: functions and classes in the order of the alphabet."""
    return "\n".join([HEAD, *(line for name in sorted(_MODULES, key=str.lower) for line in _name(name))])


def _name(name: str) -> Iterator[str]:
    module, node = _found(_MODULES[name], name)
    yield f"## {name}\n"
    if isinstance(node, ast.ClassDef):
        yield from _class(module, node)
    elif isinstance(node, Definition):
        yield f"```py\n{_signature(node)}\n```\n"
        yield _prose(node)
    else:
        yield f"```py\n{ast.unparse(node)}\n```\n"


def _class(module: str, node: ast.ClassDef) -> Iterator[str]:
    """How it is made, what it says of itself, its fields and its methods, inherited ones too."""
    kinds = list(_lineage(module, node))
    methods = {one.name: one for kind in kinds for one in kind.body if isinstance(one, Definition)}
    fields = {name: output for kind in kinds for name, output in _fields(kind)}
    if "__init__" in methods and not any(kind.name == "Config" for kind in kinds):
        yield f"```py\n{_signature(methods['__init__'], node.name)}\n```\n"
        fields = {name: output for name, output in fields.items() if output[1]}
    yield _prose(node)
    if fields:
        yield "| field | |\n|---|---|"
        yield from (f"| `{_cell(written)}` | {_cell(output)} |" for written, output in fields.values())
        yield ""
    for name, method in methods.items():
        if not name.startswith("_"):
            output = ast.get_docstring(method) or ""
            yield f"- `{_signature(method)}`" + (f": {_cell(output.split(chr(10) * 2)[0])}" if output else "")
    yield ""


def _lineage(module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """The classes of ours that a class comes from, eldest first, and the class itself."""
    for base in node.bases:
        if isinstance(base, ast.Name) and (found := _found(module, base.id, missing=True)):
            home, above = found
            if isinstance(above, ast.ClassDef):
                yield from _lineage(home, above)
    yield node


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, tuple[str, str]]]:
    """Annotated names of a class, each as it is written and with the docstring under it."""
    for place, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            after = node.body[place + 1] if place + 1 < len(node.body) else None
            output = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                output = str(after.value.value)
            default, described = _default(one.value)
            if "ClassVar" not in (kind := ast.unparse(one.annotation)) and one.target.id != "model_config":
                yield one.target.id, (f"{one.target.id}: {kind}{default}", output or described)


def _default(value: ast.expr | None) -> tuple[str, str]:
    """What a field is without being given, as written, and the description of a pydantic `Field`."""
    if value is None:
        return "", ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Field", "field"):
        given = {word.arg: word.value for word in value.keywords}
        described = given.get("description")
        output = str(described.value) if isinstance(described, ast.Constant) else ""
        first = given.get("default", value.args[0] if value.args else None)
        return (f" = {ast.unparse(first)}" if first is not None else ""), output
    return f" = {ast.unparse(value)}", ""


def _signature(node: Definition, called: str = "") -> str:
    """`name(arguments) -> result`, without `self`; a property as `name -> result`."""
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and not called else ""
    if any(ast.unparse(one).endswith("property") for one in node.decorator_list):
        return f"{node.name}{result}"
    before = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{before}{called or node.name}({arguments}){result}"


def _prose(node: ast.ClassDef | Definition) -> str:
    """The docstring: its prose, then `Args:` as a list and `Example:` as code."""
    text = ast.get_docstring(node) or ""
    parts = re.split(r"^(Args|Returns|Raises|Example|Examples):\n", text, flags=re.MULTILINE)
    shown = [parts[0].strip()]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        lines = inspect.cleandoc("\n" + body).strip()
        if title.startswith("Example"):
            shown.append(f"```py\n{lines}\n```")
        else:
            items = re.findall(r"^(\*{0,2}[\w, ]+): (.*(?:\n +.*)*)", lines, flags=re.MULTILINE)
            rows = [f"- `{name}`: {' '.join(output.split())}" for name, output in items]
            shown.append("\n".join(rows) if rows else " ".join(lines.split()))
    return "\n\n".join(part for part in shown if part) + "\n"


def _found(module: str, name: str, missing: bool = False) -> Any:
    """The module that defines what another calls so, and the definition; with `missing`, None for what is not ours."""
    tree = _parsed(module)
    named = [node for node in tree.body if getattr(node, "name", "") == name or _assigned(node) == name]
    if named:
        return module, named[-1]  # the last: those before are overloads
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("arborl."):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _found(node.module or "", alias.name, missing)
    if missing:
        return None
    raise LookupError(f"{module} neither defines nor imports {name!r} from arborl")


def _assigned(node: ast.stmt) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


@cache
def _parsed(module: str) -> ast.Module:
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
