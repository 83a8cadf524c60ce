"""Where nothing isolates: no name spaces and no Landlock, made by a filter on a process of our own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import arborl
from arborl.errors import ConfigError
from arborl.sandbox import ActiveLevel, allow_unsafe
from arborl.sandbox.sandbox import GUEST_FOLDER

BARE = f"""
import ctypes, sys
sys.dont_write_bytecode = True
sys.path.insert(0, {str(GUEST_FOLDER)!r})
import seccomp_filter as calls
column = calls.MACHINES[calls.os.uname().machine][0]
lacking = [line for call in ((272, 97), (435, 435), (444, 444)) for line in calls._if_equal(call[column], [
    (calls.RETURN, 0, 0, calls.ERROR | calls.NO_SUCH_CALL)
])]  # unshare, clone3, landlock_create_ruleset
clone = calls._if_equal(calls.CHECKED["clone"][column], calls._argument_checks(False, 0)["clone"])
calls.filter_program = lambda alone, pid: [(calls.LOAD, 0, 0, calls.NUMBER), *lacking, *clone, calls.PERMIT]
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
calls.install(libc, alone=False)
sys.path.pop(0)
"""
TESTS = [{"function": "f", "args": [], "returns": 1}]


def bare(code: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a machine would that has neither name spaces nor Landlock."""
    return subprocess.run(
        [sys.executable, "-c", BARE + code, *args], capture_output=True, text=True, cwd=folder, timeout=120
    )


def cli(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return bare("from arborl.cli.main import main; main()", folder, *words)


def test_the_filter_makes_such_a_machine(tmp_path):
    code = "from arborl.sandbox import best_level; f = best_level(); print(f.name, f.is_isolated, f)"
    done = bare(code, tmp_path)
    assert done.stdout.startswith("rlimits False"), done
    assert "NOT ISOLATED" in done.stdout


CALLS = {
    "run_code": "from arborl.sandbox import run_code_sync; print(run_code_sync('6 * 7').value)",
    "python tool": "import asyncio\nfrom arborl.tools.library.python import python\n"
    "print(asyncio.run(python.run({'code': '6 * 7'})).content)",
    "tool server": "import asyncio\nfrom arborl.tools.remote.tool_dispatcher import ToolDispatcher\n"
    "async def f(): return await ToolDispatcher([]).execute('6 * 7')\nprint(asyncio.run(f()).value)",
    "code reward": "import asyncio\nfrom arborl.rewards.code_tests import CodeTests\nfrom arborl.types import *\n"
    f"task = Task('t', fields={{'tests': {TESTS}}})\n"
    "e = Episode('e', task, turns=[Turn(Message('assistant', 'def f(): return 1'))])\n"
    "print(42 * asyncio.run(CodeTests()(e)))",
}


@pytest.mark.parametrize("name", CALLS)
def test_code_is_refused_with_a_sentence_and_runs_where_it_is_allowed(name, tmp_path):
    refused = bare(CALLS[name], tmp_path)
    assert "sandbox.allow_unsafe=true" in refused.stdout + refused.stderr
    assert "42" not in refused.stdout
    allowed = bare("from arborl.sandbox import allow_unsafe; allow_unsafe(True)\n" + CALLS[name], tmp_path)
    assert "42" in allowed.stdout, allowed


def test_a_run_that_executes_code_does_not_start_or_says_what_isolates_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "arborl.sandbox.sandbox.best_level", lambda: ActiveLevel("rlimits", (), {"namespaces": "forbidden"})
    )
    rows = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    settings = {"data": str(tmp_path / "rows.json"), "rewards": ["equal"], "agent": "code", "stub": True}
    settings |= {"output_dir": str(tmp_path / "out"), "evaluation.tasks": 2, "track.gifs": 0, "trainer.steps": 1}
    with pytest.raises(ConfigError, match="this run executes code, and no isolation works on this machine"):
        arborl.run(**settings)
    assert not (tmp_path / "out").exists()
    done = arborl.run(**settings, **{"sandbox.allow_unsafe": True})
    assert "NOT ISOLATED" in capsys.readouterr().out
    assert "NOT ISOLATED" in json.loads((done.folder / "summary.json").read_text())["sandbox"]
    allow_unsafe(False)


def test_a_tool_server_with_python_does_not_start(tmp_path):
    refused = cli(tmp_path, "tools", "serve", "--tools", "python", "--port", "1")
    assert refused.returncode == 2
    assert "--allow-unsafe" in refused.stderr
