"""The template process of a Python command: it imports the packages of the command once, then forks for each episode.

`python [OPTIONS] python_template.py JSON` is run by the interpreter of the command, Python 3.9 or newer, and imports
the standard library only. It finds the imports of the program with `ast`, executes those of installed packages, and
reports over a socket. For each episode it gets three descriptors there (standard input, standard output, a socket) and
forks a supervisor, which reads the request from the socket and forks the process of the episode. That process returns
to the top of this script, becomes `__main__` of the program, and ends as an interpreter ends: `atexit`, threads,
buffers, exit code.

What a program can notice is kept as in a process of its own:

- The program and its own modules (those outside the standard library and `site-packages`) are executed in each episode.
- Imports are executed up to the first statement that could affect a later import, such as `os.environ["A"] = "b"`.
- A package that cannot be shared is imported in each episode: see `ImportCheck`.
"""

# ruff: noqa: E402 (nothing may be imported from the folder of this file)
from __future__ import annotations

import sys

STARTUP_MODULES = set(sys.modules)
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
    del sys.path[0]  # the folder of this file

import ast
import atexit
import builtins
import gc
import importlib.util
import json
import os
import select
import signal
import site
import socket
import sysconfig
import threading
import types
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PLACEHOLDER = "http://127.0.0.1:9/template"
"""Value of the variables of an episode in the template: nothing listens there."""
MAX_RESTARTS = 8
INERT_CALLS = (
    "getLogger", "TypeVar", "ParamSpec", "NewType", "namedtuple", "compile", "Path", "resolve", "abspath", "dirname",
    "join", "get", "getenv", "set", "frozenset", "dict", "list", "tuple", "range",
)  # fmt: skip
"""Names of functions whose call in an assignment has no effect on imports."""
INERT_STATEMENTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)


class InChild(BaseException):
    """Raised in the process of an episode, to leave the functions of the template."""

    def __init__(self, request: dict[str, Any]):
        self.request = request


# ------------------------------------------------------------------------------------------------ what to import


class ImportScan:
    """Imports of installed packages that a program executes at its start, in order, found without executing it."""

    def __init__(self) -> None:
        self.imports: list[tuple[str, tuple[str, ...]]] = []
        self.files: dict[str, tuple[int, int]] = {}
        """Files of the program that were read, with time and size."""
        self.stop: str | None = None
        """The statement after which imports were not searched."""
        paths = sysconfig.get_paths()
        folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")] + _site_folders()
        self.installed = tuple({os.path.realpath(folder) + os.sep for folder in folders})

    def read_program(self, path: str) -> None:
        self._read(path, "", is_main=True)

    def read_module(self, name: str) -> str | None:
        """Read the program of `python -m name`; returns its full name, or None if it is not found."""
        specs = list(self._specs(name))
        if len(specs) <= name.count("."):
            return None
        if specs[-1].submodule_search_locations is not None:
            return self.read_module(f"{name}.__main__")
        package = name.rpartition(".")[0]
        if package:
            self._add(package, ())
        if specs[-1].origin and not self.stop:
            self._read(specs[-1].origin, package, is_main=True)
        return name

    def _read(self, path: str, package: str, is_main: bool = False) -> None:
        if path in self.files or not path.endswith(".py"):
            return
        try:
            status = os.stat(path)
            self.files[path] = (status.st_mtime_ns, status.st_size)
            with open(path, "rb") as file:
                tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError, RecursionError):
            self.stop = f"{path} cannot be read"
            return
        self._statements(tree.body, path, package, is_main)

    def _statements(self, body: list[ast.stmt], path: str, package: str, is_main: bool) -> None:
        for statement in body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self._add(alias.name, ())
            elif isinstance(statement, ast.ImportFrom):
                self._add(_absolute_name(statement, package), tuple(alias.name for alias in statement.names))
            elif isinstance(statement, ast.Try):
                self._statements(statement.body, path, package, is_main)
            elif not (_is_inert(statement) or _is_skipped(statement, is_main)):
                self.stop = self.stop or f"{path}, line {statement.lineno}"
            if self.stop:
                return

    def _add(self, name: str, names: tuple[str, ...]) -> None:
        """One import: of an installed package, or else the imports of that file of the program."""
        specs = list(self._specs(name))
        if not specs or self.stop:
            return
        if all(self._is_installed(spec) for spec in specs):
            self.imports.append((name, names))
            return
        if len(specs) > name.count("."):
            for each in names:
                spec = _find(f"{name}.{each}", specs[-1])
                specs += [spec] if spec else []
        for spec in specs:
            if spec.origin and not self._is_installed(spec) and not self.stop:
                is_package = spec.submodule_search_locations is not None
                self._read(spec.origin, spec.name if is_package else spec.name.rpartition(".")[0])

    def _specs(self, name: str) -> Iterator[ModuleSpec]:
        """Specifications of a module and its parents, without an import of these."""
        spec: ModuleSpec | None = None
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            spec = _find(".".join(parts[:depth]), spec)
            if spec is None:
                return
            yield spec

    def _is_installed(self, spec: ModuleSpec) -> bool:
        if spec.origin in ("built-in", "frozen"):
            return True
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        return all(os.path.realpath(place).startswith(self.installed) for place in places)


