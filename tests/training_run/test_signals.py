"""Signals stop a run: the first lets it save, the second ends it at once, and it does not take for ever."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from forked import Forked

from arborl.training_run.signals import REPEAT_SECONDS, StopSignals

SCRIPT = """
import asyncio, signal, sys, threading, time
from arborl.training_run.signals import StopSignals

async def work():
    print("ready", flush=True)
    try:
        if sys.argv[2] == "held":
            time.sleep(30)  # an update, or an environment that does not let go
        if sys.argv[2] == "thread":  # the system may give a signal to any thread
            kill = lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            threading.Timer(0.3, kill).start()
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        stops.saving()
        print("saving", flush=True)
        time.sleep(float(sys.argv[3]))
        if len(sys.argv) > 4:
            open(sys.argv[4], "w").close()
        print("saved", flush=True)
        raise

with StopSignals(float(sys.argv[1])) as stops:
    stops.run(work())
"""


def started(*words: str, **more) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words], text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more,
    )  # fmt: skip
    if process.stdout is not None:
        assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_saves_however_long_that_takes(number):
    process = started("0.2", "free", "0.6", preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    process.send_signal(number)
    out, _ = process.communicate(timeout=50)
    assert out == "saving\nsaved\n"
    assert process.returncode in (128 + number, -number)


def test_a_signal_that_another_thread_receives_wakes_the_run():
    process = started("60", "thread", "0")
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("saving\nsaved\n", 143)


@pytest.mark.parametrize("numbers", [(signal.SIGHUP, signal.SIGHUP), (signal.SIGINT, signal.SIGTERM)])
def test_a_signal_that_is_delivered_twice_is_one_request(numbers):
    defaults = {"preexec_fn": lambda: [signal.signal(number, signal.SIG_DFL) for number in numbers]}
    process = started("60", "free", "0.6", **defaults)
    for number in numbers:  # as of a closed terminal, or of a launcher after Ctrl-C
        process.send_signal(number)
        time.sleep(0.2)
    out, _ = process.communicate(timeout=50)
    assert out == "saving\nsaved\n"
    assert process.returncode in (128 + numbers[0], -numbers[0])


def test_ctrl_c_that_a_launcher_follows_with_sigterm_has_the_time_limit_of_sigterm():
    process = started("0.5", "held", "0", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.2)
    _, err = process.communicate(timeout=50)
    assert "0.5 s after SIGINT" in err


def test_a_terminal_that_closes_just_after_sigterm_is_not_written_to(monkeypatch):
    closed, stops = [], StopSignals(60)
    monkeypatch.setattr(stops, "_close_terminal", lambda: closed.append(True))
    loop = asyncio.new_event_loop()
    stops._task = loop.create_task(asyncio.sleep(60))
    for number in (signal.SIGTERM, signal.SIGHUP):
        stops._stop(number, None)
    assert (stops.got, closed) == (signal.SIGTERM, [True])
    stops.saving()  # ends the timer
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(stops._task)
    loop.close()


def test_a_later_signal_ends_at_once():
    process = started("60", "held", "0")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    time.sleep(REPEAT_SECONDS + 0.2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=50)
    assert (out, process.returncode) == ("", -signal.SIGTERM)


def test_what_does_not_let_go_in_time_is_given_up_with_a_word():
    process = started("0.5", "held", "0")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=50)
    assert (out, process.returncode) == ("", 143)
    assert "0.5 s after SIGTERM" in err


def test_a_signal_that_was_ignored_stays_ignored():
    process = started("60", "free", "0", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)  # as under nohup
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.kill()
    process.communicate()


def test_a_terminal_that_is_closed_does_not_keep_a_run_from_saving(tmp_path):
    master, slave = pty.openpty()
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)}  # which `nohup` has off
    process = started("60", "free", "0", str(tmp_path / "saved"), stdout=slave, stderr=slave, **heard)
    os.close(slave)
    assert b"ready" in os.read(master, 100)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=20) == 129
    assert (tmp_path / "saved").exists()


BLOCKED = """
import pathlib, sys, time, arborl

folder = pathlib.Path(sys.argv[2])

def judge(episode):
    (folder / f"called-{episode.seed}").touch()
    time.sleep(600)

async def holding(episode):
    judge(episode)  # which holds the event loop

arborl.run(
    data=[{"question": "What?"}], rewards=[globals()[sys.argv[1]]], steps=1, output_dir=folder / "run",
    engine="scripted",
    **{"rollout.group_size": 2, "rollout.tasks_per_step": 1, "rollout.step_seconds": 500, "trainer.stop_seconds": 400,
       "rollout.episode_seconds": 500, "evaluation.tasks": 0, "track.tensorboard": False} | eval(sys.argv[3]),
)
"""


def stopped(tmp_path, reward: str, requested: int, settings: str = "{}") -> tuple[str, int | None]:
    """What a run says that gets SIGTERM while so many calls of its reward do not return, and its exit code."""
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    run = Forked([str(script), reward, str(tmp_path), settings])
    while len(list(tmp_path.glob("called*"))) < requested:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=200)
    return output, run.returncode


def test_a_reward_that_blocks_neither_holds_up_the_stop_nor_goes_unnamed(tmp_path):
    output, code = stopped(tmp_path, "judge", 2)
    assert code == 143, output
    assert "saved" in output
    assert "SIGTERM: calls in threads have not returned: reward 'judge' ×2" in output


def test_a_reward_that_holds_the_event_loop_is_named_where_the_run_is_given_up(tmp_path):
    output, code = stopped(tmp_path, "holding", 1, '{"trainer.stop_seconds": 1}')
    assert code == 143, output
    assert "1 s after SIGTERM, reward 'holding' (" in output
    assert "in judge) still runs" in output
