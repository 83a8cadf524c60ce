"""What a person sees of a run."""

import io
import logging
import re
import sys

import pytest
from rich.console import Console as RichConsole

from arborl.track import Console, table_before_after
from arborl.track.console import BLOCKS, fields, held_out_fields, span, sparkline, thousands

METRICS = {
    "reward/mean": 0.412, "episode/success": 0.41, "policy/entropy": 0.83, "rollout/sampled_per_second": 4120.0,
    "time/step": 2.1, "episode/failed": 0.0, "learner/grad_norm": 0.7, "policy/kl": 0.00123, "episode/sampled": 96.0,
    "episode/calls": 3.0,
}  # fmt: skip


def piped():
    return RichConsole(file=io.StringIO(), width=60)


def terminal():
    return RichConsole(file=io.StringIO(), width=90, force_terminal=True, _environ={"TERM": "xterm"})


def plain(console):
    """What was written, without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_without_a_terminal_a_step_is_one_line_however_narrow():
    rich = piped()
    with Console(60, ["frozen-lake", "seedling"], console=rich) as console:
        console.log(METRICS, step=3)
    assert rich.file.getvalue().splitlines() == [
        "frozen-lake",
        "seedling",
        "step   3/60  reward  0.412  success 0.41  KL  0.0012  grad     0.7  entropy 0.83  reply   32 tok    4.1k tok/s"
        "    2.1 s/step  left 2:00",
    ]


def test_lines_of_a_run_are_aligned():
    rich = piped()
    with Console(100, [], console=rich) as console:
        for step, (reward, speed) in enumerate([(0.5, 12_345.0), (-0.25, 7.0)]):
            console.log({**METRICS, "reward/mean": reward, "rollout/sampled_per_second": speed}, step)
    first, second = rich.file.getvalue().splitlines()
    words = ("success", "KL", "grad", "reply", "tok/s", "left")
    assert [first.index(word) for word in words] == [second.index(word) for word in words]


def test_a_metric_that_a_later_step_lacks_keeps_its_column():
    rich = piped()
    with Console(100, [], console=rich) as console:
        console.log(METRICS, 1)
        console.log({name: value for name, value in METRICS.items() if name in ("policy/entropy", "time/step")}, 2)
    first, second = rich.file.getvalue().splitlines()
    assert [first.index(word) for word in ("entropy", "s/step")] == [
        second.index(word) for word in ("entropy", "s/step")
    ]
    assert second.startswith("step   2/100  reward      –  success    –  KL       –  grad       –  entropy 0.83")


EVALUATION = {"evaluation/tasks": 9.0, "evaluation/success": 0.5, "evaluation/failed": 0.0}


@pytest.mark.parametrize(
    ("logged", "lines"),
    [
        ([(10, {"reward/mean": float("nan"), "time/step": 1.0})], ["step  10/10    1.0 s/step  left 0:00"]),
        (
            [(1, {"episode/count": 8.0, "episode/failed": 8.0, "time/step": 1.0})],
            ["step   1/10  reward      –    1.0 s/step  failed 8  left 0:09"],
        ),
        (
            [(0, EVALUATION), (1, {"time/step": 1.0} | EVALUATION)],
            [
                "step   0/10  held out, 9 tasks:  success 50.0%",
                "step   1/10    1.0 s/step  left 0:09",
                "step   1/10  held out, 9 tasks:  success 50.0%",
            ],
        ),
    ],
    ids=["not finite", "all episodes failed", "evaluations"],
)
def test_what_is_not_measured_is_left_out_or_a_dash_and_an_evaluation_is_a_line(logged, lines):
    rich = piped()
    with Console(10, [], console=rich, clock=lambda: 0.0) as console:
        for step, metrics in logged:
            console.log(metrics, step=step)
    assert rich.file.getvalue().splitlines() == lines


def test_a_resumed_run_continues_counting_notes_stay_and_progress_does_not_reach_a_pipe():
    console = Console(60, [], start=40, console=piped())
    assert console.step == 40
    console.log({"time/step": 2.0}, step=41)
    assert (console.step, console.left) == (41, 38.0)
    rich = piped()
    with Console(10, [], console=rich) as console:
        console.progress("evaluating 3/200")
        console.note("checkpoint [step-000010] written")
    assert rich.file.getvalue() == "checkpoint [step-000010] written\n"


def test_on_a_terminal_the_panel_shows_title_progress_numbers_and_curves():
    rich = terminal()
    with Console(60, ["frozen-lake", "seedling, grpo"], console=rich) as console:
        for step in range(8):
            console.log({**METRICS, "reward/mean": step / 8, "episode/success": step / 8}, step + 1)
        console.progress("rolling out 37/128")
        console._live.refresh()
    shown = plain(rich)
    parts = ("frozen-lake", "seedling, grpo", "step 8/60", "left 1:49", "0.875", "4.1k tok/s", "rolling out 37/128")
    assert all(part in shown for part in parts)
    assert BLOCKS in shown


@pytest.mark.parametrize("terminal_handler", [False, True])
def test_warnings_logged_under_the_panel_are_printed_whole_above_it(terminal_handler, monkeypatch):
    rich, outside = terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", outside)
    logger = logging.getLogger("tests.console")
    handler = logging.StreamHandler()  # a library that took hold of stderr before the display came up
    if terminal_handler:
        logging.root.addHandler(handler)
    try:
        with Console(60, ["lake"], console=rich) as console:
            logger.warning("worker 3 is slow")
            console._live.refresh()
        assert outside.getvalue() == ""
        assert plain(rich).count("worker 3 is slow") == 1
        logger.warning("after")
        assert ("after" in outside.getvalue()) == terminal_handler
    finally:
        logging.root.removeHandler(handler)


def test_closing_twice_and_logging_without_a_display_are_fine():
    rich = terminal()
    console = Console(3, [], console=rich)
    console.log({"reward/mean": 1.0}, 0)
    console.close()
    console.close()
    assert "reward  1.000" in plain(rich)


def test_a_sparkline_spreads_its_range_and_shares_cells_when_there_are_many():
    assert sparkline(range(8), 8, 0, 7) == BLOCKS
    assert sparkline(range(800), 8, 0, 799)[0] == BLOCKS[0]
    assert len(sparkline(range(801), 8, 0, 800)) == 8
    assert sparkline([0.5, 0.5], 10, 0.5, 0.5) == BLOCKS[0] * 2
    assert sparkline([], 10, 0, 1) == sparkline([1.0], 0, 0, 1) == ""


def test_numbers_for_people():
    assert [thousands(value) for value in (0, 412, 4120, 2_500_000)] == ["0", "412", "4.1k", "2.5M"]
    assert [span(value) for value in (0, 59.6, 118, 3723)] == ["0:00", "1:00", "1:58", "1:02:03"]


def test_before_and_after_are_rows_with_intervals_and_what_was_not_measured_is_a_dash():
    rich = RichConsole(file=io.StringIO(), width=100)
    before = {"tasks": 4.0, "success": 0.18, "success_low": 0.13, "success_high": 0.24, "reward": 0.17, "failed": 0.0}
    after = {"tasks": 4.0, "success": 0.93, "reward": -0.9, "reward_low": -1.0, "reward_high": 0.5}
    rich.print(table_before_after(before, after | {"greedy_success": 1.0}))
    shown = [line.split() for line in rich.file.getvalue().splitlines() if line.strip()]
    assert ["tasks", "success", "reward", "greedy", "success"] in shown
    assert ["before", "4", "18.0%", "(13.0–24.0)", "0.170", "–"] in shown
    assert ["after", "4", "93.0%", "-0.900", "(-1.00", "to", "0.50)", "100.0%"] in shown


def test_a_run_without_success_shows_its_rewards_only():
    rich = RichConsole(file=io.StringIO(), width=100)
    measured = {"tasks": 4.0, "reward": 0.3, "reward_low": 0.2, "reward_high": 0.4, "greedy_reward": 0.5, "failed": 0.0}
    rich.print(table_before_after(measured, measured))
    shown = [line.split() for line in rich.file.getvalue().splitlines() if line.strip()]
    assert ["tasks", "reward", "greedy", "reward"] in shown
    assert ["after", "4", "0.300", "(0.20–0.40)", "0.500"] in shown
    texts = " ".join(held_out_fields(measured))
    assert texts == "held out, 4 tasks: reward 0.300 (0.20–0.40) greedy reward 0.500"
    assert "success" not in " ".join(fields({"reward/mean": 0.3, "episode/count": 8.0, "episode/failed": 0.0}))


def test_in_a_narrow_terminal_no_number_of_before_and_after_is_cut_off():
    measured = {"tasks": 20, "success": 0.6, "success_low": 0.387, "success_high": 0.781, "reward": -0.1,
                "reward_low": -0.04, "reward_high": 0.24, "greedy_success": 0.9, "greedy_success_low": 0.699,
                "greedy_success_high": 0.972, "failed": 9, "greedy_failed": 13}  # fmt: skip
    rich = piped()
    rich.print(table_before_after(measured, measured))
    assert "…" not in rich.file.getvalue()
    assert rich.file.getvalue().count("(69.9–97.2)") == 2


def test_a_run_whose_episodes_all_failed_has_dashes_and_counts_in_its_table():
    rich = RichConsole(file=io.StringIO(), width=100)
    rich.print(table_before_after({"tasks": 20.0, "failed": 20.0}, {}))
    shown = [line.split() for line in rich.file.getvalue().splitlines() if line.strip()]
    assert ["tasks", "success", "reward", "failed"] in shown
    assert ["before", "20", "–", "–", "20"] in shown
    assert ["after", "–", "–", "–", "–"] in shown


def test_what_there_is_to_say_about_a_step_ends_its_line_and_stands_in_the_panel():
    for rich in (piped(), terminal()):
        with Console(10, [], console=rich, step_remark=lambda metrics: f"odd {metrics['a']:g}") as console:
            console.log({"a": 7.0}, step=1)
            if console._live:
                console._live.refresh()
        assert "odd 7" in plain(rich)
