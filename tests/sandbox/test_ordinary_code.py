"""What programs usually do, at every level that works here: the list of system calls must hold all of it."""

import pytest
from working_levels import WORKING_LEVELS

from arborl.sandbox import Sandbox, SandboxLimits

SQLITE = """
import sqlite3
one, two = sqlite3.connect('a.db'), sqlite3.connect('a.db')
one.execute('create table t (a)')
one.executemany('insert into t values (?)', [(n,) for n in range(100)])
one.commit()
one.execute('pragma journal_mode=wal')
two.execute('select sum(a) from t').fetchone()
"""
ASYNC = """
import asyncio, socket
async def main():
    a, b = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=a)
    reader, _ = await asyncio.open_connection(sock=b)
    writer.write(b'x' * 1000)
    writer.write_eof()
    return len(await reader.read()) + await asyncio.to_thread(lambda: 1)
asyncio.run(main())
"""
FILES = """
import fcntl, gzip, mmap, os, pathlib, shutil, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / 'a').write_bytes(gzip.compress(b'abc' * 1000))
shutil.copyfile(folder / 'a', folder / 'b')
(folder / 'b').rename(folder / 'c')
with open(folder / 'c', 'r+b') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_EX)
    mapped = mmap.mmap(file.fileno(), 0)
    found = gzip.decompress(mapped[:])[:3]
    del mapped
os.fsync(os.open(folder, os.O_RDONLY))
names = sorted(path.name for path in folder.iterdir())
shutil.rmtree(folder)
found, names
"""
SYSTEM = """
import os, platform, resource, signal, time
signal.signal(signal.SIGALRM, lambda *_: print('alarm'))
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.2)
resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_AS)
bool(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, os.getpid()) >= 0, os.getpgid(0) >= 0, platform.system()
"""
MANY = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as several:
    found = sum(several.map(lambda n: n * n, range(10)))
found
"""
SHELL = """
import subprocess
subprocess.run(['/bin/sh', '-c', 'echo b > x; echo a >> x; sort x | head -n 1; chmod 600 x; touch x; cp -p x y; '
                'dd if=/dev/zero bs=1k count=2 2>/dev/null | wc -c'], capture_output=True, text=True).stdout
"""
PROCESSES = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
fork = multiprocessing.get_context('fork')
def work(queue, number): number.value = 3; queue.put(5)
queue, number = fork.Queue(), fork.Value('i', 0)
child = fork.Process(target=work, args=(queue, number))
child.start()
found = queue.get(timeout=8)
child.join()
with ProcessPoolExecutor(2, mp_context=fork) as several: squares = list(several.map(abs, [-1, -2]))
found, number.value, squares
"""
ANYWHERE = {
    "SQLite": (SQLITE, "(4950,)"),
    "asyncio": (ASYNC, "1001"),
    "files": (FILES, "(b'abc', ['a', 'c'])"),
    "the system": (SYSTEM, "(True, True, True, 'Linux')"),
    "threads": (MANY, "285"),
    "a pipe between ends": (
        "import multiprocessing\na, b = multiprocessing.Pipe()\na.send([1] * 9)\nsum(b.recv())",
        "9",
    ),
}


@pytest.mark.parametrize("level", WORKING_LEVELS)
@pytest.mark.parametrize("name", ANYWHERE)
def test_ordinary_code_runs_at_every_level(level, name):
    code, value = ANYWHERE[name]
    with Sandbox(SandboxLimits(wall_seconds=30, cpu_seconds=20), level) as box:
        outcome = box.run_sync(code)
    assert (outcome.value, outcome.error) == (value, "")


@pytest.mark.parametrize("level", [level for level in WORKING_LEVELS if level != "rlimits"])
def test_other_programs_run_with_name_spaces(level):
    with Sandbox(SandboxLimits(wall_seconds=30, cpu_seconds=20), level) as box:
        assert box.run_sync(SHELL).value == repr("a\n2048\n")


@pytest.mark.skipif("namespaces" not in WORKING_LEVELS, reason="needs name spaces")
def test_multiprocessing_runs_with_name_spaces():
    """Under bubblewrap `/dev/shm`, where its semaphores are, is read-only."""
    with Sandbox(SandboxLimits(wall_seconds=30, cpu_seconds=20), "namespaces") as box:
        outcome = box.run_sync(PROCESSES)
    assert (outcome.value, outcome.error) == ("(5, 3, [1, 2])", "")


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_numpy_runs_at_every_level(level):
    numpy = pytest.importorskip("numpy")
    folder = numpy.__path__[0].rpartition("/")[0]
    with Sandbox(SandboxLimits(wall_seconds=60, cpu_seconds=30), level, packages=[folder]) as box:
        outcome = box.run_sync("import numpy as np; a = np.ones((200, 200)); float((a @ a).sum()), np.linalg.norm(a)")
    if "No module named 'numpy'" in outcome.error:
        pytest.skip("numpy is in a folder that is closed to other users")
    assert outcome.error == ""
    assert outcome.value.startswith("(8000000.0, ")


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_zeros_can_be_read_from_the_device_where_there_is_one(level):
    with Sandbox(SandboxLimits(), level) as box:
        outcome = box.run_sync("open('/dev/zero', 'rb').read(3)")
    assert outcome.value == r"b'\x00\x00\x00'" or level == "rlimits"
