"""Between two runs a sandbox does nothing; during a run the usage of all its processes is counted."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from working_levels import WORKING_LEVELS

from arborl.sandbox import Sandbox, SandboxLimits, SandboxPool
from arborl.sandbox.process_usage import UsageMeter, disk_usage, process_usage

TIGHT = SandboxLimits(wall_seconds=12, cpu_seconds=1, memory_mb=128, disk_mb=8, file_mb=4, processes=8)

FORKING = [level for level in WORKING_LEVELS if level != "rlimits"]


@pytest.fixture(params=WORKING_LEVELS)
def box(request):
    with Sandbox(TIGHT, request.param) as made:
        yield made


GROWING = """
import threading, time
count, kept = 0, []
def go():
    global count
    while True:
        count += 1
        kept.append(bytes(100_000))
        open(f"f{count}", "wb").write(bytes(100_000))
        time.sleep(0.001)
threading.Thread(target=go, daemon=True).start()
"""


def test_nothing_happens_between_calls(box):
    assert box.run_sync(GROWING + "count").ok
    before = process_usage(box._supervisor.pid)
    first = int(box.run_sync("count").value)
    time.sleep(0.5)
    again = int(box.run_sync("count").value)
    assert again - first < 100  # half a second of it would be five times that
    assert box.run_sync("1").ok
    time.sleep(0.3)
    after = process_usage(box._supervisor.pid)
    assert after.memory - before.memory < 50 * 2**20
    assert after.cpu - before.cpu < 0.5


def test_what_was_left_running_goes_on_with_the_next_call(box):
    box.run_sync("import threading, time\nx = []\nt = threading.Timer(0.05, x.append, (1,)); t.start()")
    time.sleep(0.2)
    assert box.run_sync("t.join(); x").value == "[1]"


@pytest.mark.parametrize("level", FORKING)
def test_processes_stand_still_too(level):
    code = "import os, time\nif os.fork() == 0:\n    while True: open('x', 'a').write('y'); time.sleep(0.001)\n"
    with Sandbox(TIGHT, level) as box:
        assert box.run_sync(code + "time.sleep(0.1)").ok
        before = int(box.run_sync("os.path.getsize('x')").value)
        time.sleep(0.5)
        assert int(box.run_sync("os.path.getsize('x')").value) - before < 100


@pytest.mark.parametrize("what", ["timer", "parent", "file"])
def test_a_stopped_sandbox_process_cannot_resume_itself(box, what):
    """Signals that would come without anybody inside being awake to send them."""
    code = {
        "timer": "class E(ctypes.Structure): _fields_ = (('v', ctypes.c_void_p), ('s', ctypes.c_int * 14))\n"
        "e = E(); e.s[0] = 18; t = ctypes.c_void_p(); r = c.timer_create(0, ctypes.byref(e), ctypes.byref(t))",
        "parent": "r = c.prctl(1, 18, 0, 0, 0)",
        "file": "import fcntl, os\na, b = os.pipe()\nr = c.fcntl(a, 10, 18)",
    }[what]
    outcome = box.run_sync(f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n{code}\n(r, ctypes.get_errno())")
    assert outcome.value == "(-1, 1)", outcome


BURN = "    start = time.process_time()\n    while time.process_time() - start < {seconds}: pass\n    os._exit(0)\n"


@pytest.mark.parametrize("level", FORKING)
@pytest.mark.parametrize("seconds", [0.2, 0.01])
def test_children_whose_end_is_ignored_do_not_evade_the_limit(level, seconds):
    code = "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    code += "while True:\n  if (child := os.fork()) == 0:\n" + BURN.format(seconds=seconds).replace("    ", "      ")
    code += "\n  try: os.waitpid(child, 0)\n  except OSError: pass"
    with Sandbox(replace(TIGHT, cpu_seconds=0.5, wall_seconds=60), level) as box:
        outcome = box.run_sync(code)
    assert outcome.stopped in ("children", "cpu")
    assert outcome.seconds < 40


def test_time_that_was_seen_stays_counted():
    """A child of ours that ends unwaited for, as the kernel does it for those that ignore their children's ends."""
    keeper = os.fork()
    if keeper == 0:
        import signal

        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        child = os.fork()
        start = time.process_time()
        while child == 0 and time.process_time() - start < 0.3:
            pass
        if child == 0:
            time.sleep(0.3)
            os._exit(0)
        time.sleep(5)
        os._exit(0)
    meter, most = UsageMeter(keeper), 0.0
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (now := meter.read()).processes + (most < 0.2):
        most = max(most, now.cpu)
        time.sleep(0.02)
    assert most >= 0.2
    assert meter.read().cpu >= most
    os.kill(keeper, 9)
    os.waitpid(keeper, 0)


