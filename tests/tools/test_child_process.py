"""A command under the guard ends together with every process that it started, however any of them ends."""

import os
import signal
import subprocess
import sys
import uuid

import pytest
from tool_servers import gone, marked

from arborl import child_process

DAEMON = """
import os, signal, sys, time
command = sys.stdin.readline().strip()
if os.fork() == 0:
    os.setsid()  # leaves the process group
    if os.fork() == 0:  # and its parent ends
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("daemon", flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
if command == "wait":
    time.sleep(600)
sys.exit(3 if command == "fail" else 0)
"""


@pytest.fixture
def guarded():
    """Starts the guard over a program that leaves a daemon behind, and returns when the daemon runs."""
    mark, started = uuid.uuid4().hex, []

    def start(command: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-I", "-S", child_process.__file__, sys.executable, "-I", "-S", "-c", DAEMON, mark]
        pipe = subprocess.PIPE
        made = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        started.append(made)
        made.stdin.write(f"{command}\n")
        made.stdin.flush()
        assert made.stdout.readline() == "daemon\n"
        return made

    start.mark = mark
    yield start
    for made in started:
        made.kill()
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


def test_a_daemon_that_left_the_process_group_is_gone_when_the_guard_has_ended(guarded):
    assert guarded("end").wait(60) == 0
    assert not marked(guarded.mark)


def test_a_command_that_fails_is_reported_and_its_daemon_is_gone(guarded):
    made = guarded("fail")
    assert made.stdout.read() == ""  # the end of it: the daemon held it
    assert made.wait(60) == 3
    assert made.stderr.read().strip() == "(exit code 3)"
    assert not marked(guarded.mark)


def test_a_guard_that_is_terminated_ends_the_command_and_its_daemon_first(guarded):
    made = guarded("wait")
    made.terminate()
    made.wait(60)
    assert not marked(guarded.mark)
    assert made.stderr.read() == ""


def test_a_process_group_that_is_killed_with_its_guard_leaves_nothing(guarded):
    made = guarded("wait")
    os.killpg(made.pid, signal.SIGKILL)
    made.wait(60)
    assert gone(guarded.mark)


def test_a_caller_that_is_killed_leaves_nothing():
    mark = uuid.uuid4().hex
    words = [sys.executable, "-I", "-S", child_process.__file__, sys.executable, "-I", "-S", "-c", DAEMON, mark]
    caller = (
        "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True);"
        "p.stdin.write(b'wait\\n'); p.stdin.flush(); p.wait()"
    )
    made = subprocess.Popen([sys.executable, "-c", caller, *words], stdout=subprocess.PIPE, text=True)
    assert made.stdout.readline() == "daemon\n"
    made.kill()
    made.wait()
    assert gone(mark)


def test_a_program_that_does_not_exist_is_named():
    words = [sys.executable, "-I", "-S", child_process.__file__, "/no/such/program"]
    ended = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    assert ended.returncode == 127
    assert ended.stderr == "/no/such/program: No such file or directory (exit code 127)\n"
