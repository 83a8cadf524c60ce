import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from working_levels import WORKING_LEVELS

from arborl.sandbox import Sandbox, SandboxError, SandboxLimits, best_level, try_level

TIGHT = SandboxLimits(
    wall_seconds=12, cpu_seconds=1, memory_mb=128, file_mb=4, disk_mb=8, processes=8, output_bytes=10_000, open_files=64
)


@pytest.fixture(params=WORKING_LEVELS)
def box(request):
    with Sandbox(TIGHT, request.param) as made:
        yield made


def processes_of(user_or_text: str) -> list[int]:
    """Processes of this machine whose command line holds the text."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if user_or_text.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def test_some_level_works_and_wrong_limits_and_levels_are_refused(monkeypatch):
    assert WORKING_LEVELS
    assert best_level().name == WORKING_LEVELS[0]
    with pytest.raises(ValueError, match="wall_seconds=0"):
        SandboxLimits(wall_seconds=0)
    with pytest.raises(ValueError, match="give 32 or more"):
        SandboxLimits(memory_mb=8)

    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="bwrap is not installed"):
        try_level("bubblewrap")


# ------------------------------------------------------------------------------------------------ ordinary code


def test_a_run_gives_output_value_and_error(box):
    outcome = box.run_sync("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert outcome.ok
    assert (outcome.stdout, outcome.stderr, outcome.value, outcome.error) == ("out\n", "err\n", "42", "")
    assert 0 < outcome.seconds < TIGHT.wall_seconds
    assert box.run_sync("x = 20\ndef twice(n): return 2 * n").ok
    assert box.run_sync("twice(x) + 2").value == "42"
    outcome = box.run_sync("def f(:")
    assert not outcome.ok
    assert outcome.error.startswith("SyntaxError")
    assert box.run_sync("print(input() + input())", stdin="a\nb\n").stdout == "ab\n"
    assert box.run_sync("import sys; print(sys.stdin.buffer.read())", stdin="1 2\n").stdout == "b'1 2\\n'\n"
    assert box.run_sync("import os; print(os.read(0, 10))", stdin="x").stdout == "b'x'\n"
    assert box.run_sync("input()").error.startswith("EOFError")
    outcome = box.run_sync("print(open('data/a.txt').read())", files={"data/a.txt": "hello"})
    assert outcome.stdout == "hello\n"
    assert box.run_sync("import sys; sys.exit()").ok
    assert box.run_sync("exit(3)").error == "SystemExit: 3"
    outcome = box.run_sync("class E(Exception):\n    def __str__(self): raise ValueError\nraise E")
    assert not outcome.ok
    assert outcome.error.startswith("E")
    assert box.run_sync("class R:\n    def __repr__(self): raise ValueError('no')\nR()").error == "ValueError: no"


def test_an_exception_has_pythons_traceback_and_the_sandbox_stays_alive(box):
    box.run_sync("kept = 1")
    outcome = box.run_sync("def f():\n    return 1 / 0\nf()")
    assert not outcome.ok
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert outcome.stderr.startswith('Traceback (most recent call last):\n  File "<cell 2>", line 3, in <module>\n')
    assert "guest.py" not in outcome.stderr
    assert outcome.stopped == ""
    assert box.run_sync("kept").value == "1"


def test_the_end_of_the_process_is_the_end_of_the_sandbox(box):
    outcome = box.run_sync("import os; print('last', flush=True); os._exit(7)")
    assert (outcome.ok, outcome.stopped) == (False, "died")
    assert outcome.stdout == "last\n"
    assert not box.alive
    assert box.run_sync("1").stopped == "died"


def test_a_copy_of_the_process_that_runs_to_the_end_answers_nothing(box):
    if box.level == "rlimits":
        pytest.skip("there are no other processes at this level")
    outcome = box.run_sync("import os\nif os.fork(): os.wait()\nprint('here')")
    assert (outcome.ok, outcome.stdout) == (True, "here\nhere\n")
    assert box.run_sync("6 * 7").value == "42"


FORGED = """
import os, struct
def answer(token, *texts):
    body = token + bytes([0]) + b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return struct.pack("<I", len(body)) + body
