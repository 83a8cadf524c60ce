"""The house: every room names its files, what one looks for is where the map says, and no circle of imports."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "arborl"
ONE_EACH = ("cli", "chat/formats", "sandbox/inside")
"""Folders whose files are one verb, one call format, one half of a process each; so are those below `envs/`."""
ROOMS = sorted(str(path.parent.relative_to(SRC)) for path in SRC.rglob("__init__.py") if path.parent != SRC)
NAMED = [room for room in ROOMS if room not in ONE_EACH and not room.startswith("envs/")]
MAP = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \| `(\w+)` \|$", (ROOT / "docs/concepts.md").read_text(), re.M)


@pytest.mark.parametrize("name", NAMED)
def test_a_room_names_its_files(name: str) -> None:
    room = SRC / name
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}
    named = set(re.findall(r"^    ([\w]+(?:\.py|/)) ", said, re.M))
    assert named == files | folders


@pytest.mark.parametrize(("file", "symbol"), MAP)
def test_what_the_map_says_is_there(file: str, symbol: str) -> None:
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


def test_the_map_has_the_features_that_people_look_for() -> None:
    assert len(MAP) >= 30


def test_no_file_is_long_and_no_function_either() -> None:
    long = []
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        if text.count("\n") > 400:
            long.append(str(path))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
                long.append(f"{path}:{node.name}")
    assert long == []


def imports() -> dict[str, set[str]]:
    """Each module and those it imports, in functions too."""
    files = {
        ".".join(path.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SRC.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names = set()
        for node in _run(ast.parse(path.read_text())):
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


def _run(node: ast.AST) -> list[ast.AST]:
    """What is run of a module, now or later; imports for the type checker are not."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return []
    return [node, *(inner for child in ast.iter_child_nodes(node) for inner in _run(child))]


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest takes the second for the first, and in `make test` only where the packages of both are installed."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_there_is_no_circle_of_imports() -> None:
    left = imports()
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}
    assert left == {}
