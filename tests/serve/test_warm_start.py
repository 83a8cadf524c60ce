"""Python commands in forks of a template behave as processes of their own, and leave nothing behind."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections import Counter
from pathlib import Path

import pytest

from arborl.child_process import CommandFailed, run_command
from arborl.serve.warm_start import PythonCommand, WarmStart

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux")

VARIABLES = {"OPENAI_BASE_URL": "http://127.0.0.1:1/e/x/v1", "ARBORL_TASK": '{"id": "t"}'}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with `installed/`, a site-packages folder of the interpreter."""
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "user" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "installed").symlink_to(site)
    return tmp_path


def environment(folder):
    """PYTHONUSERBASE makes a folder of the test one of installed packages."""
    return {**os.environ, "PYTHONUSERBASE": str(folder / "user"), "PYTHONPATH": str(folder / "installed")}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


async def outcome(running):
    """What a command printed, or how it failed."""
    try:
        return (await running).decode()
    except CommandFailed as error:
        return f"failed: {error}"


def run_warm(folder, words, times=1, stdin=b"the question\n", variables=VARIABLES, between=lambda: None):
    """Outcomes of a command that is run several times, and the reports of its templates at the end."""

    async def run():
        warm, found = WarmStart(), []
        try:
            for number in range(times):
                if number:
                    between()
                found.append(await outcome(warm.run(words, stdin, environment(folder), variables)))
            return found, [template.report for template in warm._templates.values()]
        finally:
            await warm.close()

    return asyncio.run(run())


def run_cold(folder, words, stdin=b"the question\n", variables=VARIABLES):
    return asyncio.run(outcome(run_command(words, stdin, {**environment(folder), **variables})))


def is_running(mark):
    return mark in subprocess.run(["ps", "axeww", "-o", "pid,args"], capture_output=True, text=True).stdout


SCRIPTS = {
    "surroundings": """
        import json, os, sys
        main = sys.modules["__main__"]
        names = ("__name__", "__file__", "__doc__", "__package__", "__spec__", "__cached__")
        print(json.dumps({
            **{name: globals().get(name, "missing") for name in names}, "loader": repr(__loader__)[:55],
            "is_main": main.__dict__ is globals(), "globals": sorted(globals()), "argv": sys.argv, "path": sys.path,
            "orig_argv": getattr(sys, "orig_argv", None), "flags": str(sys.flags), "executable": sys.executable,
            "cwd": os.getcwd(), "environment": dict(os.environ), "stdin": sys.stdin.read(),
            "descriptors": [os.fstat(number).st_mode for number in (0, 1, 2)], "open": len(os.listdir("/proc/self/fd")),
            "streams": [[one.encoding, one.errors, one.line_buffering, one.write_through, one.seekable(), one.isatty()]
                        for one in (sys.stdin, sys.stdout, sys.stderr)],
            "builtins": repr(__builtins__),
            "group": os.getpgid(0) == os.getppid(), "session": os.getsid(0) == os.getppid(), "umask": os.umask(0),
        }, indent=1, sort_keys=True))
    """,
    "exit_code": "import sys\nprint('before')\nsys.exit(3)",
    "exit_text": "import sys\nsys.exit('the last words')",
    "exit_none": "import sys\nprint('out', end='')\nsys.exit()",
    "exit_large": "raise SystemExit(700)",
    "exit_at_once": "import os\nprint('lost')\nos._exit(4)",
    "exception": "import json\ndef parse():\n    return json.loads('{')\n\ntry:\n    parse()\nfinally:\n    x = 1\n",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('bad') from error\n",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('bad')\n",
    "group": "raise BaseException('base')",
    "syntax": "print('before')\nthis is not Python\n",
    "encoding": "# -*- coding: latin-1 -*-\nprint(ascii('ä'))\n",
    "missing": "import json, no_such_module_anywhere\n",
    "missing_name": "from json import no_such_name\n",
    "hook": "import sys\nsys.excepthook = lambda *error: print('hook', error[0].__name__, file=sys.stderr)\n1 / 0\n",
    "broken_hook": "import sys\ndef hook(*error):\n    raise OSError('hook')\nsys.excepthook = hook\n1 / 0\n",
    "signal": "import os\nos.kill(os.getpid(), 15)\n",
    "interrupt": "import os, time\nprint('a')\nos.kill(os.getpid(), 2)\ntime.sleep(60)\n",
    "atexit": "import atexit, sys\natexit.register(print, 'end', file=sys.stderr)\nprint('a', file=sys.stderr)\n1/0\n",
    "atexit_good": "import atexit\natexit.register(print, 'at exit')\nprint('body', end=' ')\n",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()\n",
    "unflushed": "import sys\nsys.stdout.write('no newline')\n",
    "closed": "import sys\nprint('a')\nsys.stdout.close()\n",
    "closed_descriptor": "import os\nprint('a')\nos.close(1)\n",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__)\n",
    "spawn": """
        import multiprocessing
        def double(number):
            return 2 * number
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """,
    "asyncio": "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    print('ran')\nasyncio.run(main())\n",
    "annotations": "x: int = 1\nprint(__annotations__)\n",
    "future": "print(eval('1'), (lambda: 0).__code__.co_flags)\n",
    "warning": "import warnings\nwarnings.warn('old', DeprecationWarning)\nraise SystemExit(1)\n",
    "subprocess": "import subprocess\nprint(subprocess.check_output(['cat'], text=True))\n",
    "large": "import sys\nprint(len(sys.stdin.read()))\nprint('x' * 300_000)\n",
    "reads_nothing": "print('done')\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_outcome_of_a_process_of_its_own(folder, name):
    words = [sys.executable, write(folder / "script.py", SCRIPTS[name]), "one", "--two", ""]
    stdin = b"line\n" * 100_000 if name == "large" else b"the question\n"
    found, reports = run_warm(folder, words, 2, stdin)
    assert found == [run_cold(folder, words, stdin)] * 2
    assert reports