"""


@pytest.mark.parametrize(
    "code",
    [
        "os.write(3, b'\\xff\\xff\\xff\\xff' + b'x' * 100)",
        "os.write(3, answer(bytes(16), b'42', b''))",
        "os.write(3, answer(b'', b'42', b'')[:3]); os._exit(0)",
        "import sys; os.write(3, 2 * answer(sys._getframe(2).f_locals['request']['token'], b'42', b''))",
    ],
    ids=["too long", "without the token", "broken off", "twice"],
)
def test_a_forged_response_ends_the_sandbox_process(box, code):
    outcome = box.run_sync(f"{FORGED}\n{code}")
    assert outcome.stopped in ("forged", "died")
    assert outcome.value == ""
    assert not box.alive


def test_an_answer_written_by_the_code_is_followed_by_no_other(box):
    """Code that knows the token can write a response; the later response of the sandbox process then ends it."""
    outcome_text = "sys._getframe(1).f_locals['request']['token']"
    first = box.run_sync(
        f"{FORGED}\nimport sys, time; os.write(3, answer({outcome_text}, b'42', b'')); time.sleep(0.1)"
    )
    assert first.value in ("42", "")
    second = box.run_sync("import time; time.sleep(0.3); 'second'")
    assert second.stopped in ("forged", "died")
    assert not box.alive


DRIP = """
import os, struct, sys, time
token = sys._getframe(1).f_locals["request"]["token"]
os.write(3, struct.pack("<I", 1000) + token)
while True:
    os.write(3, b"\\0")
    time.sleep(0.2)
"""


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_an_answer_that_drips_is_waited_for_no_longer_than_any_other(level):
    with Sandbox(replace(TIGHT, wall_seconds=1), level) as box:
        outcome = box.run_sync(DRIP)
    assert outcome.stopped == "wall"
    within(outcome, 20)


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_limits_are_watched_while_an_answer_drips(level):
    burn = DRIP.replace("time.sleep(0.2)", "[None for _ in range(100_000)]").replace('b"\\0"', 'b""')
    with Sandbox(replace(TIGHT, cpu_seconds=0.3, wall_seconds=20), level) as box:
        assert box.run_sync(burn).stopped == "cpu"


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_a_request_that_is_not_read_is_not_waited_for(level):
    """Code of the last run holds the interpreter: the next request, larger than any buffer, finds no reader."""
    with Sandbox(replace(TIGHT, wall_seconds=1, cpu_seconds=30), level) as box:
        outcome_text = "sys._getframe(1).f_locals['request']['token']"
        box.run_sync(f"{FORGED}\nimport sys, time; os.write(3, answer({outcome_text}, b'', b'')); time.sleep(60)")
        outcome = box.run_sync("x = '" + "y" * 2_000_000 + "'")
    assert outcome.stopped == "wall"
    within(outcome, 20)


# ------------------------------------------------------------------------------------------------ hostile code


def within(outcome, seconds: float) -> None:
    """Far more than it takes, for a busy machine; far less than for ever."""
    assert outcome.seconds < seconds, outcome


def test_a_fork_bomb_is_contained(box):
    start = time.perf_counter()
    outcome = box.run_sync("import os\nwhile True:\n    os.fork()")
    box.close()
    assert not outcome.ok
    assert outcome.stopped in ("cpu", "wall", "processes", "died") or "Error" in outcome.error
    within(outcome, 20)
    assert time.perf_counter() - start < 40


def test_a_patient_fork_bomb_is_contained(box):
    code = "import os, time\nfor _ in range(1000):\n    if os.fork() == 0:\n        time.sleep(60)"
    outcome = box.run_sync(code)
    assert not outcome.ok
    assert outcome.stopped == "processes" or "Error" in outcome.error


@pytest.mark.parametrize("code", ["x = bytearray(10**10)", "x = []\nwhile True: x.append(bytearray(10**6))"])
def test_a_memory_bomb_is_contained(box, code):
    outcome = box.run_sync(code)
    assert not outcome.ok
    assert outcome.error.startswith("MemoryError") or outcome.stopped == "memory"
    within(outcome, 20)


def test_memory_spread_over_processes_is_counted_together(box):
    if box.level == "rlimits":
        pytest.skip("there are no other processes at this level")
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        x = bytearray(60 * 2**20)
        time.sleep(60)
time.sleep(60)
"""
    assert box.run_sync(code).stopped == "memory"


def test_memory_that_processes_share_is_counted_once(box):
    if box.level == "rlimits":
        pytest.skip("there are no other processes at this level")
    code = """
import os, time
x = bytearray(60 * 2**20)
for _ in range(4):
    if os.fork() == 0:
        time.sleep(0.4)
        os._exit(0)
for _ in range(4): os.wait()
"""
    assert box.run_sync(code).ok


