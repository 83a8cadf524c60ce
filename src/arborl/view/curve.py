"""Plots of a run: learning curve, health, sources; several runs in one plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from arborl.track.folder_files import read_json, replace_file
from arborl.track.jsonl import read_metrics
from arborl.view.web.folders import read_summary

SUCCESS, REWARD, HELD_OUT = "#2a9d5c", "#2f6fdb", "#d1495b"

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
MAX_TITLE = 200
"""Characters of a title."""


MAX_VALUE = 1e30
"""Largest plotted number."""
MEASURED = ("perplexity", "accuracy")
"""Held-out metrics of demonstrations and preferences besides the loss."""


def learning_curve(
    metrics_file: Path, out: Path, title: str, before: float | None = None, after: float | None = None
) -> Path:
    """Plot success and reward of the training episodes and held-out success; for demonstrations, the loss.

    `before` and `after` are the held-out success of a run whose metrics have no evaluations.
    """
    rows = list(read_metrics(metrics_file))
    success, reward = series_of(rows, "episode/success"), series_of(rows, "reward/mean")
    loss, imitation_loss = series_of(rows, "policy/loss"), series_of(rows, "sft/loss")
    if not success and not reward and not loss:
        raise ValueError(f"{metrics_file}: no step has 'episode/success' or 'reward/mean', nothing to plot")

    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12))
        left, right = figure.subplots(1, 2)
        if success or reward:
            _plot(left, success, SUCCESS, "Success of training episodes")
            _plot_evaluations(left, evaluations(rows) or _ends(success, before, after))
            left.set_ylim(-0.03, 1.05)
            left.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            _plot(
                right,
                imitation_loss or reward,
                REWARD,
                "Loss of imitation" if imitation_loss else "Reward of training episodes",
            )
            _shade_imitation(left, imitation_loss, success)
        else:
            _plot(left, loss, REWARD, "Loss")
            _plot_evaluations(left, evaluations(rows, "loss"), "{:.3f}")
            name = next((name for name in MEASURED if series_of(rows, f"evaluation/{name}")), MEASURED[0])
            _plot(right, series_of(rows, f"evaluation/{name}"), HELD_OUT, f"Held-out {name}")
        for axes in (left, right):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.suptitle(title[:MAX_TITLE], x=0.014, ha="left", fontsize=13)
        return save_figure(figure, out)


def plot_runs(runs: Sequence[Path], out: Path, title: str) -> Path:
    """Plot the success of several finished runs, with held-out success at the ends."""
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
    """Write a figure as PNG; a link at the path is refused."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    return replace_file(out, drawn.getvalue())


def smooth(values: Sequence[float]) -> list[float]:
    """Moving average over a tenth of the curve, narrower at the ends."""
    half = len(values) // 20 or int(len(values) >= 4)
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


Series = list[tuple[int, float]]


def series_of(rows: Sequence[dict[str, float | None]], name: str) -> Series:
    found = [(row["step"], row.get(name)) for row in rows]
    return [(int(step), value) for step, value in found if step is not None and is_number(value)]


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) < MAX_VALUE


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
"""Step, held-out value and its interval."""


def evaluations(rows: Sequence[dict[str, float | None]], name: str = "success") -> list[Point]:
    found = []
    for step, value in series_of(rows, f"evaluation/{name}"):
        row = next(row for row in rows if row["step"] == step)
        low, high = (row.get(f"evaluation/{name}_{end}") for end in ("low", "high"))
        found.append((step, value, value if low is None else low, value if high is None else high))
    return found


def _ends(series: Series, before: float | None, after: float | None) -> list[Point]:
    last = series[-1][0] if series else 1
    return [(where, value, value, value) for where, value in ((0, before), (last, after)) if value is not None]


def _shade_imitation(axes: Axes, imitation_loss: Series, played: Series) -> None:
    """Shade the steps of demonstrations."""
    if imitation_loss and played and played[0][0] > imitation_loss[0][0]:
        axes.axvspan(imitation_loss[0][0] - 1, played[0][0] - 1, color="#eef1f4", zorder=0)
        axes.text(imitation_loss[0][0], 0.98, "imitation", color="#6a7078", fontsize=9, va="top")


def _plot_evaluations(axes: Axes, points: Sequence[Point], shown: str = "{:.0%}") -> None:
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


