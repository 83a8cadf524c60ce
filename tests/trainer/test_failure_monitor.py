"""A run in which nearly every episode fails stops with the causes."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from typer.testing import CliRunner

import arborl
from arborl.cli.main import app
from arborl.diagnosis.run_monitor import FailureMonitor
from arborl.envs.env import Env, Observation, Step
from arborl.errors import EpisodeError, RunStopped
from arborl.failures import MAX_CAUSES, Failures, FirstFailureLogger, failure_key, trim_traceback
from arborl.rollout import recorder
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics
from arborl.types import Episode, Failure, Message, Task


class Broken(Env):
    """Fails in every step from the `after`-th episode on."""

    count = 0
    blocking = False

    def __init__(self, after: int = 0, seconds: float = 0.0):
        self.after, self.seconds = after, seconds

    async def reset(self, task, seed):
        await asyncio.sleep(self.seconds)
        Broken.count += 1
        self.fails = Broken.count > self.after
        return Observation((Message("user", "Say yes."),))

    async def step(self, action):
        if self.fails:
            raise ValueError(f"thin ice under {Broken.count}")
        return Step(Observation(()), reward=float(Broken.count % 2), terminated=True)


def run(folder, after=0, seconds=0.0, **more):
    Broken.count = 0
    settings = {
        "rollout.tasks_per_step": 2, "rollout.group_size": 3, "evaluation.tasks": 5, "track.tensorboard": False,
        "track.gifs": 0, "threads": 1, "engine.args.replies": ["Yes.", "No."],
    }  # fmt: skip
    return arborl.run(env=Broken(after, seconds), steps=9, engine="scripted", output_dir=folder, **settings | more)


def test_a_run_stops_after_the_first_evaluation_with_one_message(tmp_path, caplog):
    with pytest.raises(RunStopped) as stopped:
        run(tmp_path / "run")
    message = str(stopped.value)
    assert message.startswith("Stopped: 5 of 5 episodes of the evaluation at step 0 failed.")
    assert "environment 'Broken': ValueError: thin ice under 1 ×5 (first in episode Broken/held_out/000#0" in message
    first = next(line for line in message.splitlines() if line.startswith("  File"))
    assert first.startswith(f'  File "{__file__}"')
    assert message.count("Traceback") == 1
    assert "arborl env check" in message
    assert stopped.value.__context__ is None  # no exception of the framework is printed before it
    assert caplog.text.count("thin ice") == 1  # and not once an episode
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"]
    assert [(cause["count"], cause["failure"]["kind"]) for cause in summary["failures"]] == [(5, "ValueError")]
    assert __file__ in summary["failures"][0]["failure"]["traceback"]
    assert "success" not in summary["before"]
    assert "0.0%" not in (tmp_path / "run" / "report.html").read_text()


def test_a_run_stops_when_the_first_tasks_fail_with_one_cause(tmp_path):
    with pytest.raises(RunStopped) as stopped:
        run(tmp_path / "run", seconds=0.01, **{"evaluation.tasks": 100, "rollout.concurrency": 4})
    message = str(stopped.value)
    assert message.startswith("Stopped: the first 8 tasks failed with one cause, and no episode succeeded.")
    assert "environment 'Broken': ValueError: thin ice" in message
    assert Broken.count < 20  # not 100
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"]
    assert [cause["count"] for cause in summary["failures"]] == [8]


def test_a_run_stops_when_the_first_tasks_of_training_fail(tmp_path):
    with pytest.raises(RunStopped, match="the first 8 tasks failed with one cause"):
        run(
            tmp_path / "run",
            seconds=0.01,
            **{"evaluation.tasks": 0, "rollout.tasks_per_step": 50, "rollout.group_size": 2, "rollout.concurrency": 4},
        )
    assert Broken.count < 30


def observed(*episodes: tuple[str, str | None]) -> FailureMonitor:
    """A monitor after episodes of these tasks, each with the component that failed, started in this order."""
    monitor = FailureMonitor()
    for task, _ in episodes:
        monitor.on_start(Task(task))
    for task, where in episodes:
        failure = None if where is None else Failure(where, "ValueError", "no")
        monitor.on_end(Episode(task, Task(task), 0, failure=failure))
    return monitor


def test_failures_of_one_task_with_different_causes_or_after_a_success_do_not_stop_a_run():
    one_task = [("a", "tool")] * 20
    different = [(str(number), f"part {number % 2}") for number in range(20)]
    observed(*one_task)
    observed(*different)
    observed(("good", None), *((str(number), "tool") for number in range(20)))


def test_quick_failures_of_a_few_tasks_do_not_stop_a_run_whose_first_task_is_slow():
    monitor = FailureMonitor()
    tasks = [str(number) for number in range(50)]
    for task in tasks:
        monitor.on_start(Task(task))
    for task in tasks[1:]:  # the first one still runs
        monitor.on_end(Episode(task, Task(task), 0, failure=Failure("tool", "ValueError", "no")))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("environment 'Lake'", "`arborl env check my_pkg:Lake`"),
        ("agent 'once'", "`arborl rollout`, with the settings of the run, plays one episode with the agent"),
        ("program 'python loop.py'", "Start the program alone"),
        ("reward 'exact'", "prints its rewards"),
        ("engine", "`arborl doctor --model seedling`"),
    ],
)
def test_the_last_line_names_what_failed_and_how_to_check_it(where, words):
    broken = Episode("e", Task("t"), 0, failure=Failure(where, "ValueError", "no"))
    with pytest.raises(RunStopped) as stopped:
        FailureMonitor("my_pkg:Lake", "seedling").check("step", 1, [broken] * 8)
    last = str(stopped.value).splitlines()[-1]
    assert last.startswith(f"Fix the cause in {where}, then start the run again.")
    assert words in last
    assert ("env check" in last) is where.startswith("environment")


def test_without_evaluation_a_run_stops_after_the_first_step(tmp_path):
    with pytest.raises(RunStopped, match="6 of 6 episodes of step 1 failed"):
        run(tmp_path / "run", **{"evaluation.tasks": 0})
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (row["step"], row["episode/failed"]) == (1, 6.0)


def test_a_run_that_once_worked_stops_after_three_failed_steps_with_a_checkpoint(tmp_path, capsys):
    with pytest.raises(RunStopped, match=r"episodes of step 4 failed, and nearly all of the 2 before"):
        run(tmp_path / "run", after=5 + 5 + 6)  # both evaluations and a step
    assert (tmp_path / "run" / "checkpoints" / "step-000004" / "MANIFEST").exists()
    assert "--resume latest" in capsys.readouterr().out
    assert [int(row["step"]) for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert len(EpisodeStore(tmp_path / "run" / "episodes").paths()) == 4


def test_failures_in_filtered_groups_stop_a_run(tmp_path):
    with pytest.raises(RunStopped, match="episodes of step 1 failed"):
        run(tmp_path / "run", **{"evaluation.tasks": 0, "rollout.group_filter": "varied"})


def test_the_command_line_prints_the_message_on_stderr_and_exits_with_1(tmp_path):
    Broken.count = 0
    words = [f"env={__name__}:Broken", "engine=scripted", "engine.args.replies=[Yes]", f"output_dir={tmp_path / 'run'}"]
    small = ["evaluation.tasks=5", "track.tensorboard=false", "threads=1"]
    done = CliRunner().invoke(app, ["train", *words, *small])
    assert done.exit_code == 1, done.output
    assert "Stopped: 5 of 5" in done.stderr
    assert "rollout/runner.py" not in done.stderr
    measured = CliRunner().invoke(app, ["evaluate", "seedling", *words[:3], *small[:1]])
    assert measured.exit_code == 1, measured.output
    assert "Stopped: 5 of 5" in measured.stderr


def raised(text: str, place: str = "first") -> Failure:
    def first():
        raise ValueError(text)

    def second():
        raise ValueError(text)

    try:
        {"first": first, "second": second}[place]()
    except ValueError as error:
        return Episode("e", Task("t")).fail(EpisodeError("environment 'x'", error))
    raise AssertionError


def test_failures_of_one_line_are_one_cause():
    assert failure_key(raised("task 1")) == failure_key(raised("task 2, another"))
    assert failure_key(raised("task 1")) != failure_key(raised("task 1", "second"))
    late = [Failure("tool 'x'", "timeout", f"took longer than {n} s", "TimeoutError") for n in (1, 2)]
    assert failure_key(late[0]) == failure_key(late[1])
    assert failure_key(late[0]) != failure_key(Failure("tool 'x'", "timeout", "gone"))


def test_causes_are_counted_over_batches_and_survive_a_checkpoint():
    failures = Failures()
    for step, words in enumerate(("one", "two", "three")):
        broken = Episode(f"e{step}", Task("t"), failure=raised(words))
        failures.add([broken, Episode("fine", Task("t"))], f"step {step + 1}")
    again = Failures()
    again.load_state(json.loads(json.dumps(failures.state())))
    assert str(*again) == "environment 'x': ValueError: one ×3 (first in episode e0 of step 1)"


def test_the_number_of_causes_is_bounded_and_all_failures_are_counted(caplog):
    failures, firsts = Failures(), FirstFailureLogger(logging.getLogger("tests.failing"))
    for number in range(500):
        word = "".join(chr(97 + int(digit)) for digit in str(number))
        broken = Episode(word, Task("t"), failure=Failure("tool 'x'", "ValueError", f"{word}\n" * 1000))
        failures.add([broken], "step 1")
        firsts.tell(broken)
    assert len(failures) == MAX_CAUSES == len(caplog.records)
    assert sum(cause.count for cause in failures) == 500
    assert all(len(str(cause)) < 600 and "\n" not in str(cause) for cause in failures)


def test_control_characters_in_a_message_are_escaped():
    broken = Episode("e", Task("t"), failure=raised("\x1b[31m \ud83d [/bold] %s \n two"))
    failures = Failures()
    failures.add([broken], "step 1")
    shown = str(*failures)
    assert shown.encode("utf-8")
    assert "ValueError: \\x1b[31m \\ud83d [/bold] %s two ×1" in shown
    with pytest.raises(RunStopped) as stopped:
        FailureMonitor().check("step", 1, [broken] * 8)
    assert str(stopped.value).encode("utf-8")
    assert "\x1b" not in str(stopped.value)


def test_a_traceback_of_another_process_is_kept():
    ours = (
        f'Traceback (most recent call last):\n  File "{arborl.__file__}", line 3, in f\n    wait()\nValueError: ice\n'
    )
    theirs = (
        'Traceback (most recent call last):\n  File "/home/me/lake.py", line 9, in step\n    raise\nValueError: ice\n'
    )
    assert trim_traceback(ours + theirs) == theirs.strip()
    assert trim_traceback(ours) == ours.strip()  # better than nothing
    checked = ours.replace(arborl.__file__, recorder.__file__)  # our check of a value that user code returned
    assert trim_traceback(checked) == "ValueError: ice"
    chained = theirs + "\nThe above exception was the direct cause of the following exception:\n\n" + ours
    assert trim_traceback(chained) == theirs.strip()
    assert trim_traceback("") == ""


def test_few_failures_do_not_stop_a_run_and_many_in_a_row_do():
    def batch(failed, fine=0):
        broken = [Episode("b", Task("t"), failure=raised("ice")) for _ in range(failed)]
        return broken + [Episode("f", Task("t")) for _ in range(fine)]

    monitor = FailureMonitor()
    monitor.check("evaluation", 0, batch(1))  # one task alone
    monitor.check("step", 1, batch(8, 1))  # below nine in ten
    monitor.check("step", 2, batch(9, 1))
    monitor.check("step", 3, batch(9, 1))
    monitor.check("step", 4, batch(0, 9))
    monitor.check("step", 5, [])  # nothing was played: no news
    monitor.check("step", 6, batch(9, 1))
    monitor.check("step", 7, batch(9, 1))
    with pytest.raises(RunStopped):
        monitor.check("step", 8, batch(9, 1))