def test_a_ten_gigabyte_file_is_contained(box):
    code = "with open('big', 'wb') as f:\n    for _ in range(10_000): f.write(bytes(2**20))"
    outcome = box.run_sync(code)
    assert not outcome.ok
    assert "OSError" in outcome.error
    within(outcome, 20)


def test_many_files_are_counted_together(box):
    code = """
import time
for n in range(100):
    with open(f'{n}', 'wb') as f: f.write(bytes(2**20))
    time.sleep(0.02)
"""
    outcome = box.run_sync(code)
    assert not outcome.ok
    assert outcome.stopped == "disk" or "OSError" in outcome.error


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_an_endless_loop_is_ended_by_processor_time(level):
    with Sandbox(replace(TIGHT, cpu_seconds=0.3, wall_seconds=30), level) as box:  # a busy machine gives it slowly
        outcome = box.run_sync("while True: pass")
    assert outcome.stopped == "cpu"
    within(outcome, 20)
    assert "0.3 s of processor time" in outcome.output


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_an_endless_sleep_is_ended_by_the_clock(level):
    with Sandbox(replace(TIGHT, wall_seconds=0.5), level) as box:
        outcome = box.run_sync("import time; time.sleep(100)")
    assert outcome.stopped == "wall"
    assert 0.45 < outcome.seconds < 20


def test_endless_output_is_cut_off(box):
    outcome = box.run_sync("while True: print('x' * 1000)")
    assert outcome.stopped == "output"
    assert len(outcome.stdout) <= TIGHT.output_bytes
    within(outcome, 20)


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_code_that_ignores_signals_is_ended_too(level):
    code = """
import signal
for n in range(1, 32):
    try: signal.signal(n, signal.SIG_IGN)
    except OSError: pass
while True: pass
"""
    with Sandbox(replace(TIGHT, cpu_seconds=0.2), level) as box:
        within(box.run_sync(code), 20)
        assert not box.alive


def test_the_environment_of_the_parent_cannot_be_read(monkeypatch):
    monkeypatch.setenv("ARBORL_SECRET", "swordfish")
    code = """
import os
found = dict(os.environ)
for pid in ('self', '1', str(os.getppid()), *map(str, range(1, 60)), PARENT):
    try: found[pid] = open(f'/proc/{pid}/environ').read()
    except OSError: pass
print(found)
"""
    for level in WORKING_LEVELS:
        with Sandbox(TIGHT, level) as box:
            outcome = box.run_sync(code.replace("PARENT", repr(str(os.getpid()))))
            assert outcome.ok, outcome
            assert "swordfish" not in outcome.stdout


