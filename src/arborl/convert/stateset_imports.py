"""Python scripts written for the StateSet guide: their imports become imports from `arborl`."""

from __future__ import annotations

import ast
import re

from arborl import __all__ as PUBLIC
from arborl.errors import ConfigError, did_you_mean
from arborl.stateset import SUBMODULES

PACKAGE = "stateset_agents"
_FROM = re.compile(rb"from\s+stateset_agents([\w.]*)\s+import")
_IMPORT = re.compile(rb"import\s+stateset_agents([\w.]*)(\s+as\s+\w+)?")


def rewrite_imports(source: str, where: str) -> tuple[str, int]:
    """The script with imports from `arborl`, and how many import statements changed. Nothing else changes.

    Raises:
        ConfigError: the script is not valid Python, imports nothing of `stateset_agents`, or imports an unknown name.
    """
    mark = "\ufeff" if source.startswith("\ufeff") else ""  # byte order mark
    source = source.removeprefix(mark)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not a Python script: {error}.") from error
    lines = source.encode("utf-8").splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text, problems, changed = b"".join(lines), list[str](), 0
    for node in sorted(_imports(tree), key=lambda one: -starts[one.lineno - 1] - one.col_offset):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        try:
            new = _rewritten(node, text[begin:end])
        except ConfigError as error:
            problems.insert(0, f"{where}:{node.lineno}: {error}")
            continue
        text, changed = text[:begin] + new + text[end:], changed + 1
    if problems:
        raise ConfigError("\n".join(problems))
    if not changed:
        raise ConfigError(f"{where}: it imports nothing of {PACKAGE}. Write a script that does.")
    return mark + text.decode("utf-8"), changed


def _imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] if not node.level else []
        else:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.Import | ast.ImportFrom) and any(
            module.partition(".")[0] == PACKAGE for module in modules
        ):
            found.append(node)
    return found


def _rewritten(node: ast.Import | ast.ImportFrom, text: bytes) -> bytes:
    if isinstance(node, ast.Import):
        if len(node.names) > 1:
            raise ConfigError(f"several modules in one import. Write `import {PACKAGE}` on its own line.")
        match = _IMPORT.match(text)
        alias = match[2] if match else None
        if match is None:
            raise ConfigError(f"the import of {PACKAGE} is written in an unusual form. Write it on one line.")
        path = match[1] if alias else b""  # `import a.b` binds `a`
        return b"import arborl.stateset" + path + (alias or f" as {PACKAGE}".encode())
    names = [alias.name for alias in node.names]
    path = (node.module or "").partition(".")[2]
    if names == ["*"] or any(f"{path}.{name}".lstrip(".") in _PATHS for name in names):
        return _FROM.sub(lambda match: b"from arborl.stateset" + match[1] + b" import", text, count=1)
    for name in names:
        if name not in PUBLIC:
            raise ConfigError(f"arborl has no {name!r}.{did_you_mean(name, PUBLIC)} Its names: docs/guide.md.")
    return _FROM.sub(b"from arborl import", text, count=1)


_PATHS = set(SUBMODULES) | {path.rpartition(".")[0] for path in SUBMODULES}