def _find(name: str, parent: ModuleSpec | None) -> ModuleSpec | None:
    try:
        if parent is None:
            return importlib.util.find_spec(name) if name and "." not in name else None
        return PathFinder.find_spec(name, parent.submodule_search_locations or [])
    except (ImportError, ValueError, AttributeError):
        return None


def _site_folders() -> list[str]:
    try:
        return [*site.getsitepackages(), site.getusersitepackages()]
    except AttributeError:  # -S, or an old virtualenv
        return []


def _absolute_name(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - statement.level + 1]
    return ".".join([*parents, *([statement.module] if statement.module else [])])


def _is_inert(statement: ast.stmt) -> bool:
    """Whether a statement cannot change what a later import does."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        calls = [node for node in ast.walk(statement) if isinstance(node, (ast.Call, ast.Await, ast.NamedExpr))]
        return all(isinstance(one, ast.Name) for one in targets) and all(_is_inert_call(call) for call in calls)
    return isinstance(statement, INERT_STATEMENTS)


def _is_inert_call(node: ast.AST) -> bool:
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", None)) in INERT_CALLS


def _is_skipped(statement: ast.stmt, is_main: bool) -> bool:
    """`if TYPE_CHECKING:`, and `if __name__ == "__main__":` in a module."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    test = ast.dump(statement.test)
    return "'TYPE_CHECKING'" in test or ("'__name__'" in test and "'__main__'" in test and not is_main)


# ------------------------------------------------------------------------------------------------ imports


class RecordedVariables(dict):  # type: ignore[type-arg]
    """Environment variables, with a record of those of the episode that are read."""

    def __init__(self, variables: dict[Any, Any], recorded: set[Any]):
        super().__init__(variables)
        self.recorded = recorded
        self.read: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        if key in self.recorded:
            self.read.add(key)
        return super().__getitem__(key)