TOOLS = "episode/tool/"
MAX_LINES, MAX_LABEL = 16, 60
"""Lines of a panel; characters of a label."""
COUNTS = ("calls", "used", "offered", "failed")


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: title, metrics by label, and whether they are shares."""

    title: str
    lines: dict[str, str]
    share: bool = True
    has_legend: bool = True


PANELS = (
    Panel("Zero-variance groups", {"zero variance": "group/zero_variance"}, has_legend=False),
    Panel("Entropy, nats per token", {"entropy": "policy/entropy"}, share=False, has_legend=False),
    Panel("Replies", {"valid": "episode/valid", "cut off": "call/cut_off"}),
    Panel("Failed episodes", {"failed": "episode/failed"}, share=False, has_legend=False),
)


def plot_health(metrics_file: Path, out: Path) -> Path | None:
    """Plot zero-variance groups, entropy, valid messages, failures, stop reasons and tool failures by kind."""
    rows = [row for row in read_metrics(metrics_file) if "episode/count" in row] if metrics_file.exists() else []
    panels = [panel for panel in (*PANELS, _stops(rows), _tools(rows)) if _has_values(rows, panel)]
    if not panels:
        return None

    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        wide, high = min(len(panels), 3), -(-len(panels) // 3)
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        figure = Figure(figsize=(11 / 3 * wide, 2.8 * high), dpi=120, layout=layout)
        for axes, panel in zip(figure.subplots(high, wide, squeeze=False).flat, panels, strict=False):
            _draw_panel(axes, rows, panel)
        for axes in figure.axes[len(panels) :]:
            axes.set_axis_off()
        return save_figure(figure, out)


def _stops(rows: Sequence[dict[str, Any]]) -> Panel:
    return Panel("How episodes end", _nonzero_metrics(rows, "stop/"))


def _tools(rows: Sequence[dict[str, Any]]) -> Panel:
    kinds = {kind: name for kind, name in _nonzero_metrics(rows, TOOLS).items() if kind not in COUNTS}
    return Panel("Failed tool calls per episode", kinds, share=False)


def _nonzero_metrics(rows: Sequence[dict[str, Any]], start: str) -> dict[str, str]:
    """Metrics with this prefix that are ever above 0, by the rest of their names."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if name.startswith(start) and value)
    return {name.removeprefix(start)[:MAX_LABEL]: name for name in list(names)[:MAX_LINES]}


def _has_values(rows: Sequence[dict[str, Any]], panel: Panel) -> bool:
    return any(series_of(rows, name) for name in panel.lines.values())


def _draw_panel(axes: Axes, rows: Sequence[dict[str, Any]], panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_title(panel.title, fontsize=11)
    for colour, (label, name) in zip(COLOURS * len(panel.lines), panel.lines.items(), strict=False):
        series = series_of(rows, name)
        if not series:
            continue
        steps, values = zip(*series, strict=True)
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1, marker="." if len(steps) < 4 else None)
        axes.plot(steps, smooth(values), color=colour, linewidth=2.2, label=label.replace("_", " "))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if panel.share:
        axes.set_ylim(-0.04, 1.06)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    else:
        axes.set_ylim(bottom=0)
    if panel.has_legend:
        axes.legend(loc="best", fontsize=9, frameon=True, framealpha=0.85, edgecolor="none")


MAX_SOURCES = 40
SHARE = ("data/", "/share")


def sources_of(metrics_file: Path) -> list[str]:
    rows = read_metrics(metrics_file) if metrics_file.exists() else iter(())
    return next((names for row in rows if (names := _sources_in_row(row))), [])


def _sources_in_row(row: dict[str, float]) -> list[str]:
    start, end = SHARE
    names = [key[len(start) : -len(end)] for key in row if key.startswith(start) and key.endswith(end)]
    return names[:MAX_SOURCES]


def plot_sources(run: Path, out: Path, title: str) -> Path:
    """Plot the share of each source in the batches, and the success of its training episodes."""
    names = sources_of(run / "metrics.jsonl")
    if not names:
        raise ValueError(f"{run}: no step has the share of a source, nothing to plot")
    rows = [row for row in read_metrics(run / "metrics.jsonl") if _sources_in_row(row)]
    steps_drawn = [row["step"] for row in rows]
    summary = read_summary(run)

    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import PercentFormatter

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12))
        left, right = figure.subplots(1, 2)
        below = [0.0] * len(rows)
        for colour, name in zip(COLOURS * len(names), names, strict=False):
            drawn = dict(series_of(rows, f"data/{name}/share"))
            shares = [drawn.get(place, 0.0) for place in steps_drawn]
            left.bar(steps_drawn, shares, 1.0, bottom=below, color=colour, linewidth=0, label=name)
            below = [low + share for low, share in zip(below, shares, strict=True)]
            success = series_of(rows, f"data/{name}/success")
            steps, values = zip(*success, strict=True) if success else ((), ())
            held = [(summary.get(when) or {}).get(f"success/{name}") for when in ("before", "after")]
            label = name if None in held else f"{name}: {held[0]:.0%} to {held[1]:.0%} held out"
            right.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            right.plot(steps, smooth(values), color=colour, linewidth=2.4, label=label)
            if None not in held:
                right.plot([0, steps_drawn[-1]], held, "D", color=colour, markersize=7, clip_on=False, zorder=5)
        left.set(xlabel="step", ylim=(0, 1), xlim=(steps_drawn[0] - 0.5, steps_drawn[-1] + 0.5))
        left.set_title("Share of each batch", fontsize=11)
        right.set(xlabel="step", ylim=(-0.03, 1.05))
        right.set_title("Success of training episodes", fontsize=11)
        for axes, place in ((left, "upper right"), (right, "lower right")):
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            axes.legend(loc=place, frameon=True, framealpha=0.9, edgecolor="none")
        figure.suptitle(title[:MAX_TITLE], x=0.014, ha="left", fontsize=13)
        return save_figure(figure, out)