def test_processes_that_are_waited_for_are_counted_once():
    code = "import os, time\nfor _ in range(20):\n  if os.fork() == 0:\n"
    code += BURN.format(seconds=0.02).replace("    ", "      ") + "  os.wait()"
    for level in FORKING:
        with Sandbox(replace(TIGHT, cpu_seconds=1.5, wall_seconds=20), level) as box:
            assert box.run_sync(code).ok


def test_files_that_were_removed_and_are_held_open_are_counted(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100_000))
    held = (tmp_path / "b").open("wb+")
    held.write(bytes(3 * 2**20))
    held.flush()
    (tmp_path / "b").unlink()
    whole = disk_usage(str(tmp_path), os.getppid(), 2**30, 2**20)
    assert whole >= 3 * 2**20 + 100_000
    held.close()


def test_empty_files_and_folders_too_deep_to_name_count(tmp_path):
    for n in range(100):
        (tmp_path / str(n)).touch()
    assert disk_usage(str(tmp_path), os.getpid(), 2**30, 2**20) == 100 * 4096
    here = os.getcwd()
    os.chdir(tmp_path)
    for _ in range(30):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    os.chdir(here)
    assert disk_usage(str(tmp_path), os.getpid(), 2**30, 2**20) > 2**30
    from arborl.sandbox.guest_process.guest_resources import remove_folder

    remove_folder(str(tmp_path))
    assert not tmp_path.exists()


DEEP = "import os\nfor _ in range(3000):\n    os.mkdir('d', 0o300); os.chdir('d')\nopen('x', 'w').close()"


@pytest.mark.parametrize("killed", [False, True])
def test_a_folder_dug_deep_is_removed(killed):
    """Deeper than a path may be long, and than Python may recurse."""
    with Sandbox(TIGHT, "rlimits") as box:
        box.run_sync(DEEP)
        if killed:
            box.kill()
        folder = Path(box._folder)
    assert not folder.exists()


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_a_sandbox_process_does_not_outlive_a_cancelled_run(level):
    """It takes off what ties it to its keeper, and its keeper is killed."""
    name = f"{level[:4]}-{os.getpid()}"
    code = f"import ctypes, time\nc = ctypes.CDLL(None)\nc.prctl(1, 0, 0, 0, 0)\nc.prctl(15, b'{name}', 0, 0, 0)"

    async def play() -> None:
        box = Sandbox(replace(TIGHT, wall_seconds=30, cpu_seconds=30), level)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.run(code + "\nwhile True: time.sleep(0.01)"), 0.5)
        box.close()

    asyncio.run(play())
    deadline = time.monotonic() + 20
    while named(name) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert named(name) == []


def named(text: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "comm").read_text().strip() == text:
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_an_honest_call_waits_for_hostile_ones_no_longer_than_their_limit():
    drip = "import os, struct, sys, time\ntoken = sys._getframe(1).f_locals['request']['token']\n"
    drip += "os.write(3, struct.pack('<I', 1000) + token)\nwhile True:\n    os.write(3, b'x'); time.sleep(0.1)"
    limits = replace(TIGHT, wall_seconds=1.5)
    pool = SandboxPool(limits, busy=8)

    async def play() -> tuple[float, str]:
        hostile = [asyncio.create_task(pool.run(drip)) for _ in range(8)]
        await asyncio.sleep(0.05)
        start = time.perf_counter()
        honest = await pool.run("6 * 7")
        seconds = time.perf_counter() - start
        await asyncio.gather(*hostile)
        return seconds, honest.value

    seconds, value = asyncio.run(play())
    pool.close()
    assert value == "42"
    assert seconds < limits.wall_seconds + 1
