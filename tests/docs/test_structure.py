"""Structure of the source: packages list their files, size limits, unique names, no circular imports."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "arborl"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60
UNLISTED = ("cli", "chat/formats", "sandbox/guest_process")
"""Packages whose files are one command, one call format or one half of a process each; also those below `envs/`."""
PACKAGES = sorted(str(path.parent.relative_to(SRC)) for path in SRC.rglob("__init__.py") if path.parent != SRC)
LISTED = [name for name in PACKAGES if name not in UNLISTED and not name.startswith("envs/")]
FEATURES = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \| `(\w+)` \|$", (ROOT / "docs/concepts.md").read_text(), re.M)
"""Rows of the feature map in docs/concepts.md: file and symbol."""


@pytest.mark.parametrize("name", LISTED)
def test_a_package_lists_its_files(name: str) -> None:
    package = SRC / name
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    listed = set(re.findall(r"^ *([\w]+(?:\.py|/)) ", docstring, re.M))
    assert listed == files | folders


@pytest.mark.parametrize(("file", "symbol"), FEATURES)
def test_a_symbol_of_the_feature_map_exists(file: str, symbol: str) -> None:
    tree = ast.parse((SRC / file).read_text())
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert symbol in assigned | defined


def test_the_feature_map_is_complete() -> None:
    assert len(FEATURES) >= 30


def test_files_and_functions_are_short() -> None:
    long = []
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        if text.count("\n") > MAX_FILE_LINES:
            long.append(str(path.relative_to(SRC)))
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES:
                long.append(f"{path.relative_to(SRC)}:{node.name}")
    assert long == []


def duplicates(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: sorted(files) for name, files in names.items() if len(files) > 1}


def test_class_names_are_unique() -> None:
    names: dict[str, list[str]] = defaultdict(list)
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names[node.name].append(str(path.relative_to(SRC)))
    assert duplicates(names) == {}


def test_module_names_are_unique() -> None:
    names: dict[str, list[str]] = defaultdict(list)
    for path in SRC.rglob("*.py"):
        if path.stem != "__init__":
            names[path.stem].append(str(path.relative_to(SRC)))
    assert duplicates(names) == {}


def imports() -> dict[str, set[str]]:
    """Modules and their imports, also inside functions, without imports for the type checker."""
    files = {
        ".".join(path.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SRC.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names = set()
        for node in _executed(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        owners = set()
        for name in names:
            while name and name not in files:
                name = name.rpartition(".")[0]
            owners |= {name} - {"", "arborl", module}
        found[module] = owners
    return found


def _executed(node: ast.AST) -> list[ast.AST]:
    """All nodes except `if TYPE_CHECKING` blocks."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return []
    return [node, *(inner for child in ast.iter_child_nodes(node) for inner in _executed(child))]


def test_names_of_test_files_are_unique() -> None:
    """pytest would take one for the other."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_there_are_no_circular_imports() -> None:
    left = imports()
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}
    assert left == {}