class ImportCheck:
    """Executes imports and finds those that later processes cannot share. An import is not shared if it

    - fails, or prints to standard output,
    - reads a variable of the episode, such as OPENAI_BASE_URL,
    - leaves a thread running that does not end at a fork, or a descriptor open, or makes a temporary file or folder,
    - executes a module of the program.
    """

    def __init__(self, scan: ImportScan, variables: list[str]):
        self.scan, self.temporary = scan, 0
        self.environment = os.environ._data  # type: ignore[attr-defined]
        self.recorded = RecordedVariables(self.environment, {os.fsencode(name) for name in variables})
        os.environ._data = self.recorded  # type: ignore[attr-defined]
        self.is_active = True
        self.stdout, (self.reading, self.writing) = os.dup(1), os.pipe()
        os.set_blocking(self.reading, False)
        os.set_blocking(self.writing, False)
        os.dup2(self.writing, 1)
        sys.addaudithook(self._audit)

    def close(self) -> None:
        self.is_active = False
        self.environment.update(self.recorded)
        for name in set(self.environment) - set(self.recorded):
            del self.environment[name]
        os.environ._data = self.environment  # type: ignore[attr-defined]
        os.dup2(self.stdout, 1)
        for descriptor in (self.stdout, self.reading, self.writing):
            os.close(descriptor)

    def execute(self, name: str, names: tuple[str, ...]) -> str | None:
        """Import a module; returns the reason if it cannot be shared."""
        descriptors, modules = _descriptors(), set(sys.modules)
        try:
            __import__(name, {}, {}, list(names), 0)
        except BaseException as error:
            return f"its import fails ({type(error).__name__}: {error})"[:300]
        try:
            sys.stdout.flush()
        except OSError:
            return "it prints to standard output"
        if select.select([self.reading], [], [], 0)[0]:
            return "it prints to standard output"
        if self.recorded.read:
            return f"it reads {', '.join(sorted(map(os.fsdecode, self.recorded.read)))}"
        if self.temporary:
            return "it makes a temporary file"
        if _descriptors() - descriptors:
            return "it leaves a file or connection open"
        if _has_threads():
            return "it starts threads"
        for module in set(sys.modules) - modules:
            spec = getattr(sys.modules.get(module), "__spec__", None)
            if isinstance(spec, ModuleSpec) and spec.has_location and not self.scan._is_installed(spec):
                return f"it imports {module}, which is not an installed package"
        return None

    def _audit(self, event: str, args: object) -> None:
        if self.is_active and event in ("tempfile.mkstemp", "tempfile.mkdtemp"):
            self.temporary += 1


def _descriptors() -> set[str]:
    """Open descriptors, by number and target."""
    found = set()
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # the one that lists
            continue
        found.add(f"{name}:{status.st_dev}:{status.st_ino}")
    return found


def _has_threads() -> bool:
    """Whether a thread is left after a fork; some libraries, such as OpenBLAS, end theirs before it."""
    if threading.active_count() > 1:
        return True
    if _num_threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return _num_threads() > 1


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


# ------------------------------------------------------------------------------------------------ the template


def main() -> None:
    settings = json.loads(sys.argv[1])
    try:
        _serve(settings)
    except InChild as child:
        request = child.request
    _become(settings, request)  # outside of `except`, for the context of exceptions
    _run_program(settings)


def _serve(settings: dict[str, Any]) -> NoReturn:
    """Import, report, and fork until the other end of the socket is closed."""
    control = socket.socket(fileno=settings["control"])
    control.set_inheritable(False)
    os.environ.update(dict.fromkeys(settings["variables"], PLACEHOLDER))
    supervisor = _load(settings["child_process"])
    _set_path(settings)
    report = _import_all(settings, control)
    control.sendall(json.dumps(report).encode() + b"\n")
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are reaped by the kernel
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if not message:
            break
        try:
            if os.fork() == 0:
                control.close()
                _supervise(supervisor, *descriptors)
        except OSError:  # the caller sees that the socket of the episode is closed
            pass
        for descriptor in descriptors:
            os.close(descriptor)
    with suppress(ChildProcessError):
        os.waitpid(-1, 0)  # the last of them
    os._exit(0)


def _import_all(settings: dict[str, Any], control: socket.socket) -> dict[str, Any]:
    """Execute the imports of the program, and describe them. Restarts this process without those not to share."""
    scan, skipped, target = ImportScan(), settings["skipped"], settings["module"]
    if target is None:
        scan.read_program(settings["file"])
    else:
        target = scan.read_module(target)
    check, before = ImportCheck(scan, settings["variables"]), set(sys.modules)
    for name, names in scan.imports:
        if name not in skipped and (reason := check.execute(name, names)) is not None:
            skipped[name] = reason
            if len(skipped) > MAX_RESTARTS:
                raise SystemExit(f"{len(skipped)} imports cannot be shared by processes; the last is {name}: {reason}")
            check.close()
            atexit._run_exitfuncs()
            control.set_inheritable(True)
            for variable in settings["variables"]:
                os.environ.pop(variable, None)
            arguments = [sys.executable, *settings["options"], os.path.abspath(__file__), json.dumps(settings)]
            os.execv(sys.executable, arguments)
    check.close()
    if target in sys.modules:
        raise SystemExit(f"its imports execute {target} before it is run")
    modules = sorted(set(sys.modules) - before)
    return {"modules": modules, "skipped": skipped, "files": scan.files, "stop": scan.stop}