@pytest.mark.parametrize(
    "words",
    [
        ["python", "script.py"],
        ["python", "./script.py", "-x"],
        ["python", "sub/../script.py"],
        ["python", "link.py"],
        ["python", "-u", "script.py"],
        ["python", "-OB", "-W", "error", "-X", "utf8", "script.py"],
        ["python", "-I", "script.py"],
        ["python", "-m", "script", "one"],
        ["python", "-m", "package", "one"],
        ["python", "-m", "package.inner.module"],
        ["python", "-m", "no_such_module"],
        ["python", "-m", "package.absent"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("last", ["print(__debug__)", "1 / 0"])
def test_ways_to_name_a_program_have_the_outcome_of_a_process_of_its_own(folder, words, last):
    text = f"{textwrap.dedent(SCRIPTS['surroundings'])}\n{last}\n"
    for path in ("script.py", "package/__main__.py", "package/inner/module.py", "elsewhere/script.py"):
        write(folder / path, text if "__main__" not in path else f"from . import helper\n{text}")
    for path in ("package/__init__.py", "package/inner/__init__.py", "package/helper.py"):
        write(folder / path, "import json\n")
    (folder / "sub").mkdir()
    (folder / "link.py").symlink_to("elsewhere/script.py")
    words = [sys.executable, *words[1:]]
    found, reports = run_warm(folder, words, 2)
    assert found == [run_cold(folder, words)] * 2
    assert reports


def test_other_commands_are_run_as_they_are(folder):
    write(folder / "script.py", "print(__name__)")
    others = [
        ["sh", "-c", "cat"],
        [sys.executable, "-c", "print(1)"],
        [sys.executable],
        [sys.executable, "-", "x"],
        [sys.executable, "-i", "script.py"],
        [sys.executable, "absent.py"],
        [sys.executable, "."],
    ]
    for words in others:
        assert PythonCommand.parse(words) is None
        found, reports = run_warm(folder, words)
        assert (found, reports) == ([run_cold(folder, words)], [])


COUNTED = "import os\nwith open(os.environ['COUNTS'], 'a') as file:\n    file.write(__name__ + '\\n')\n"


def test_installed_packages_are_imported_once_and_modules_of_the_program_in_each_episode(folder, monkeypatch):
    monkeypatch.setenv("COUNTS", str(folder / "counts"))
    for name in ("first", "second", "third"):
        write(folder / "installed" / name / "__init__.py", COUNTED)
    write(folder / "own.py", f"{COUNTED}import second\n")
    write(folder / "script.py", "import first\ntry:\n    import third.absent\nexcept ImportError: pass\nimport own\n")
    write(folder / "installed" / "third" / "absent.py", "")
    found, _ = run_warm(folder, [sys.executable, "script.py"], 4)
    assert found == [""] * 4
    assert Counter((folder / "counts").read_text().split()) == {"first": 1, "third": 1, "own": 4, "second": 4}


def test_packages_that_own_modules_import_are_found_in_them(folder):
    for name in ("one", "two", "three", "four"):
        write(folder / "installed" / f"{name}.py", "")
    write(folder / "own" / "__init__.py", "from .part import x\nfrom . import other\n")
    write(folder / "own" / "part.py", "import logging\nimport one\nlog = logging.getLogger(__name__)\nx = 1\n")
    write(folder / "own" / "other.py", "from two import *\nif __name__ == '__main__':\n    x()\n")
    write(folder / "script.py", "from own import x\nimport three as t\nif t:\n    pass\nimport four\n")
    (found,), (report,) = run_warm(folder, [sys.executable, "script.py"])
    assert found == ""
    assert {"one", "two", "three", "four"} & set(report["modules"]) == {"one", "two", "three"}
    assert report["stop"] == f"{folder}/script.py, line 3"


@pytest.mark.parametrize(
    "line",
    ["os.environ['SETTING'] = '1'", "os.environ.setdefault('SETTING', '1')", "x = os.environ.update(SETTING='1')"],
)
def test_a_statement_that_may_affect_an_import_is_executed_before_it(folder, line):
    write(folder / "installed" / "reader.py", "import os\nVALUE = os.environ.get('SETTING')\n")
    write(folder / "script.py", f"import os\n{line}\nimport reader\nprint(reader.VALUE)\n")
    found, _ = run_warm(folder, [sys.executable, "script.py"], 2)
    assert found == ["1\n"] * 2


UNSHARED = {
    "reads OPENAI_BASE_URL": "import os\nVALUE = os.environ.get('OPENAI_BASE_URL', 'https://example.com')\n",
    "reads ARBORL_TASK, OPENAI_BASE_URL": "import os\nVALUE = os.environ.copy()['OPENAI_BASE_URL']\n",
    "prints to standard output": "import os\nprint('welcome')\nVALUE = None\n",
    "import fails (KeyError": "import os\nVALUE = {'127.0.0.1:1/e/x/v1': 1}[os.environ['OPENAI_BASE_URL'][7:]]\n",
    "file or connection open": "import os\nVALUE = os.open('/dev/null', 0) > 0\n",
    "temporary file": "import tempfile\nVALUE = bool(tempfile.mkdtemp(dir='.'))\n",
    "starts threads": "import threading\nVALUE, EVENT = None, threading.Event()\n"
    "threading.Thread(target=EVENT.wait, daemon=True).start()\n",
    "not an installed package": "import own\nVALUE = own\n",
}


@pytest.mark.parametrize("reason", UNSHARED)
def test_a_package_that_processes_cannot_share_is_imported_in_each(folder, reason):
    write(folder / "installed" / "special.py", UNSHARED[reason])
    write(folder / "installed" / "usual.py", "")
    write(folder / "own.py", "")
    words = [sys.executable, write(folder / "script.py", "import special, usual\nprint(repr(special.VALUE)[:60])\n")]
    found, (report,) = run_warm(folder, words, 2)
    assert found == [run_cold(folder, words)] * 2
    assert list(report["skipped"]) == ["special"]
    assert reason in report["skipped"]["special"]
    assert "usual" in report["modules"]
    assert "special" not in report["modules"]


def test_a_library_that_ends_its_threads_at_a_fork_is_shared(folder):
    """OpenBLAS, which numpy uses, starts threads at its import."""
    text = "import numpy\nprint(numpy.ones((300, 300)).dot(numpy.ones((300, 300))).sum())\n"
    found, (report,) = run_warm(folder, [sys.executable, write(folder / "script.py", text)], 2)
    assert found == ["27000000.0\n"] * 2
    assert (report["skipped"], "numpy" in report["modules"]) == ({}, True)


def test_random_numbers_differ_between_episodes(folder):
    text = "import random, uuid\nimport numpy\nprint(random.random(), numpy.random.rand(), uuid.uuid4())\n"
    found, _ = run_warm(folder, [sys.executable, write(folder / "script.py", text)], 3)
    for values in zip(*(line.split() for line in found), strict=True):
        assert len(set(values)) == 3


def test_a_program_whose_template_does_not_start_is_run_as_it_is_with_one_warning(folder, caplog):
    write(folder / "select.py", "NAME = 'mine'\n")
    write(folder / "script.py", "import select\nprint(select.NAME)\n")
    with caplog.at_level(logging.WARNING):
        found, reports = run_warm(folder, [sys.executable, "script.py"], 3)
    assert (found, reports) == (["mine\n"] * 3, [])
    assert [record.getMessage().count("standard module 'select'") for record in caplog.records] == [1]


def test_an_interpreter_that_is_none_is_reported_as_without_a_template(folder, caplog):
    fake = write(folder / "python3", "#!/bin/sh\necho no interpreter >&2\nexit 5\n")
    os.chmod(fake, 0o755)
    words = [fake, write(folder / "script.py", "")]
    found, _ = run_warm(folder, words, 2)
    assert found == [run_cold(folder, words)] * 2 == ["failed: no interpreter (exit code 5)"] * 2
    assert len(caplog.records) == 1


def test_changes_of_the_program_apply_to_the_next_episode(folder):
    script, own = folder / "script.py", folder / "own.py"
    write(own, "VALUE = 1\n")
    write(script, "import own\nprint('old', own.VALUE)\n")

    def change():
        write(own, "VALUE = 22\n")
        write(script, "import os\nos.environ['SETTING'] = '1'\nimport reader, own\nprint(reader.VALUE, own.VALUE)\n")

    write(folder / "installed" / "reader.py", "import os\nVALUE = os.environ.get('SETTING')\n")
    found, (report,) = run_warm(folder, [sys.executable, "script.py"], 2, between=change)
    assert found == ["old 1\n", "1 22\n"]
    assert report["stop"].endswith("script.py, line 2")


def test_changes_of_environment_and_folder_apply_to_the_next_episode(folder, monkeypatch):
    script = write(folder / "script.py", "import os\nprint(os.getcwd(), os.environ.get('ADDED'))\n")
    (folder / "other").mkdir()

    def change():
        monkeypatch.setenv("ADDED", "x")
        monkeypatch.chdir(folder / "other")

    found, _ = run_warm(folder, [sys.executable, script], 2, between=change)
    assert found == [f"{folder} None\n", f"{folder}/other x\n"]


def test_a_script_that_was_removed_fails_as_in_a_process_of_its_own(folder):
    script = folder / "script.py"
    words = [sys.executable, write(script, "print(1)")]
    found, _ = run_warm(folder, words, 2, between=script.unlink)
    assert found == ["1\n", run_cold(folder, words)]
    assert "can't open file" in found[1]


def test_many_episodes_at_once_get_their_own_input_and_variables(folder):
    text = "import os, sys\nprint(sys.stdin.read(), os.environ['ARBORL_TASK'], os.getpid())\n"
    words = [sys.executable, write(folder / "script.py", text)]

    async def run():
        warm, slots = WarmStart(), asyncio.Semaphore(32)

        async def one(number):
            async with slots:
                variables = {"ARBORL_TASK": f"task{number}"}
                return await warm.run(words, f"question{number}".encode(), environment(folder), variables)

        try:
            return await asyncio.gather(*(one(number) for number in range(64)))
        finally:
            await warm.close()

    found = [output.decode().split() for output in asyncio.run(run())]
    assert [words[:2] for words in found] == [[f"question{number}", f"task{number}"] for number in range(64)]
    assert len({words[2] for words in found}) == 64


SLEEPS = """
import os, subprocess, sys, time
mark = sys.stdin.read()
for session in (False, True):
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {mark}"], start_new_session=session)
open(sys.argv[1], "w").write(f"{os.getpid()} {os.getppid()}")
time.sleep(float(sys.argv[2]))
"""


async def started(path):
    """The process ids that a program of SLEEPS writes."""
    while not Path(path).exists() or not Path(path).read_text():
        await asyncio.sleep(0.02)
    return [int(pid) for pid in Path(path).read_text().split()]


def test_a_cancelled_episode_ends_its_processes_and_no_others(folder):
    marks = [uuid.uuid4().hex, uuid.uuid4().hex]
    script = write(folder / "script.py", SLEEPS.replace("sys.argv[1]", "mark"))

    async def run():
        warm, words = WarmStart(), [sys.executable, script, "", "600"]
        first, second = (asyncio.create_task(warm.run(words, mark.encode(), environment(folder), {})) for mark in marks)
        for mark in marks:
            await started(mark)
        first.cancel()
        await asyncio.wait([first])
        found = [is_running(f"# {mark}") for mark in marks]
        await warm.close()
        await asyncio.wait([second])
        return found, str(second.exception())

    assert asyncio.run(run()) == ([False, True], "its supervisor was killed")
    assert not is_running(f"# {marks[1]}")


def test_daemons_of_a_program_end_with_it(folder):
    mark = uuid.uuid4().hex
    words = [sys.executable, write(folder / "script.py", SLEEPS), "pids", "0"]
    found, _ = run_warm(folder, words, 1, mark.encode())
    assert (found, is_running(f"# {mark}")) == ([""], False)


def child_of(pid):
    (child,) = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(pid)], text=True).split()
    return int(child)


def test_a_template_that_was_killed_is_started_again(folder):
    words = [sys.executable, write(folder / "script.py", "print('fine')\n")]

    async def run():
        warm, found, templates = WarmStart(), [], []
        try:
            for _ in range(2):
                found.append(await outcome(warm.run(words, b"", environment(folder), {})))
                templates += warm._templates.values()
                supervisor = child_of(templates[-1].child.pid)
                os.kill(child_of(supervisor), signal.SIGKILL)
            found.append(await outcome(warm.run(words, b"", environment(folder), {})))
            return found, len(set(templates))
        finally:
            await warm.close()

    assert asyncio.run(run()) == (["fine\n"] * 3, 2)


def test_a_template_that_dies_again_and_again_is_given_up_with_one_warning(folder, caplog, monkeypatch):
    monkeypatch.setattr("arborl.serve.warm_start.MAX_DEATHS", 2)
    write(folder / "script.py", "print('fine')\n")

    async def run():
        warm, found = WarmStart(), []
        try:
            for _ in range(4):
                found.append(await outcome(warm.run([sys.executable, "script.py"], b"", environment(folder), {})))
                for template in warm._templates.values():
                    template.child.kill()
                    await template.child.wait()
            return found, len(warm._templates)
        finally:
            await warm.close()

    assert asyncio.run(run()) == (["fine\n"] * 4, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_episode_whose_supervisor_is_killed_fails_and_its_process_ends(folder):
    words = [sys.executable, write(folder / "script.py", SLEEPS), "pids", "600"]

    async def run():
        warm = WarmStart()
        try:
            running = asyncio.create_task(outcome(warm.run(words, b"x", environment(folder), {})))
            pid, supervisor = await started("pids")
            os.kill(supervisor, signal.SIGKILL)
            found = await running
            while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
                await asyncio.sleep(0.02)
            return found
        finally:
            await warm.close()

    assert asyncio.run(run()) == "failed: its supervisor was killed"


def test_an_episode_that_stopped_its_supervisor_can_be_cancelled(folder, monkeypatch):
    monkeypatch.setattr("arborl.serve.warm_start.CLOSE_SECONDS", 0.3)
    text = SLEEPS.replace("time.sleep(float", "os.kill(os.getppid(), 19); time.sleep(float")
    words = [sys.executable, write(folder / "script.py", text), "pids", "600"]

    async def run():
        warm = WarmStart()
        try:
            running = asyncio.create_task(warm.run(words, b"x", environment(folder), {}))
            pid, _ = await started("pids")
            running.cancel()
            await asyncio.wait([running])
            while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
                await asyncio.sleep(0.02)
            return running.cancelled()
        finally:
            await warm.close()

    assert asyncio.run(run())


RUNNER = """
import asyncio, json, sys
from arborl.serve.warm_start import WarmStart

words, stdin = json.loads(sys.argv[1])
asyncio.run(WarmStart().run(words, stdin.encode(), json.loads(sys.argv[2]), {}))
"""


def test_a_run_that_is_killed_leaves_no_process(folder):
    mark = uuid.uuid4().hex
    words = [sys.executable, write(folder / "script.py", SLEEPS), "pids", "600"]
    variables = json.dumps({**environment(folder), "MARK": mark})
    runner = write(folder / "runner.py", RUNNER)
    source = str(Path(__file__).parents[2] / "src")
    run = subprocess.Popen(
        [sys.executable, runner, json.dumps([words, mark]), variables], env={**os.environ, "PYTHONPATH": source}
    )
    asyncio.run(started("pids"))
    assert is_running(f"MARK={mark}")  # the environment of the template
    run.kill()
    run.wait()
    while is_running(mark):
        pass


def test_nothing_is_left_open_after_the_end(folder):
    words = [sys.executable, write(folder / "script.py", "import sys\nprint(sys.stdin.read())")]
    run_warm(folder, words, 1)
    mark, before = uuid.uuid4().hex, set(os.listdir("/proc/self/fd"))
    os.environ["MARK"] = mark
    try:
        run_warm(folder, words, 3)
    finally:
        del os.environ["MARK"]
    assert set(os.listdir("/proc/self/fd")) == before
    assert not is_running(f"MARK={mark}")


def test_an_end_of_the_run_during_the_imports_leaves_no_process(folder):
    mark = uuid.uuid4().hex
    write(folder / "installed" / "slow.py", "import os, time\nopen('pids', 'w').write('1')\ntime.sleep(600)\n")
    words = [sys.executable, write(folder / "script.py", "import slow")]

    async def run():
        warm = WarmStart()
        tasks = [asyncio.create_task(warm.run(words, b"", {**environment(folder), "MARK": mark}, {})) for _ in range(3)]
        await started("pids")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await warm.close()

    asyncio.run(run())
    assert not is_running(f"MARK={mark}")
