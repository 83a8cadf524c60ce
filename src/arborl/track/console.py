"""The terminal output of a run: a live panel in a terminal, one aligned line per step otherwise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from arborl.track.run_log import logs_above
from arborl.types import Metrics

BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS: dict[str, tuple[str, int, Callable[[float], str]]] = {
    "reward/mean": ("reward {}", 6, lambda value: f"{value:.3f}"),
    "episode/success": ("success {}", 4, lambda value: f"{value:.2f}"),
    "sft/loss": ("imitation loss {}", 5, lambda value: f"{value:.3f}"),
    "policy/loss": ("loss {}", 7, lambda value: f"{value:.4f}"),
    "policy/kl": ("KL {}", 7, lambda value: f"{value:.2g}"),
    "learner/grad_norm": ("grad {}", 7, lambda value: f"{value:.3g}"),
    "policy/entropy": ("entropy {}", 4, lambda value: f"{value:.2f}"),
    "reply": ("reply {} tok", 4, lambda value: f"{value:.0f}"),
    "rollout/sampled_per_second": ("{} tok/s", 6, lambda value: thousands(value)),
    "time/step": ("{} s/step", 5, lambda value: f"{value:.{1 if value >= 1 else 2}f}"),
}
"""Metrics of a step's line in order: form, width and text of the value. `reply` is the mean length of a reply."""
LOSSES = ("sft/loss", "policy/loss")
"""Columns of some steps only; all others stay when a step lacks the metric."""
GIVEN = ("loss", "perplexity", "accuracy", "margin")
"""Metrics of demonstrations and preferences."""
SHOWN = ("tasks", "success", "reward", "greedy_success", "greedy_reward", *GIVEN, "failed", "greedy_failed")
"""Metrics of held-out tasks, in this order."""
ENDS = ("_low", "_high")
"""Suffixes of interval bounds."""
HELD_OUT = "evaluation/"
UNMEASURED = "–"
RECENT = 10
"""Steps whose mean duration predicts the remaining time."""