def _set_path(settings: dict[str, Any]) -> None:
    """Put the folder in front of `sys.path` that an interpreter puts there."""
    if getattr(sys.flags, "safe_path", sys.flags.isolated):
        return
    folder = os.getcwd() if settings["module"] else os.path.dirname(os.path.realpath(settings["file"]))
    for name in {module.partition(".")[0] for module in set(sys.modules) - STARTUP_MODULES}:
        spec = PathFinder.find_spec(name, [folder])
        if spec is not None and spec.origin is not None:
            raise SystemExit(f"its folder has a module with the name of the standard module {name!r}")
    sys.path.insert(0, folder)


def _load(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("arborl_child_process", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _supervise(supervisor: types.ModuleType, stdin: int, stdout: int, line: int) -> NoReturn:
    """The supervisor of an episode. It ends all processes of the episode when `line` closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        request = _read_request(line)
    except (OSError, EOFError):
        os._exit(1)

    def start() -> tuple[int, int]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(AttributeError):  # not Linux
                supervisor.ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for number, descriptor in enumerate((stdin, stdout, writing)):
                os.dup2(descriptor, number)
            for descriptor in (stdin, stdout, line, reading, writing):
                os.close(descriptor)
            raise InChild(request)
        for descriptor in (stdin, stdout, writing):
            os.close(descriptor)
        os.write(line, b"started %d\n" % os.getpid())
        return child, reading

    def report(code: int, lines: bytes) -> None:
        os.write(line, b"%d\n%s" % (code, lines))

    supervisor.supervise(line, start, report)
    os._exit(1)


def _read_request(line: int) -> dict[str, Any]:
    """A JSON object on one line."""
    data = b""
    while not data.endswith(b"\n"):
        part = os.read(line, 2**16)
        if not part:
            raise EOFError
        data += part
    return json.loads(data)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ the program


def _become(settings: dict[str, Any], request: dict[str, Any]) -> None:
    """Make this process the one of the program."""
    os.environ.update(request["environment"])
    sys.argv[:] = ["-m" if settings["module"] else settings["script"], *settings["arguments"]]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = settings["words"]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:  # `random` does this itself
        numpy.seed()


def _run_program(settings: dict[str, Any]) -> None:
    """Run the program as `__main__`. Exceptions are printed without the frames of this file."""
    module, path = types.ModuleType("__main__"), settings["file"]
    sys.modules["__main__"], module.__dict__["__builtins__"] = module, builtins
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    try:
        if settings["module"]:
            import runpy

            runpy._run_module_as_main(settings["module"])  # type: ignore[attr-defined]
        else:
            module.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            exec(_compile(path), module.__dict__)
        return
    except SystemExit:
        raise
    except BaseException as error:
        failure = error
    _report(failure)


def _compile(path: str) -> types.CodeType:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        message = f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        sys.stderr.write(message)
        raise SystemExit(2) from None
    return compile(source, path, "exec", dont_inherit=True)


def _remove_frames(error: BaseException) -> types.TracebackType | None:
    """Remove the frames of this file from the traceback of an exception; returns the traceback."""
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    return error.__traceback__


def _report(error: BaseException) -> NoReturn:
    """End as an interpreter does after an uncaught exception."""
    frames = _remove_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
    try:
        sys.excepthook(type(error), error, frames)
    except SystemExit:
        raise
    except BaseException as other:
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(other), other, _remove_frames(other))
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, frames)
    if isinstance(error, KeyboardInterrupt):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
