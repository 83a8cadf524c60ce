"""The learning curve of a run, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from arborl.track.folder_files import read_json, replace_file
from arborl.track.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUCCESS, REWARD, HELD_OUT = "#2a9d5c", "#2f6fdb", "#d1495b"
COLOURS = [SUCCESS, REWARD, HELD_OUT, "#e0a030", "#7d5ba6", "#4aa3a2", "#8c564b", "#5f6368", "#d667a8", "#9a9b25"]
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a6",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "xtick.color": "#4a4f57",
    "ytick.color": "#4a4f57",
    "text.parse_math": False,
}
LONGEST = 200
"""Characters of a title."""


LARGEST = 1e30
"""Of a number that is drawn."""
MEASURED = ("perplexity", "accuracy")
"""What is measured on given rows besides the loss."""


def learning_curve(
    metrics_file: Path, out: Path, title: str, before: float | None = None, after: float | None = None
) -> Path:
    """Draw success and reward of the training episodes, step by step, and held-out success where it was measured. Of
    runs that learn from given rows, the loss; of demonstrations, their loss in the place of the reward.

    Args:
        metrics_file: a run's `metrics.jsonl`.
        out: the PNG to write; its folder is made.
        title: a line above the plots.
        before, after: held-out success before and after training, for metrics that do not hold evaluations.
    """
    rows = list(read_metrics(metrics_file))
    success, reward = series_of(rows, "episode/success"), series_of(rows, "reward/mean")
    loss, imitated = series_of(rows, "policy/loss"), series_of(rows, "sft/loss")
    if not success and not reward and not loss:
        raise ValueError(f"{metrics_file}: no step has 'episode/success' or 'reward/mean', so there is nothing to draw")

    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12))
        left, right = figure.subplots(1, 2)
        if success or reward:
            _plot(left, success, SUCCESS, "Success of training episodes")
            _mark(left, evaluations(rows) or _ends(success, before, after))
            left.set_ylim(-0.03, 1.05)
            left.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            _plot(right, imitated or reward, REWARD, "Loss of imitation" if imitated else "Reward of training episodes")
            _border(left, imitated, success)
        else:
            _plot(left, loss, REWARD, "Loss")
            _mark(left, evaluations(rows, "loss"), "{:.3f}")
            name = next((name for name in MEASURED if series_of(rows, f"evaluation/{name}")), MEASURED[0])
            _plot(right, series_of(rows, f"evaluation/{name}"), HELD_OUT, f"Held-out {name}")
        for axes in (left, right):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.suptitle(title[:LONGEST], x=0.014, ha="left", fontsize=13)
        return save_figure(figure, out)


def plot_runs(runs: Sequence[Path], out: Path, title: str) -> Path:
    """Success of several finished runs in one picture; held-out success at the ends of each curve.

    Example:
        compare([Path("runs/a"), Path("runs/b")], Path("both.png"), "two seeds")
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
        axes = figure.subplots()
        for colour, run in zip(COLOURS * len(runs), runs, strict=False):
            summary = read_json(run / "summary.json")
            series = series_of(list(read_metrics(run / "metrics.jsonl")), "episode/success")
            before, after = (summary[when].get("success") for when in ("before", "after"))
            measured = before is not None and after is not None
            label = f"{run.name}: {before:.0%} to {after:.0%} held out" if measured else run.name
            steps, values = zip(*series, strict=True)
            axes.plot(steps, values, color=colour, alpha=0.2, linewidth=1)
            axes.plot(steps, smooth(values), color=colour, linewidth=2.4, label=label)
            if measured:
                axes.plot([0, steps[-1]], [before, after], "D", color=colour, markersize=7, clip_on=False, zorder=5)
        axes.set(xlabel="step", ylim=(-0.03, 1.05), title=title)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        axes.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")
        return save_figure(figure, out)


def save_figure(figure: Figure, out: Path) -> Path:
    """Write a picture as PNG; a link in the file's place is refused."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    return replace_file(out, drawn.getvalue())


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over a window centred on each value, a tenth of the curve wide, narrower at the ends."""
    half = len(values) // 20 or int(len(values) >= 4)
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


Series = list[tuple[int, float]]


def series_of(rows: Sequence[dict[str, float | None]], name: str) -> Series:
    """The steps that have this metric, with its value."""
    found = [(row["step"], row.get(name)) for row in rows]
    return [(int(step), value) for step, value in found if step is not None and is_number(value)]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it can be drawn."""
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) < LARGEST


def _plot(axes: Axes, series: Series, colour: str, title: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    if not series:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="#9aa0a6")
        return
    steps, values = zip(*series, strict=True)
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1.2, marker="." if len(steps) < 4 else None)
    axes.plot(steps, smooth(values), color=colour, linewidth=2.6)


Point = tuple[int, float, float, float]
"""A step, what was measured on held-out tasks after it, and between what that lies."""


def evaluations(rows: Sequence[dict[str, float | None]], name: str = "success") -> list[Point]:
    """Every evaluation of a run: before the first step, on the way, after the last."""
    found = []
    for step, value in series_of(rows, f"evaluation/{name}"):
        row = next(row for row in rows if row["step"] == step)
        low, high = (row.get(f"evaluation/{name}_{end}") for end in ("low", "high"))
        found.append((step, value, value if low is None else low, value if high is None else high))
    return found


def _ends(series: Series, before: float | None, after: float | None) -> list[Point]:
    last = series[-1][0] if series else 1
    return [(where, value, value, value) for where, value in ((0, before), (last, after)) if value is not None]


def _border(axes: Axes, imitated: Series, played: Series) -> None:
    """Where demonstrations end and episodes begin."""
    if imitated and played and played[0][0] > imitated[0][0]:
        axes.axvspan(imitated[0][0] - 1, played[0][0] - 1, color="#eef1f4", zorder=0)
        axes.text(imitated[0][0], 0.98, "imitation", color="#6a7078", fontsize=9, va="top")


def _mark(axes: Axes, points: Sequence[Point], shown: str = "{:.0%}") -> None:
    """What was measured on held-out tasks, where it was."""
    if not points:
        return
    steps, values, low, high = (list(column) for column in zip(*points, strict=True))
    label = f"held out: {shown.format(values[0])}" + (f" to {shown.format(values[-1])}" if len(values) > 1 else "")
    down = [value - end for value, end in zip(values, low, strict=True)]
    up = [end - value for value, end in zip(values, high, strict=True)]
    line = ":" if len(points) > 2 else "none"
    axes.errorbar(
        steps, values, (down, up), fmt="D", markersize=7, color=HELD_OUT, linestyle=line, linewidth=1.2, capsize=3,
        clip_on=False, zorder=5, label=label,
    )  # fmt: skip
    axes.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="none", labelcolor=HELD_OUT, handletextpad=0.4)
