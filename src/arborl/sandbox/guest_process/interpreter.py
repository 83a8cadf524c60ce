"""Runs the code of requests in one persistent namespace.

A request is a marshalled dictionary, which only the host writes. A response is lengths and bytes: the host must be able
to parse it safely.
"""

from __future__ import annotations

import _ast
import marshal
import os
import struct
import sys

CONTROL = 3
PyCF_ONLY_AST = 0x400
OK, RAISED, READY, FAILED = 0, 1, 2, 3
GREETING = bytes(16)


def send(token: bytes, kind: int, *texts: str) -> None:
    parts = [token, struct.pack("<B", kind)]
    for text in texts:
        data = text.encode("utf-8", "replace")[:1_000_000]
        parts += [struct.pack("<I", len(data)), data]
    data = b"".join(parts)
    data = struct.pack("<I", len(data)) + data
    while data:
        data = data[os.write(CONTROL, data) :]


def receive() -> dict | None:
    head = read(4)
    return marshal.loads(read(struct.unpack("<I", head)[0])) if head else None


def read(count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = os.read(CONTROL, count - len(parts))
        if not part:
            return b""
        parts += part
    return parts


def serve(plan: dict, applied: list[str]) -> None:
    kind = type(sys)
    main = kind("__main__")
    sys.modules["__main__"] = main
    main.__dict__.update(exit=sys.exit, quit=sys.exit)
    sys.path[:] = [*(path for path in sys.path if not path.endswith("guest_process")), *plan["packages"]]
    sys.argv = [""]
    sys.dont_write_bytecode = True
    send(GREETING, READY, ",".join(applied))
    count, pid = 0, os.getpid()
    while (request := receive()) is not None:
        count += 1
        set_stdin(request["stdin"])
        answer = run(request, main.__dict__, f"<cell {count}>")
        if os.getpid() != pid:  # a fork of the code that reached its end
            os._exit(0)
        send(request["token"], *answer)


def run(request: dict, names: dict, label: str) -> tuple[int, str, str]:
    """Run one request. Its output is written to descriptors 1 and 2 before this returns."""
    value_text, error, kind = "", "", OK
    try:
        for name, text in request["files"].items():
            write_file(name, text)
        tree = compile(request["code"], label, "exec", PyCF_ONLY_AST)
        last = tree.body.pop() if tree.body and type(tree.body[-1]) is _ast.Expr else None
        exec(compile(tree, label, "exec"), names)
        if last is not None:
            value = eval(compile(_ast.Expression(last.value), label, "eval"), names)
            value_text = "" if value is None else repr(value)
    except SystemExit as end:
        kind = OK if end.code in (None, 0) else RAISED
        error = "" if kind == OK else f"SystemExit: {end.code}"
    except BaseException as raised:
        kind, error = RAISED, write_traceback(raised, request["code"], label)
    flush()
    return kind, value_text, error


def write_file(name: str, text: str) -> None:
    folder = os.path.dirname(name)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(name, "w") as file:
        file.write(text)


def write_traceback(raised: BaseException, code: str, label: str) -> str:
    """Write the traceback to standard error, from the code's first frame; return its last line."""
    try:
        import linecache
        import traceback

        linecache.cache[label] = (len(code), None, code.splitlines(True), label)
        trace = raised.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.stderr.write("".join(traceback.format_exception(type(raised), raised, trace)))
        return "".join(traceback.format_exception_only(raised)).strip().rpartition("\n")[2]
    except BaseException as again:  # the exception cannot be formatted
        return f"{type(raised).__name__} ({type(again).__name__} while showing it)"


def set_stdin(text: str) -> None:
    try:  # noqa: SIM105
        sys.stdin.close()
    except BaseException:
        pass  # closed or replaced by the code
    if text:
        with open(".stdin", "w+", newline="") as file:
            os.unlink(".stdin")
            file.write(text)
            file.flush()
            os.lseek(file.fileno(), 0, 0)
            os.dup2(file.fileno(), 0)
    else:
        empty = os.open("/dev/null", os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
    sys.stdin = open(0, closefd=False, encoding="utf-8", errors="replace")  # noqa: SIM115


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105
            stream.flush()
        except BaseException:  # closed or replaced by the code
            pass


def main() -> None:
    """Entry point under bubblewrap."""
    plan = marshal.loads(bytes.fromhex(sys.argv[1]))
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import restrictions

    os.chdir(plan["home"])
    restrictions.set_limits(plan)
    if plan["uid"]:
        restrictions.drop_user(plan["uid"])
        restrictions.drop_capabilities()
    serve(plan, restrictions.apply_final(plan))


if __name__ == "__main__":
    main()