class Console:
    """A tracker that prints a run; as a context manager it owns the display.

    Args:
        title_lines: description of the run; the first line is its name.
        start: number of finished steps, above 0 if resumed.
        step_remark: returns a short remark about a step's metrics, mostly empty.
        on_line: called with every line, also those that a live panel does not print.
    """

    def __init__(
        self,
        total_steps: int,
        title_lines: Sequence[str],
        start: int = 0,
        *,
        console: RichConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
        step_remark: Callable[[Metrics], str] | None = None,
        on_line: Callable[[str], None] = lambda text: None,
    ):
        self.total, self.title, self.step, self.step_remark = total_steps, tuple(title_lines), start, step_remark
        self.console, self.on_line = console or RichConsole(), on_line
        self.clock = clock
        self.start_time = self.last_log = clock()
        self.latest: Metrics = {}
        self.columns: set[str] = set()
        """Columns that a step has had."""
        self.activity = ""
        self.rewards: list[float] = []
        self.successes: list[float] = []
        self.seconds: list[float] = []
        self._exit_stack = ExitStack()
        self._live: Live | None = None
        self._end_time: float | None = None

    def __enter__(self) -> Self:
        self.start_time = self.last_log = self.clock()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, get_renderable=self._panel, refresh_per_second=4)
            self._exit_stack.enter_context(logs_above(self._live, self.console))
        for line in self.title:
            self._print_line(line)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, metrics: Metrics, step: int) -> None:
        known = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        held_out = {name.removeprefix(HELD_OUT): known[name] for name in known if name.startswith(HELD_OUT)}
        if any(not name.startswith(HELD_OUT) for name in metrics):
            self._step(known, step)
        if held_out:
            self.note("  ".join([self._count(step), *held_out_fields(held_out)]))

    def _step(self, metrics: Metrics, step: int) -> None:
        now = self.clock()
        self.latest = metrics
        self.seconds.append(self.latest.get("time/step", now - self.last_log))
        self.step, self.last_log, self.activity = step, now, ""
        for name, history in (("reward/mean", self.rewards), ("episode/success", self.successes)):
            if name in self.latest:
                history.append(self.latest[name])
        if "episode/count" in metrics and metrics.get("episode/failed", 0.0) >= metrics["episode/count"]:
            self.columns.add("reward/mean")  # unmeasured, since all episodes failed
        line = self._line()
        self.columns |= {name for name in COLUMNS if name in metrics} - set(LOSSES)
        self.columns |= {"reply"} if "episode/calls" in metrics else set()
        self._print_line(line)

    def note(self, text: str) -> None:
        self.on_line(text)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, text: str) -> None:
        """Show the current activity in a terminal; the next one replaces it."""
        self.activity = text
        self.on_line(text)

    def close(self) -> None:
        self.activity = ""
        self._end_time = self._end_time or self.clock()
        self._exit_stack.close()
        self._live = None

    @property
    def left(self) -> float | None:
        """Predicted seconds to the end of the run; None before the first step."""
        recent = self.seconds[-RECENT:]
        return (self.total - self.step) * sum(recent) / len(recent) if recent else None

    def _print_line(self, text: str) -> None:
        """Print a line unless a live panel shows its content."""
        if self._live is None:
            self.note(text)
        else:
            self.on_line(text)

    def _count(self, step: int) -> str:
        return f"step {step:>{max(3, len(str(self.total)))}}/{self.total}"

    def _line(self) -> str:
        left = [f"left {span(self.left)}"] if self.left is not None else []
        return "  ".join([self._count(self.step), *fields(self.latest, self.columns), *left, *self._remarks()])

    def _remarks(self) -> list[str]:
        remark = self.step_remark(self.latest) if self.step_remark is not None and self.latest else ""
        return [remark] if remark else []

    def _panel(self) -> RenderableType:
        parts: list[RenderableType] = [Text(line, style="dim") for line in self.title[1:]]
        parts += [self._bar(), *([self._curves()] if self.rewards or self.successes else [])]
        rest = {name: value for name, value in self.latest.items() if name not in ("reward/mean", "episode/success")}
        parts += [Text("   ".join(" ".join(shown.split()) for shown in fields(rest)))] if rest else []
        parts += [Text(remark, style="yellow") for remark in self._remarks()]
        parts += [Text(self.activity, style="italic dim")] if self.activity else []
        name = Text(self.title[0] if self.title else "training", style="bold")
        style: Any = {"title_align": "left", "box": box.ROUNDED, "border_style": "dim"}
        return Panel(Group(*parts), title=name, width=self._width, **style)

    @property
    def _width(self) -> int:
        return min(self.console.width, 100)

    def _bar(self) -> RenderableType:
        elapsed = (self._end_time or self.clock()) - self.start_time
        times = f"elapsed {span(elapsed)}" + (f"  left {span(self.left)}" if self.left is not None else "")
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(f"step {self.step}/{self.total}", ProgressBar(total=self.total, completed=self.step), times)
        return row

    def _curves(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        width = 0 if self.console.options.ascii_only else max(self._width - 26, 8)
        if self.rewards:
            low, high = min(self.rewards), max(self.rewards)
            rows.add_row("reward", f"{self.rewards[-1]:.3f}", Text(sparkline(self.rewards, width, low, high), "cyan"))
        if self.successes:
            line = Text(sparkline(self.successes, width, 0.0, 1.0), "green")
            rows.add_row("success", f"{self.successes[-1]:.1%}", line)
        return rows


def fields(metrics: Metrics, shown_before: Collection[str] = ()) -> list[str]:
    """The main metrics of a step as aligned texts. A metric of an earlier step that this one lacks is `–`, so that
    columns keep their places."""
    values = dict(metrics)
    if metrics.get("episode/calls"):
        values["reply"] = metrics.get("episode/sampled", 0.0) / metrics["episode/calls"]
    if {"reward/mean", "sft/loss"} & metrics.keys():
        values.pop("policy/loss", None)
    texts = []
    for name, (form, width, text_of) in COLUMNS.items():
        if name in values or name in shown_before:
            texts.append(form.format(f"{text_of(values[name]) if name in values else UNMEASURED:>{width}}"))
    failed = metrics.get("episode/failed", 0.0)
    return texts + ([f"failed {failed:g}"] if failed else [])


def held_out_fields(metrics: Metrics) -> list[str]:
    """The metrics of an evaluation as texts; only the first has an interval."""
    hidden = ("reward_", "greedy_success_") if "success" in metrics else ("greedy_reward_",)
    without_intervals = {name: value for name, value in metrics.items() if not name.startswith(hidden)}
    names = [name for name in shown(metrics) if name not in ("tasks", "greedy_failed")]
    texts = [f"{name.replace('_', ' ')} {measure(name, without_intervals)}" for name in names]
    return [f"held out, {measure('tasks', metrics)} tasks:", *texts]


def shown(*measured: Mapping[str, float]) -> list[str]:
    """The held-out metrics to show: all that were measured, but the greedy reward only without greedy success, and
    failures only if there are any."""
    names = [name for name in SHOWN if any(name in metrics for metrics in measured)]
    names = [name for name in names if name != "greedy_reward" or "greedy_success" not in names]
    return [name for name in names if not name.endswith("failed") or any(metrics.get(name) for metrics in measured)]


def thousands(value: float) -> str:
    """4120 -> `4.1k`, 2500000 -> `2.5M`."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def span(seconds: float) -> str:
    """118 -> `1:58`, 3723 -> `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """A curve in one line of at most `width` characters."""
    size = min(width, len(values))
    cells = [values[len(values) * i // size : len(values) * (i + 1) // size] for i in range(size)]
    share = [(sum(cell) / len(cell) - low) / ((high - low) or 1.0) for cell in cells]
    return "".join(BLOCKS[round(min(max(part, 0.0), 1.0) * (len(BLOCKS) - 1))] for part in share)


def table_before_after(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """Held-out metrics before and after training, with 95 % intervals."""
    has_episodes = (before or after) and not {*GIVEN} & {*before, *after}
    all_failed = has_episodes and "reward" not in {**before, **after}
    names = ["success", "reward"] if all_failed else []  # shown as `–`
    names = [name for name in SHOWN if name in names or name in shown(before, after)]
    names += [name for name in {**before, **after} if name.startswith("reward/") and not name.endswith(ENDS)]
    table = Table(box=box.SIMPLE_HEAD, title="held-out tasks, with 95 % intervals", title_justify="left")
    table.add_column("", no_wrap=True)
    rows = {"before": [measure(name, before) for name in names], "after": [measure(name, after) for name in names]}
    for name, *cells in zip(names, *rows.values(), strict=True):
        title = name.replace("_", " ")
        words = " ".join([title, *cells]).split()  # a narrow terminal wraps between words only
        table.add_column(title, justify="right", min_width=max(map(len, words)))
    table.add_row("before", *rows["before"])
    table.add_row("after", *rows["after"], style="bold")
    return table


def measure(name: str, metrics: Mapping[str, float]) -> str:
    """A rate in per cent, a count as an integer, other metrics with three digits; `–` if not measured."""
    value = metrics.get(name)
    if value is None:
        return UNMEASURED
    if name.endswith(("failed", "tasks")):
        return f"{value:.0f}"
    rate = name.endswith(("success", "accuracy"))
    shown = f"{value:.1%}" if rate else f"{value:.3f}"
    low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return shown
    until = "–" if low >= 0 else " to "  # a dash beside a minus is hard to read
    ends = (f"{100 * end:.1f}" if rate else f"{end:.2f}" for end in (low, high))
    return f"{shown} ({until.join(ends)})"