def test_the_files_of_the_parent_cannot_be_read(box, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("swordfish")
    here = Path(__file__)
    for path in (secret, here, Path.home() / ".bashrc", Path("/etc/shadow"), Path("/etc/passwd")):
        outcome = box.run_sync(f"open({str(path)!r}).read()")
        assert not outcome.ok, (path, outcome)
    for folder in (tmp_path, Path.home(), here.parent):
        outcome = box.run_sync(f"import os; os.listdir({str(folder)!r})")
        assert not outcome.ok or "swordfish" not in outcome.value
        assert here.name not in outcome.value
        assert secret.name not in outcome.value


def test_files_the_parent_and_further_rights_are_out_of_reach(box):
    for path in ("/usr/x", "/x", "/etc/x", "/dev/x", "/bin/x", f"{os.path.dirname(os.__file__)}/x"):
        assert not box.run_sync(f"open({path!r}, 'w')").ok, path
        assert not Path(path).exists()

    code = f"import resource; resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1))"
    assert not box.run_sync(code).ok
    assert "ptrace" not in Path("/proc/self/status").read_text()
    code = "import ctypes, os; l = ctypes.CDLL(None, use_errno=True); (l.unshare(0x10000000), ctypes.get_errno())"
    assert box.run_sync(code).value == "(-1, 1)"
    caps = box.run_sync("[l for l in open('/proc/self/status') if l.startswith(('CapEff', 'NoNewPrivs'))]")
    if caps.ok:
        assert "CapEff:\\t0000000000000000" in caps.value
        assert "NoNewPrivs:\\t1" in caps.value


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_no_socket_can_be_opened(box, family):
    outcome = box.run_sync(f"import socket; socket.socket(socket.{family})")
    assert not outcome.ok
    assert "PermissionError" in outcome.error


def test_the_parent_cannot_be_killed(box):
    code = """
import os, signal
for pid in (os.getppid(), PARENT, KEEPER, -1):
    try: os.kill(pid, signal.SIGKILL)
    except OSError as error: print(pid, error)
""".replace("PARENT", str(os.getpid())).replace("KEEPER", str(box._supervisor.pid))
    box.run_sync(code)
    # Reaching this line is the test; `-1` may have ended the sandbox process, and nothing else.
    assert os.getpid()


def test_a_daemon_does_not_outlive_its_sandbox(box):
    mark = f"arborl-daemon-{os.getpid()}-{box.level}"
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sh', ['/bin/sh', '-c', 'while true; do sleep 1; done', {mark!r}])
    os._exit(0)
time.sleep(0.3)
"""
    outcome = box.run_sync(code)
    if box.level == "rlimits":
        assert not outcome.ok  # it cannot even be started
    else:
        assert outcome.ok, outcome
        deadline = time.monotonic() + 20
        while not processes_of(mark) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert processes_of(mark), "the daemon should be running now, or this test shows nothing"
    box.close()
    assert processes_of(mark) == []


def host_of(level: str, code: str, folder: Path) -> subprocess.Popen[str]:
    """A process that keeps its sandboxes' folders under `folder`, and says True when `code` ran in one."""
    made = f"from arborl.sandbox import *; import time; box = Sandbox(SandboxLimits(), {level!r}); "
    received = f"print(box.run_sync({code!r}).ok, flush=True); "
    host = subprocess.Popen(
        [sys.executable, "-c", made + received + "time.sleep(60)"],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    assert host.stdout.readline() == "True\n"
    return host


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_a_host_that_is_killed_leaves_no_folder_and_no_daemon(tmp_path, level):
    """The host is killed; the sandbox process, its child processes and its files must be removed too."""
    mark = f"arborl-orphan-{os.getpid()}"
    loop = "while true; do sleep 1; done"
    code = "import os; open('x', 'w').close()"
    if level != "rlimits":  # where there are no other processes
        code += f"\nif os.fork() == 0: os.execv('/bin/sh', ['/bin/sh', '-c', {loop!r}, {mark!r}])"
    host = host_of(level, code, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    wait_until(lambda: processes_of(mark) or level == "rlimits")
    host.kill()
    host.communicate()
    wait_until(lambda: not processes_of(mark) and not list(tmp_path.iterdir()))


def test_a_process_that_exits_with_spare_sandboxes_leaves_no_folder(tmp_path):
    code = "from arborl.sandbox import run_code_sync; print(run_code_sync('6 * 7').value)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.stdout == "42\n"
    wait_until(lambda: not list(tmp_path.iterdir()))


def wait_until(true, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_threads_work_and_are_limited(box):
    threads = "import threading\nt = [threading.Thread(target=print, args=(n,)) for n in range(3)]\n"
    assert box.run_sync(threads + "[x.start() for x in t]; [x.join() for x in t]; None").ok
    many = "import threading, time\nfor _ in range(100_000): threading.Thread(target=time.sleep, args=(60,)).start()"
    outcome = box.run_sync(many)
    assert not outcome.ok


def test_nothing_is_left_on_disk(box):
    folder = Path(box._folder)
    box.run_sync("open('x', 'w').write('y')")
    box.close()
    assert not folder.exists()


# ------------------------------------------------------------------------------------------------ around it


def test_a_cancelled_run_ends_its_sandbox_process():
    async def play() -> tuple[float, bool]:
        box = Sandbox(replace(TIGHT, wall_seconds=100))
        start = time.perf_counter()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.run("import time; time.sleep(100)"), 0.2)
        seconds = time.perf_counter() - start
        box.close()
        return seconds, box.alive

    seconds, alive = asyncio.run(play())
    assert seconds < 20
    assert not alive


def test_a_package_folder_can_be_imported_and_not_changed(tmp_path):
    (tmp_path / "helpful.py").write_text("answer = 42")
    tmp_path.chmod(0o755)  # the sandbox process runs as another user
    for level in WORKING_LEVELS:
        with Sandbox(TIGHT, level, packages=[tmp_path]) as box:
            assert box.run_sync("import helpful; helpful.answer").value == "42"
            assert not box.run_sync("open(helpful.__file__, 'w')").ok
            assert not box.run_sync(f"open({str(tmp_path / 'new.py')!r}, 'w')").ok
